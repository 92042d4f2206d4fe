"""Write requirements.lock from the installed packages: python scripts/write_lock.py.

The lock pins every package with the hashes of all its files on the package index. First
come the packages that videotune needs, then, below ``DEVELOPMENT``, those that only its
tests and tools need. torch is named in a comment, without hashes: the user chooses its
build, and pip installs it first.
"""

import subprocess
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"
ALWAYS = {"setuptools", "colorama"}
"""setuptools builds videotune. colorama is needed on Windows, so it is not found as a
dependency here.
"""

TORCH_BUILD = ("nvidia-", "cuda-", "triton")
"""How the names of packages begin that only a CUDA build of torch needs; they come with
it.
"""

HEAD = "# Written by scripts/write_lock.py. torch goes first, from the index that has the build you want:\n"
DEVELOPMENT = "# for development\n"
"""The Makefile and the Dockerfile cut the file here for an installation without tests
and tools.
"""


def required_packages(name: str, extras: Iterable[str] = ()) -> set[str]:
    """Return the names of all packages that ``name`` with these extras needs on this
    machine, without torch.
    """
    packages: set[str] = set()
    todo = [(name, frozenset(extras))]
    seen = set(todo)
    while todo:
        package, active_extras = todo.pop()
        for text in metadata.requires(package) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            applies = marker is None or any(
                marker.evaluate({"extra": extra}) for extra in (*active_extras, "")
            )
            if not applies:
                continue

            dependency = canonicalize_name(requirement.name)
            if package == "torch" and dependency.startswith(TORCH_BUILD):
                continue
            if dependency not in ("torch", "videotune"):
                packages.add(dependency)
            step = (dependency, frozenset(requirement.extras))
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return packages


def lock(pins: Iterable[str]) -> str:
    """Return the pins with the hashes of every file of each version, for any system and
    Python.
    """
    options = ["--universal", "--no-deps", "--generate-hashes"]
    options += ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.txt"
        target = Path(folder) / "out.txt"
        source.write_text("\n".join(sorted(pins)) + "\n", encoding="utf-8")
        command = [
            "uv",
            "pip",
            "compile",
            *options,
            str(source),
            "--output-file",
            str(target),
        ]
        subprocess.run(command, check=True)
        return target.read_text(encoding="utf-8")


def installed_pins(packages: Iterable[str]) -> list[str]:
    """Return ``name==version`` of installed packages."""
    return [f"{name}=={metadata.version(name)}" for name in packages]


def main() -> None:
    """Write the lock."""
    runtime = ALWAYS | required_packages("videotune")
    development = required_packages("videotune", ["dev"]) - runtime
    torch_version = metadata.version("torch").partition("+")[0]

    parts = [HEAD, f"# torch=={torch_version}\n", lock(installed_pins(runtime))]
    parts += [DEVELOPMENT, lock(installed_pins(development))]
    LOCK.write_text("".join(parts), encoding="utf-8")
    print(f"{len(runtime)} packages, and {len(development)} for development")


if __name__ == "__main__":
    main()
