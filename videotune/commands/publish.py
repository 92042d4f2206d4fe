"""``publish`` and ``card``: a run's files and its model card, on the Hugging Face Hub or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from videotune.errors import VideotuneError
from videotune.files import hash_path
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.reporter.card import model_card, previews
from videotune.reporter.read import Run, read_run

CARD = "README.md"


def card(run: Path) -> tuple[dict[str, Any], str]:
    """The metadata of a run's model card, and the whole card as Markdown; no network is asked.

    Raises VideotuneError where the run has no exports.
    """
    made = model_card(_exported(run))
    return made.data.to_dict(), str(made)


def publish(run: Path, repo: str | None = None, *, public: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Upload a run's exports, its card and some previews into a repository of the Hub; what the command prints.

    ``repo``: its id (default: the name of the run's folder, of the token's account); made as a private one, or as a
    ``public`` one. What is there already is not sent again. Raises VideotuneError for a file that is not as it was exported,
    for a repository that is public without ``public``, and where the Hub does not take it.
    """
    found = _exported(run)
    made, files, repo = model_card(found), _files(found), repo or run.resolve().name
    sizes = [{"path": name, "bytes": path.stat().st_size} for name, path in sorted(files.items())]
    done = {"repo": repo, "url": None, "public": public, "files": sizes, "card": str(made)}
    if not dry_run:
        if hub.get_token() is None:
            raise VideotuneError(
                f"publish: there is no token of the Hub: make one that may write at {hub.constants.ENDPOINT}"
                "/settings/tokens, and set HF_TOKEN to it"
            )
        try:
            done |= _upload(repo, public, files, str(made))
        except (httpx.HTTPError, hub.errors.HfHubHTTPError, OSError, ValueError) as error:
            if isinstance(error, VideotuneError):
                raise
            raise VideotuneError(f"publish: {hub_problem(repo, error, upload=True)}") from error
    return done


def _upload(repo: str, public: bool, files: Mapping[str, Path], text: str) -> dict[str, Any]:
    api = hub.HfApi(library_name="videotune")
    place = api.create_repo(repo, private=not public, exist_ok=True)
    if not public and not api.model_info(place.repo_id).private:
        raise VideotuneError(f"publish: {place.repo_id} is public already: add --public, or name another --repo")
    adds = [hub.CommitOperationAdd(name, path) for name, path in files.items()]
    adds.append(hub.CommitOperationAdd(CARD, text.encode()))
    api.create_commit(place.repo_id, adds, commit_message="Upload of videotune")
    return {"repo": place.repo_id, "url": str(place)}


def _exported(run: Path) -> Run:
    found = read_run(run)
    if not found.exports:
        raise VideotuneError(f"{run} has no exports: videotune export {run}")
    return found


def _files(run: Run) -> dict[str, Path]:
    """The exported files and some previews by their paths in the repository; VideotuneError where one is not as written."""
    files = {name: run.folder / name for name in previews(run)}
    for entry in run.exports or ():
        path = run.folder / str(entry["path"])
        if not path.exists() or hash_path(path) != entry["hash"]:
            raise VideotuneError(
                f"{path} is missing or damaged: remove it and write it again with videotune export {run.folder}"
            )
        inside = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        files |= {file.relative_to(path.parent).as_posix(): file for file in inside}
    return files
