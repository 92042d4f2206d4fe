"""Writes constraints.txt, requirements.txt, requirements-dev.txt from what is installed: python scripts/write_lock.py.

constraints.txt pins every version. The other two are what `make` installs from: the packages that videotune needs, and
those that its tests need as well, each with the hashes of all its files on the package index. torch is in neither, and
nothing that torch alone needs: which build of it fits is the user's choice, and pip installs it first.
"""

import subprocess
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"colorama": "0.4.6"}
"""Packages that are needed on Windows alone, so that they are not installed where this runs."""

HEAD = "# The exact versions that the tests passed with; pip install -c constraints.txt …\n"
LOCK_HEAD = "# Written by scripts/write_lock.py; torch goes first: pip install -c constraints.txt torch\n"


def needed(name: str, extras: Iterable[str] = ()) -> set[str]:
    """The names of all packages that a package with these extras needs here, but for torch and what it alone needs."""
    found: set[str] = set()
    todo = [(name, frozenset(extras))]
    seen = set(todo)
    while todo:
        package, wanted = todo.pop()
        for text in metadata.requires(package) or ():
            need = Requirement(text)
            own = canonicalize_name(need.name)
            here = any(
                need.marker is None or need.marker.evaluate({"extra": extra})
                for extra in (*wanted, "")
            )
            if not here or own == "torch":
                continue
            found |= {own} - {"videotune"}
            step = (own, frozenset(need.extras))
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return found


def lock(names: Iterable[str]) -> str:
    """Pins of these packages with the hashes of every file of each version, for any system and Python."""
    pins = [f"{name}=={metadata.version(name)}" for name in sorted(names)]
    pins += [
        f'{name}=={version} ; sys_platform == "win32"' for name, version in ELSEWHERE.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.txt", Path(folder) / "out.txt"
        source.write_text("\n".join(pins) + "\n", encoding="utf-8")
        words = [
            "uv",
            "pip",
            "compile",
            "--universal",
            "--no-deps",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
        ]
        subprocess.run(
            [
                *words,
                "--no-emit-index-url",
                "--quiet",
                str(source),
                "--output-file",
                str(target),
            ],
            check=True,
        )
        return target.read_text(encoding="utf-8")


def main() -> None:
    base, dev = ({"setuptools"} | needed("videotune", extras) for extras in ((), ("dev",)))
    (ROOT / "requirements.txt").write_text(LOCK_HEAD + lock(base), encoding="utf-8")
    (ROOT / "requirements-dev.txt").write_text(LOCK_HEAD + lock(dev), encoding="utf-8")
    torch = needed("torch") | {"torch"}
    pins = [
        f"{name}=={metadata.version(name).partition('+')[0]}" for name in sorted(dev | torch)
    ]
    (ROOT / "constraints.txt").write_text(HEAD + "\n".join(pins) + "\n", encoding="utf-8")
    print(f"{len(base)} packages, with those of the tests {len(dev)}")


if __name__ == "__main__":
    main()
