"""Upload the newest checkpoint of a run into a repository of the Hub.

One commit has the checkpoint, the run's records and their account, and removes older
checkpoints, so a repository always holds a run that can be resumed. ``main`` does it in
a process of its own, beside the training.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from videotune.errors import VideotuneError
from videotune.files import digest, hash_file, is_disk_full
from videotune.http_limits import limited_hub
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.runs.checkpoint import MARKER, Checkpoint, complete_checkpoints
from videotune.runs.export_files import refuse_link
from videotune.runs.hub_run import (
    ACCOUNT,
    FORMAT,
    RECORDS,
    Account,
    accounted,
    is_file_of_run,
    read_account,
    step_of,
    steps_of,
)
from videotune.runs.schemas import FileEntry, parse_line

FOLDER = ".push-"
"""Begins the name of a folder of links to the files that are being uploaded, before the
number of the process: the run may remove a checkpoint meanwhile.
"""

SECONDS = 2 * 3600.0
"""Seconds after which an upload ends itself, to be tried again."""

_FREE_FILES = (".gitattributes", "README.md")


def run_id(journal: bytes) -> str:
    """Return what identifies a run, also after a resume elsewhere: its first line."""
    first = journal.partition(b"\n")[0]
    try:
        return digest(parse_line(first))[:16]
    except ValueError as error:
        raise VideotuneError(f"the journal is damaged: {error}") from error


def push(run: Path, repo: str, keep: int) -> int:
    """Upload the newest checkpoint, unless the repository has it, and return its step.

    Args:
        run: the run folder.
        repo: id of the repository; a private one is made if there is none.
        keep: how many checkpoints stay there.

    Raises:
        VideotuneError: if there is no checkpoint, the repository is public or of
            something else, or the Hub does not accept it.
    """
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        raise VideotuneError(f"{run} has no complete checkpoint yet")
    _remove_left_behind(run)
    folder = run / f"{FOLDER}{os.getpid()}"
    try:
        checkpoint = _linked(checkpoints[-1], folder)
        records = _records(run, folder)
        _commit(repo, checkpoint, records, keep)
    except VideotuneError:
        raise
    except OSError as error:
        if is_disk_full(error) or isinstance(error, FileNotFoundError):
            raise VideotuneError(f"{run}: {error}") from error
        raise VideotuneError(hub_problem(repo, error, upload=True)) from error
    except Exception as error:  # the Hub's library raises a dozen kinds
        raise VideotuneError(hub_problem(repo, error, upload=True)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return checkpoint.step


def _remove_left_behind(run: Path) -> None:
    """Remove the links of uploads that were killed."""
    for folder in run.glob(f"{FOLDER}*"):
        number = folder.name.removeprefix(FOLDER)
        is_alive = number.isdecimal() and psutil.pid_exists(int(number))
        if not is_alive or int(number) == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def _linked(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a copy of a checkpoint that stays; its files are links where possible."""
    target = folder / checkpoint.folder.name
    target.mkdir(parents=True)
    for name in (MARKER, *checkpoint.files):
        # The marker of a run from elsewhere may name any file.
        if not is_file_of_run(f"checkpoints/{checkpoint.folder.name}/{name}"):
            raise VideotuneError(
                f"{checkpoint.folder}: its {MARKER} lists {name[:100]!r}, which is no file "
                "of a checkpoint"
            )
        path = checkpoint.folder / name
        if path.is_symlink() or checkpoint.folder.is_symlink():
            raise VideotuneError(f"{path} is a link, so it is not uploaded")
        try:
            os.link(checkpoint.folder / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:  # this file system has no links
            shutil.copyfile(checkpoint.folder / name, target / name)
    return Checkpoint(checkpoint.step, target, checkpoint.kind, checkpoint.files)


def _records(run: Path, folder: Path) -> dict[str, Path]:
    """Copy the run's records as they are now, and return them by name."""
    records = {}
    for name in RECORDS:
        if not (run / name).is_file():
            continue
        refuse_link(run, run / name)
        content = (run / name).read_bytes()
        if name.endswith(".jsonl"):  # a line may be half written
            content = content[: content.rfind(b"\n") + 1]
        records[name] = folder / name
        records[name].write_bytes(content)
    return records


def _commit(
    repo: str, checkpoint: Checkpoint, records: Mapping[str, Path], keep: int
) -> None:
    """Commit what is not in the repository yet, and remove what makes way for it."""
    api = hub.HfApi(library_name="videotune")
    identity = run_id(records["journal.jsonl"].read_bytes())
    with limited_hub():
        repo_id = api.create_repo(repo, private=True, exist_ok=True).repo_id
        info = api.model_info(repo_id)
    if not info.private:
        raise VideotuneError(
            f"{repo_id} is public, and a run's records have its captions and the names "
            "of its clips. Make it private, or choose another repository"
        )
    listed = {file.rfilename for file in info.siblings or ()}
    before: dict[str, FileEntry] = {}
    if ACCOUNT in listed:
        folder = checkpoint.folder.parent
        hub.hf_hub_download(repo_id, ACCOUNT, revision=info.sha, local_dir=folder)
        before = _entries_there(folder / ACCOUNT, repo_id, identity)
    else:
        _refuse_other_files(repo_id, listed)

    files, account = _account_of(checkpoint, records, before, identity, keep)
    operations: list[Any] = [
        hub.CommitOperationAdd(name, path) for name, path in files.items()
    ]
    content = json.dumps(account, indent=1).encode()
    operations.append(hub.CommitOperationAdd(ACCOUNT, content))
    # What an account does not list may be of an upload that was cut off.
    superfluous = {name for name in listed if is_file_of_run(name)}
    for name in sorted(superfluous - set(account["files"])):
        operations.append(hub.CommitOperationDelete(name))
    api.create_commit(
        repo_id, operations, commit_message=f"Checkpoint of step {checkpoint.step}"
    )


def _account_of(
    checkpoint: Checkpoint,
    records: Mapping[str, Path],
    before: Mapping[str, FileEntry],
    identity: str,
    keep: int,
) -> tuple[dict[str, Path], Account]:
    """Return the files to send, by their paths in the repository, and the account.

    Args:
        checkpoint: the newest one.
        records: the run's records, by name.
        before: the files of checkpoints that are there.
        identity: of the run.
        keep: how many checkpoints stay.
    """
    prefix = f"checkpoints/step-{checkpoint.step}"
    entries = {f"{prefix}/{MARKER}": _entry(checkpoint.folder / MARKER)}
    for name, entry in checkpoint.files.items():
        entries[f"{prefix}/{name}"] = entry

    files = dict(records)
    if any(before.get(name) != entry for name, entry in entries.items()):
        for name in (MARKER, *checkpoint.files):
            files[f"{prefix}/{name}"] = checkpoint.folder / name

    entries |= _staying(before, checkpoint.step, keep)
    for name, path in records.items():
        entries[name] = _entry(path)
    account: Account = {
        "format": FORMAT,
        "run": identity,
        "step": checkpoint.step,
        "files": accounted(entries),
    }
    return files, account


def _entry(path: Path) -> FileEntry:
    return {"bytes": path.stat().st_size, "hash": hash_file(path)}


_REMEDY = "A run has a repository of its own: choose another one"


def _refuse_other_files(repo: str, listed: set[str]) -> None:
    """Raise VideotuneError if a repository without an account is not empty."""
    others = sorted(listed - set(_FREE_FILES))
    if others:
        raise VideotuneError(f"{repo} holds {others[0]}, and no run. {_REMEDY}")


def _entries_there(path: Path, repo: str, identity: str) -> dict[str, FileEntry]:
    """Return the entries of checkpoints in a repository's account.

    Raises VideotuneError if it is the account of another run.
    """
    account = read_account(path, repo)
    if account["run"] != identity:
        raise VideotuneError(f"{repo} holds another run. {_REMEDY}")
    entries: dict[str, FileEntry] = {}
    for name, entry in account["files"].items():
        if name not in RECORDS:
            entries[name] = {"bytes": entry["bytes"], "hash": entry["hash"]}
    return entries


def _staying(
    before: Mapping[str, FileEntry], step: int, keep: int
) -> dict[str, FileEntry]:
    """Return the files of the older checkpoints that stay in a repository.

    Later ones than ``step`` go: the run went back behind them.
    """
    older = [earlier for earlier in steps_of(before) if earlier < step]
    staying = older[-(keep - 1) :] if keep > 1 else []
    return {name: entry for name, entry in before.items() if step_of(name) in staying}


def main() -> None:
    """Push as the request on standard input says, and print {"step"} or {"problem"}."""
    request = json.load(sys.stdin)

    def end() -> None:
        print(json.dumps({"problem": "the upload took too long"}), flush=True)
        os._exit(1)

    timer = threading.Timer(request["seconds"], end)
    timer.daemon = True
    timer.start()
    hub.utils.disable_progress_bars()
    try:
        step = push(Path(request["run"]), request["repo"], request["keep"])
        answer: dict[str, Any] = {"step": step}
    except VideotuneError as error:
        answer = {"problem": str(error).splitlines()[0]}
    print(json.dumps(answer), flush=True)
