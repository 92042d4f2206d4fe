"""``publish`` and ``card``: a run's files and its model card, on the Hugging Face Hub or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.reporter.model_card import model_card, previews
from videotune.reporter.read import read_run
from videotune.runs.schemas import verified


def card(run: Path) -> dict[str, Any]:
    """A run's model card as Markdown, and its metadata alone; no network is asked.

    Raises VideotuneError where the run has no exports.
    """
    made = model_card(read_run(run))
    return {"metadata": made.data.to_dict(), "card": str(made)}


def publish(
    run: Path, repo: str | None = None, *, public: bool = False, dry_run: bool = False
) -> dict[str, Any]:
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
        inside = (
            [path]
            if path.is_file()
            else [file for file in sorted(path.rglob("*")) if file.is_file()]
        )
        files |= {file.relative_to(path.parent).as_posix(): file for file in inside}
    sizes = [{"path": name, "bytes": path.stat().st_size} for name, path in files.items()]
    name = repo or run.resolve().name
    done = {"repo": name, "url": None, "public": public, "files": sizes, "card": text}
    return (
        done if dry_run else done | upload(name, public, files | {"README.md": text.encode()})
    )


def upload(repo: str, public: bool, files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Commit files by their names, those alone that are not there already; the repository's id and address.

    The repository is made where there is none, as a private one but for ``public``. Raises VideotuneError without a token,
    for a repository that is public without ``public``, and where the Hub does not take the files.
    """
    if hub.get_token() is None:
        remedy = f"make one that may write at {hub.constants.ENDPOINT}/settings/tokens, and set HF_TOKEN to it"
        raise VideotuneError(f"publish: there is no token: {remedy}")
    api = hub.HfApi(library_name="videotune")
    try:
        place = api.create_repo(repo, private=not public, exist_ok=True)
        exposed = not public and not api.model_info(place.repo_id).private
        if not exposed:
            adds = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
            api.create_commit(place.repo_id, adds, commit_message="Upload of videotune")
    except Exception as error:  # the Hub's library raises a dozen kinds; each is explained
        raise VideotuneError(f"publish: {hub_problem(repo, error, upload=True)}") from error
    if exposed:
        raise VideotuneError(
            f"publish: {place.repo_id} is public already: add --public, or name another --repo"
        )
    return {"repo": place.repo_id, "url": str(place)}
