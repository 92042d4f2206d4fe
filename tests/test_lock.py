"""The lock, the installed packages and the bounds in pyproject.toml agree."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import write_lock

ROOT = Path(__file__).parents[1]
LOCK = write_lock.LOCK.read_text(encoding="utf-8")
RUNTIME, _, DEVELOPMENT = LOCK.partition(write_lock.DEVELOPMENT)
REWRITE = "the lock is old: python scripts/write_lock.py"


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def test_the_lock_holds_what_is_needed() -> None:
    runtime = write_lock.ALWAYS | write_lock.required_packages("videotune")
    development = write_lock.required_packages("videotune", ["dev"]) - runtime

    assert set(pins(RUNTIME)) == runtime, REWRITE
    assert set(pins(DEVELOPMENT)) == development, REWRITE
    assert "torch" not in pins(LOCK)


def test_every_locked_package_has_hashes_and_the_file_names_no_index() -> None:
    blocks = re.findall(r"^[\w.-]+==(?:.*\\\n)*.*", LOCK, re.MULTILINE)
    assert len(blocks) == len(pins(LOCK))
    for block in blocks:
        assert "--hash=sha256:" in block, block.splitlines()[0]
    assert not re.search(r"https?://|^-", LOCK, re.MULTILINE)


def test_every_package_that_users_install_has_bounds_which_hold_the_tested_version() -> (
    None
):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *extras["tensorboard"],
        *extras["s3"],
    ]
    (torch_version,) = re.findall(r"^# torch==(\S+)$", LOCK, re.MULTILINE)
    tested = pins(LOCK) | {"torch": torch_version}

    for requirement in map(Requirement, requirements):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators >= {">=", "<"}, f"{requirement} has no upper bound"
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, (
            requirement
        )
