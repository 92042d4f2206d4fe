"""What the user can do about an error of the Hub's library; one text for base models and datasets."""

import errno
import os

from videotune.lazy import huggingface_hub as hub


def hub_problem(
    name: str, error: Exception, suggestion: str = "", folder: str = "", upload: bool = False
) -> str:
    """A sentence that begins with the repository's ``name``; no token is ever part of it.

    ``suggestion``: a similar id that exists, in brackets. ``folder``: where its page lies below the Hub's address.
    ``upload``: something was to be sent there, not fetched.
    """
    errors = hub.errors
    end = hub.constants.ENDPOINT
    cache = hub.constants.HF_HUB_CACHE
    page = f"{end}/{folder}{name}"
    settings = f"{end}/settings/tokens"
    token = os.environ.get("HF_TOKEN", "").strip()
    read = (
        "give the account of HF_TOKEN access"
        if token
        else f"make a token at {settings}, and set HF_TOKEN to it"
    )
    network = "unset HF_HUB_OFFLINE" if hub.constants.HF_HUB_OFFLINE else "check the network"
    may = "write to this repository" if upload else "read gated repositories"
    offline = f" is not wholly in {cache}, and the Hub is not reached: {network} to fetch it."
    by_class = {
        errors.OfflineModeIsEnabled: ": the Hub is not reached: unset HF_HUB_OFFLINE.",
        errors.GatedRepoError: f" is gated. Agree to its terms at {page}; then {read}.",
        errors.RevisionNotFoundError: f" has no such revision: see {page}.",
        errors.RepositoryNotFoundError: f" is not on the Hub, or is private. Check the id at {page}{suggestion}; or {read}.",
        errors.HFValidationError: f" is neither a folder here nor an id of the Hub. Write user/name.{suggestion}",
        errors.LocalEntryNotFoundError: offline,
        errors.IncompleteSnapshotError: offline,
    }
    by_status = {
        401: f": the Hub does not accept HF_TOKEN. Make a new one at {settings}, or unset it.",
        403: f": the Hub refuses the account of HF_TOKEN. Let the token {may}: {settings}",
        429: ": the Hub had too many requests from here. Wait some minutes; a token in HF_TOKEN allows more.",
    }
    what = next((text for kind, text in by_class.items() if isinstance(error, kind)), None)
    if what is None and isinstance(error, errors.HfHubHTTPError):
        what = by_status.get(error.response.status_code)
    if what is None and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        what = f": the disk of {cache} is full. Free some, or set HF_HOME to a disk with room."
    text = str(error).replace(token, "(HF_TOKEN)") if token else str(error)
    if upload:
        return name + (
            what
            or f" could not be sent: {text}\nRun it again: what has arrived is not sent again."
        )
    return name + (
        what
        or f" could not be fetched: {text}\nComplete files stay: run it again, or give a local folder."
    )
