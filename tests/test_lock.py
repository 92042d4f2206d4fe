"""What is installed is what was tested: pins, hashes and bounds say the same."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import write_lock

ROOT = Path(__file__).parents[1]
AGAIN = "the lock is old: python scripts/write_lock.py"


def pins(name: str) -> dict[str, str]:
    found = re.findall(
        r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
    )
    return {canonicalize_name(package): version for package, version in found}


def test_the_locks_hold_what_is_needed_in_the_pinned_versions() -> None:
    constraints = pins("constraints.txt")
    for name, extras in (("requirements.txt", ()), ("requirements-dev.txt", ("dev",))):
        locked = pins(name)
        wanted = {"setuptools"} | write_lock.needed("videotune", extras)
        assert set(locked) - set(write_lock.ELSEWHERE) == wanted - set(write_lock.ELSEWHERE), (
            AGAIN
        )
        assert {package: version for package, version in locked.items() if constraints.get(package) != version} in (
            {}, write_lock.ELSEWHERE,
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
    users = [
        *project["dependencies"],
        *(text for name in ("tensorboard",) for text in extras[name]),
    ]
    tested = pins("constraints.txt")
    for need in map(Requirement, users):
        assert {one.operator for one in need.specifier} >= {">=", "<"}, (
            f"{need} has no upper bound"
        )
        assert tested[canonicalize_name(need.name)] in need.specifier, need
