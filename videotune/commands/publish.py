"""``publish`` and ``card``: a run's files and its model card, on the Hugging Face Hub
or in a file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.http_limits import limited_hub
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.reporter.model_card import model_card, previews
from videotune.reporter.read import Run, read_run
from videotune.runs.export_files import check_preview, files_of_exports, read_exports


def card(run: Path) -> dict[str, Any]:
    """Return a run's model card as Markdown, and its metadata. No network is used.

    Raises VideotuneError if the run has no exports, or a record of it is damaged.
    """
    read_exports(run)
    run_facts = read_run(run)
    text = model_card(run_facts)
    tell_prompts(run_facts)
    return {"metadata": text.data.to_dict(), "card": str(text)}


def tell_prompts(run: Run) -> None:
    """Print a note if the card shows captions of clips, as prompts of its previews."""
    caption_count = len(set(previews(run).values()))
    are_captions = isinstance(run.setting("samples"), int)
    if caption_count and are_captions:
        echo(
            f"note: the card shows captions of {caption_count} of your clips, as the prompts of the"
            " previews. Set samples to prompts of your own to show those"
        )


def publish(
    run: Path,
    repo: str | None = None,
    *,
    public: bool = False,
    dry_run: bool = False,
    folders: Sequence[Path] = (),
) -> dict[str, Any]:
    """Upload a run's exports, its card and some previews into a repository of the Hub.

    Files that are there already are not sent again.

    Args:
        run: the run folder.
        repo: id of the repository. None: the name of the run folder, below the token's
            account.
        public: make a public repository, rather than a private one.
        dry_run: upload nothing.
        folders: folders outside the run that its exports may be in.

    Returns:
        What the command prints.

    Raises:
        VideotuneError: if a file is not one that the run exported, if the repository is public
            without ``public``, or if the Hub does not accept it.
    """
    exports = read_exports(run)
    run_facts = read_run(run)
    text = str(model_card(run_facts))
    tell_prompts(run_facts)
    files = {name: check_preview(run, name) for name in previews(run_facts)}
    files |= files_of_exports(run, exports, folders)

    sizes = [
        {"path": name, "bytes": path.stat().st_size} for name, path in files.items()
    ]
    name = repo or run.resolve().name
    result = {"repo": name, "url": None, "public": public, "files": sizes, "card": text}
    if dry_run:
        return result
    return result | upload(name, public, files | {"README.md": text.encode()})


def upload(
    repo: str, public: bool, files: Mapping[str, Path | bytes]
) -> dict[str, str]:
    """Commit the files that are not in a repository yet, and return the repository's id
    and address.

    Args:
        repo: id of the repository. It is created if it does not exist.
        public: create it as a public one.
        files: by their names in the repository.

    Raises:
        VideotuneError: without a token, if the repository is public without ``public``,
            or if the Hub does not accept the files.
    """
    if hub.get_token() is None:
        raise VideotuneError(
            "publish: there is no token. Create one with write access at "
            f"{hub.constants.ENDPOINT}/settings/tokens, and set HF_TOKEN to it"
        )
    api = hub.HfApi(library_name="videotune")
    try:
        with limited_hub():
            created = api.create_repo(repo, private=not public, exist_ok=True)
            is_exposed = not public and not api.model_info(created.repo_id).private
            if not is_exposed:
                adds = [
                    hub.CommitOperationAdd(name, content)
                    for name, content in files.items()
                ]
                api.create_commit(
                    created.repo_id, adds, commit_message="Upload of videotune"
                )
    except (
        Exception
    ) as error:  # the Hub's library raises a dozen kinds; each is explained
        raise VideotuneError(
            f"publish: {hub_problem(repo, error, upload=True)}"
        ) from error
    if is_exposed:
        raise VideotuneError(
            f"publish: {created.repo_id} is already public. Add --public, or choose another --repo"
        )
    return {"repo": created.repo_id, "url": str(created)}
