"""What the user can do about an error of the Hub's library, for base models and
datasets.
"""

import errno
import os

from videotune.lazy import huggingface_hub as hub


def hub_problem(
    name: str,
    error: Exception,
    suggestion: str = "",
    folder: str = "",
    upload: bool = False,
) -> str:
    """Return a sentence that begins with a repository's name; it never has a token.

    Args:
        name: The repository.
        error: The library's error.
        suggestion: A similar id that exists, in brackets.
        folder: Folder of the repository's page below the Hub's address.
        upload: Something was uploaded, and not downloaded.
    """
    token = os.environ.get("HF_TOKEN", "").strip()
    problem = _problem_of_class(name, error, suggestion, folder, token)
    if problem is None and isinstance(error, hub.errors.HfHubHTTPError):
        problem = _problem_of_status(error.response.status_code, upload)
    if problem is None and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        cache = hub.constants.HF_HUB_CACHE
        problem = f": the disk of {cache} is full. Free space, or set HF_HOME to another disk."
    if problem is not None:
        return name + problem

    text = str(error).replace(token, "(HF_TOKEN)") if token else str(error)
    if upload:
        advice = "Run the command again: uploaded files are not sent again."
        return f"{name} could not be uploaded: {text}\n{advice}"
    advice = (
        "Run the command again, which keeps complete files, or give a local folder."
    )
    return f"{name} could not be downloaded: {text}\n{advice}"


def _problem_of_class(
    name: str, error: Exception, suggestion: str, folder: str, token: str
) -> str | None:
    """Return the problem that the class of an error names."""
    errors = hub.errors
    page = f"{hub.constants.ENDPOINT}/{folder}{name}"
    get_access = "give the account of HF_TOKEN access"
    if not token:
        settings = f"{hub.constants.ENDPOINT}/settings/tokens"
        get_access = f"make a token at {settings}, and set HF_TOKEN to it"
    is_offline = hub.constants.HF_HUB_OFFLINE
    go_online = "unset HF_HUB_OFFLINE" if is_offline else "check the network"
    incomplete = (
        f" is not complete in {hub.constants.HF_HUB_CACHE}, and the Hub cannot be reached: "
        f"{go_online} to download it."
    )

    problems = {
        errors.OfflineModeIsEnabled: ": the Hub is switched off. Unset HF_HUB_OFFLINE.",
        errors.GatedRepoError: f" is gated. Agree to its terms at {page}; then {get_access}.",
        errors.RevisionNotFoundError: f" has no such revision: see {page}.",
        errors.RepositoryNotFoundError: (
            f" is not on the Hub, or is private. Check the id at {page}{suggestion}; "
            f"or {get_access}."
        ),
        errors.HFValidationError: (
            f" is neither a local folder nor an id of the Hub. Write user/name.{suggestion}"
        ),
        errors.LocalEntryNotFoundError: incomplete,
        errors.IncompleteSnapshotError: incomplete,
    }
    for error_class, problem in problems.items():
        if isinstance(error, error_class):
            return problem
    return None


def _problem_of_status(status: int, upload: bool) -> str | None:
    """Return the problem that the status of a response names."""
    settings = f"{hub.constants.ENDPOINT}/settings/tokens"
    permission = "write to this repository" if upload else "read gated repositories"
    problems = {
        401: f": the Hub rejects HF_TOKEN. Make a new one at {settings}, or unset it.",
        403: (
            f": the Hub refuses the account of HF_TOKEN. Let the token {permission}: {settings}"
        ),
        429: (
            ": the Hub got too many requests from here. "
            "Wait some minutes; a token in HF_TOKEN allows more."
        ),
    }
    return problems.get(status)


def is_unreached(error: Exception) -> bool:
    """Return whether the Hub cannot be reached or has an internal error."""
    import httpx2  # keeps the start light

    if isinstance(error, hub.errors.HfHubHTTPError):
        return error.response.status_code >= 500
    unreached = (httpx2.TransportError, hub.errors.OfflineModeIsEnabled)
    return isinstance(error, unreached) and not isinstance(
        error, httpx2.LocalProtocolError
    )
