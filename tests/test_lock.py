"""What is installed is what was tested: pins, hashes and bounds say the same."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
AGAIN = "the lock is old: python scripts/write_lock.py"


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_lock", ROOT / "scripts" / "write_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_locks_hold_what_is_needed_in_the_pinned_versions() -> None:
    writer, constraints = script(), pins("constraints.txt")
    for name, extras in (("requirements.txt", ()), ("requirements-dev.txt", ("dev",))):
        locked = pins(name)
        wanted = {"setuptools"} | writer.needed("videotune", extras)
        assert set(locked) - set(writer.ELSEWHERE) == wanted - set(writer.ELSEWHERE), AGAIN
        assert {package: version for package, version in locked.items() if constraints.get(package) != version} in (
            {}, writer.ELSEWHERE,
        ), AGAIN  # fmt: skip
        assert "torch" not in locked


def test_every_locked_package_has_hashes() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for block in re.split(r"\n(?=[a-z])", text)[1:]:
            assert "--hash=sha256:" in block, block.splitlines()[0]
        assert not re.search(r"https?://|^-", text, re.MULTILINE), "no address of an index"


def test_every_package_that_users_install_has_bounds_which_hold_the_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    users = [*project["dependencies"], *(text for name in ("studio", "tensorboard") for text in extras[name])]
    tested = pins("constraints.txt")
    for need in map(Requirement, users):
        assert {one.operator for one in need.specifier} == {">=", "<"}, f"{need} has no upper bound"
        assert tested[canonicalize_name(need.name)] in need.specifier, need
