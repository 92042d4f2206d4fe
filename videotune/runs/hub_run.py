"""A run in a repository of the Hugging Face Hub: which files it has there, and their
account.

The account lists the length and the hash of every file, so a reader can check all that
it fetched. A reader takes no other files, whatever a repository holds.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen
from typing_extensions import TypedDict

from videotune.errors import VideotuneError
from videotune.files import Count, read_typed
from videotune.runs.checkpoint import MARKER
from videotune.runs.schemas import FileEntry

ACCOUNT = "videotune-run.json"
"""Name of the account in the repository."""

FORMAT: Literal[1] = 1

RECORDS = (
    "config.json",
    "check.json",
    "plan.json",
    "journal.jsonl",
    "validation.json",
)
"""Files of a run that a resume reads, beside a checkpoint; the last one may be absent."""

_PART = r"(weights|optimizer|ema)(-\d{1,5}-of-\d{1,5})?\.safetensors"
_INDEX = r"(weights|optimizer|ema)\.index\.json"
_CHECKPOINT_FILE = re.compile(
    rf"checkpoints/step-([1-9]\d{{0,8}})/({MARKER}|state\.json|{_PART}|{_INDEX})"
)

MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 40
ACCOUNT_BYTES = 4 << 20

_Size = Annotated[int, Interval(ge=0, le=MAX_FILE_BYTES)]
_Hash = Annotated[str, MaxLen(32)]


class AccountedFile(TypedDict):
    """A file of the repository: its length and its hash (``files.hash_file``)."""

    bytes: _Size
    hash: _Hash


class Account(TypedDict):
    """The content of ``videotune-run.json``."""

    format: Literal[1]
    run: str
    """Identifies the run: its first process's start, hashed."""
    step: Count
    """The newest checkpoint."""
    files: Annotated[dict[str, AccountedFile], MaxLen(MAX_FILES)]
    """Every file, by its path in the repository."""


def step_of(path: str) -> int | None:
    """Return the step of a checkpoint's file by its path in the repository; None if it
    is no such file.
    """
    match = _CHECKPOINT_FILE.fullmatch(path)
    return int(match[1]) if match else None


def is_file_of_run(path: str) -> bool:
    """Return whether a run has a file of this path in a repository."""
    return path in RECORDS or step_of(path) is not None


def read_account(path: Path, repo: str) -> Account:
    """Read and check an account that was fetched from a repository.

    Raises:
        VideotuneError: if it is damaged, lists a file that no run has, or a checkpoint
            is not complete.
    """
    try:
        account: Account = read_typed(path, Account, ACCOUNT_BYTES)
    except (OSError, ValueError) as error:
        raise VideotuneError(
            f"{repo}: {ACCOUNT} is not valid: {error}. It is not a run of videotune"
        ) from error

    files = account["files"]
    unknown = sorted(name for name in files if not is_file_of_run(name))
    if unknown:
        raise VideotuneError(
            f"{repo}: {ACCOUNT} lists {unknown[0][:100]!r}, which no run has there. "
            "Nothing was fetched"
        )
    needed = [*RECORDS[:-1], f"checkpoints/step-{account['step']}/{MARKER}"]
    for name in needed:
        if name not in files:
            raise VideotuneError(f"{repo}: {ACCOUNT} lists no {name}: it is incomplete")
    return account


def steps_of(files: Mapping[str, object]) -> list[int]:
    """Return the steps of the checkpoints among files of a repository, in order."""
    return sorted({step for step in map(step_of, files) if step is not None})


def accounted(files: Mapping[str, FileEntry]) -> dict[str, AccountedFile]:
    """Return the account's entries of files."""
    return {
        name: {"bytes": entry["bytes"], "hash": entry["hash"]}
        for name, entry in files.items()
    }
