"""Files into a repository of the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub


def upload(repo: str, public: bool, files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Commit files by their names, those alone that are not there already; the repository's id and address.

    The repository is made where there is none, as a private one but for ``public``. Raises VideotuneError without a token,
    for a repository that is public without ``public``, and where the Hub does not take the files.
    """
    if hub.get_token() is None:
        raise VideotuneError(
            f"publish: there is no token: make one that may write at {hub.constants.ENDPOINT}/settings/tokens, and set "
            "HF_TOKEN to it"
        )
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
        raise VideotuneError(f"publish: {place.repo_id} is public already: add --public, or name another --repo")
    return {"repo": place.repo_id, "url": str(place)}
