"""``publish`` and ``card``: a run's files and its model card, on the Hugging Face Hub or in a file."""

from pathlib import Path
from typing import Any

from videotune.exporter.hub import upload
from videotune.records import verified
from videotune.reporter.card import model_card, previews
from videotune.reporter.read import read_run


def card(run: Path) -> dict[str, Any]:
    """A run's model card as Markdown, and its metadata alone; no network is asked.

    Raises VideotuneError where the run has no exports.
    """
    made = model_card(read_run(run))
    return {"metadata": made.data.to_dict(), "card": str(made)}


def publish(run: Path, repo: str | None = None, *, public: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Upload a run's exports, its card and some previews into a repository of the Hub; what the command prints.

    ``repo``: its id (default: the name of the run's folder, of the token's account); made as a private one, or as a
    ``public`` one. What is there already is not sent again. Raises VideotuneError for a file that is not as it was exported,
    for a repository that is public without ``public``, and where the Hub does not take it.
    """
    found = read_run(run)
    text = str(model_card(found))
    files = {name: run / name for name in previews(found)}
    for entry in found.exports or ():
        path = verified(run, entry)
        inside = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        files |= {file.relative_to(path.parent).as_posix(): file for file in inside}
    sizes = [{"path": name, "bytes": path.stat().st_size} for name, path in files.items()]
    name = repo or run.resolve().name
    done = {"repo": name, "url": None, "public": public, "files": sizes, "card": text}
    return done if dry_run else done | upload(name, public, files | {"README.md": text.encode()})
