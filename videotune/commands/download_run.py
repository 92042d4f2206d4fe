"""``download hf://…`` and ``resume hf://…``: fetch a run that was uploaded while it
trained, to go on with it here.

A repository is a stranger's data. Only the files of a run are fetched, each is compared
with its length and hash, and no path of the config is followed: the clips are those
that the user names.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from videotune.bounds import RECORD_BYTES
from videotune.config.optimizer_classes import is_imported
from videotune.config.optimizers import optimizer_named
from videotune.config.resolve import parse
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import digest, hash_file, read_json, size_text, write_json
from videotune.http_limits import limited_hub
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.models.hub import offline
from videotune.runs.checkpoint import MARKER, Checkpoint, read_checkpoint
from videotune.runs.hub_run import (
    ACCOUNT,
    ACCOUNT_BYTES,
    Account,
    read_account,
    step_of,
    steps_of,
)
from videotune.runs.journal import History
from videotune.runs.run_dir import refuse_run
from videotune.runs.schemas import read_record

_ADDRESS = re.compile(r"hf:/{1,2}(\w[\w.-]*/\w[\w.-]*)/?")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

JOURNAL_BYTES = 4 << 30
"""The journal, at most; ten thousand steps have some 30 MB."""

ELSEWHERE = "elsewhere"
"""Folder below the run in which files of the other machine would be, and are not."""


_EMPTIED: Mapping[str, Any] = {
    "cache_dir": None,
    "output_model_destination": None,
    "prior_preservation": None,
    "push_to": None,
    "notify": [],
    "trackers": [],
}
"""Keys of places and accounts on the other machine."""

_ASKED = re.compile(
    r"(train_dtype|warmup_steps|steps|epochs|\w+_every_epochs|sample_after_epochs)"
)


def repo_of(text: str) -> str | None:
    """Return the id of a repository from an address hf://USER/NAME; None: it is none.

    A path library may have made one slash of the two.
    """
    match = _ADDRESS.fullmatch(text.replace("\\", "/"))
    if match is None and text.startswith("hf:"):
        raise VideotuneError(f"{text[:200]}: write hf://USER/NAME")
    return match[1] if match else None


def download_run(
    repo: str, data: Sequence[str], out: Path | None, step: int | None = None
) -> Path:
    """Fetch a run from a repository of the Hub, and return its folder.

    A download that breaks goes on where it was when the command is given again.

    Args:
        repo: id of the repository.
        data: the clips on this machine, one for each dataset of the run.
        out: the run folder. None: the repository's name, in the working folder.
        step: of the checkpoint. None: the newest.

    Raises:
        VideotuneError: if it is no run of videotune, a file is damaged or none that a
            run has, the disk is too full, or the Hub is not reached.
    """
    run = out or Path(repo.rpartition("/")[2])
    refuse_run(run)
    if not data:
        raise VideotuneError(
            f"{repo}: a run in a repository has no clips. Add --data CLIPS, the clips on this machine"
        )
    for folder in data:
        # an id of a dataset on the Hub is left to the resume
        if not _HUB_ID.fullmatch(folder) and not Path(folder).expanduser().exists():
            raise VideotuneError(f"--data: {folder} does not exist")
    if offline():
        raise VideotuneError(f"{repo}: --offline or HF_HUB_OFFLINE forbids the Hub")

    parts = run.absolute().with_name(f".{run.absolute().name}.download")
    if parts.is_symlink() or (parts.exists() and not parts.is_dir()):
        raise VideotuneError(f"{parts} is in the way. Move it away")
    parts.mkdir(parents=True, exist_ok=True)
    step = _fetch(repo, parts, step)
    new_run = parts / "new"
    _check(new_run, step, repo)
    _make_local(new_run, run, repo, data)
    run.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        run.rmdir()  # an empty folder of this name
    new_run.replace(run)
    shutil.rmtree(parts, ignore_errors=True)
    return run


def _fetch(repo: str, parts: Path, step: int | None) -> int:
    """Fetch the files of a checkpoint and the run's records into ``parts/new``, compare
    each with the account, and return the step.
    """
    try:
        with limited_hub():
            info = hub.HfApi(library_name="videotune").model_info(
                repo, files_metadata=True
            )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        account_bytes = sizes.get(ACCOUNT)
        if account_bytes is None or account_bytes > ACCOUNT_BYTES:
            raise VideotuneError(
                f"{repo} holds no run: it has no {ACCOUNT} of a valid size. "
                "A run uploads itself with push_checkpoints_to"
            )
        got = parts / "got"
        hub.hf_hub_download(repo, ACCOUNT, revision=info.sha, local_dir=got)
        account = read_account(got / ACCOUNT, repo)
        chosen = _chosen_step(account, repo, step)
        wanted = _wanted(account, chosen, sizes, repo)
        _refuse_full(repo, parts, sum(wanted.values()), chosen)
        for name in wanted:
            hub.hf_hub_download(repo, name, revision=info.sha, local_dir=got)
    except VideotuneError:
        raise
    except Exception as error:  # the Hub's library raises a dozen kinds
        raise VideotuneError(hub_problem(repo, error)) from error

    shutil.rmtree(parts / "new", ignore_errors=True)
    for name in wanted:
        source = got / name
        entry = account["files"][name]
        is_plain = source.is_file() and not source.is_symlink()
        if (
            not is_plain
            or source.stat().st_size != entry["bytes"]
            or hash_file(source) != entry["hash"]
        ):
            shutil.rmtree(got, ignore_errors=True)
            raise VideotuneError(
                f"{repo}: {name} is not the file that {ACCOUNT} lists: its bytes differ. "
                "Give the command again; if it happens again, use another step"
            )
        target = parts / "new" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
    return chosen


def _chosen_step(account: Account, repo: str, step: int | None) -> int:
    """Return the step to fetch. Raises VideotuneError that lists those there are."""
    steps = steps_of(account["files"])
    chosen = account["step"] if step is None else step
    if chosen not in steps:
        listed = ", ".join(map(str, steps))
        raise VideotuneError(
            f"{repo} has no checkpoint of step {chosen}; it has those of the steps {listed}"
        )
    return chosen


def _wanted(
    account: Account, step: int, sizes: Mapping[str, int | None], repo: str
) -> dict[str, int]:
    """Return the files to fetch with their bytes.

    Raises VideotuneError if the repository's own listing differs, or a file is too
    large.
    """
    wanted = {}
    for name, entry in account["files"].items():
        if step_of(name) not in (None, step):
            continue
        most = entry["bytes"]
        if name == "journal.jsonl":
            most = JOURNAL_BYTES
        elif name.endswith((".json", MARKER)):
            most = RECORD_BYTES
        if entry["bytes"] > most:
            raise VideotuneError(
                f"{repo}: {name} has {entry['bytes']:,} bytes; a run's has at most {most:,}"
            )
        if sizes.get(name) != entry["bytes"]:
            raise VideotuneError(
                f"{repo}: {name} is not there with the length that {ACCOUNT} lists"
            )
        wanted[name] = entry["bytes"]
    return wanted


def _refuse_full(repo: str, folder: Path, needed: int, step: int) -> None:
    free = shutil.disk_usage(folder).free
    echo(f"{repo}: step {step}, {size_text(needed)}")
    if free < 2 * needed and free < needed + (1 << 30):
        raise VideotuneError(
            f"{folder}: {size_text(needed)} are needed and {size_text(free)} are free. "
            "Free some, or choose another --out"
        )


def _check(run: Path, step: int, repo: str) -> None:
    """Check what was fetched as what a resume reads.

    Raises VideotuneError for a file that no run has written like this.
    """
    try:
        for name in ("config", "check", "plan"):
            read_record(run / f"{name}.json")
        history = History(run)
    except (OSError, VideotuneError) as error:
        text = str(error).replace(str(run), repo)
        raise VideotuneError(f"{text.splitlines()[0]}") from error
    if history.largest_step < step:
        raise VideotuneError(f"{repo}: journal.jsonl ends before step {step}")

    folder = run / "checkpoints" / f"step-{step}"
    checkpoint = read_checkpoint(folder)
    if not isinstance(checkpoint, Checkpoint):
        raise VideotuneError(f"{repo}: the checkpoint of step {step}: {checkpoint}")
    names = {path.name for path in folder.iterdir()} - {MARKER}
    if set(checkpoint.files) != names:
        raise VideotuneError(f"{repo}: {MARKER} of step {step} lists other files")
    for part in ("weights", "optimizer", "state"):
        checkpoint.verify(part)
    for path in folder.glob("*.index.json"):
        index = read_json(path)
        listed = index.get("files") if isinstance(index, dict) else None
        if not isinstance(listed, list) or not names.issuperset(map(str, listed)):
            raise VideotuneError(f"{repo}: {path.name} of step {step} is not valid")


def _make_local(new_run: Path, run: Path, repo: str, data: Sequence[str]) -> None:
    """Write the run's config for this machine, and say what is not here."""
    config = read_record(new_run / "config.json")
    was_intact = config["digest"] == digest(_without_digest(config))
    settings = parse(config["settings"]).model_dump(mode="json")
    optimizer = optimizer_named(str(settings["optimizer"]["name"])) or ""
    if is_imported(optimizer):
        raise VideotuneError(
            f"{repo}: optimizer.name is {optimizer[:200]!r}, which would run code of a package "
            "here because a repository says so. If the run is yours, copy its folder instead"
        )
    if len(settings["datasets"]) != len(data):
        names = [Path(str(item["path"])).name for item in settings["datasets"]]
        raise VideotuneError(
            f"{repo}: the run has {len(names)} datasets ({', '.join(names)}). "
            "Give --data once for each, in this order"
        )

    for dataset, folder in zip(settings["datasets"], data, strict=True):
        is_local = Path(folder).expanduser().exists()
        dataset["path"] = (
            str(Path(folder).expanduser().absolute()) if is_local else folder
        )
    settings |= _EMPTIED
    if settings["push_checkpoints_to"] != repo:
        settings["push_checkpoints_to"] = None
    _replace_paths(settings, run.absolute())
    config["settings"] = settings
    config["asked"] = {
        key: value
        for key, value in config.get("asked", {}).items()
        if _ASKED.fullmatch(key)
    }
    if was_intact:
        config["digest"] = digest(_without_digest(config))
    write_json(new_run / "config.json", config)


def _replace_paths(settings: dict[str, Any], run: Path) -> None:
    """Replace paths of the other machine by ones that do not exist, and print them.

    Names of the Hub and of assets stay.
    """

    def replaced(key: str, value: str | None) -> str | None:
        if value is None or value.startswith("asset:") or _HUB_ID.fullmatch(value):
            return value
        name = _file_name(value)
        echo(f"{key}: {name} is not fetched. Name it for the resume: --set {key}=…")
        return str(run / ELSEWHERE / name)

    for key in ("base_model_name", "base_parts"):
        settings[key] = replaced(key, settings[key])
    file = settings["transformer"]["file"]
    if isinstance(file, list):
        file = [replaced("transformer.file", item) for item in file]
    else:
        file = replaced("transformer.file", file)
    settings["transformer"]["file"] = file
    if settings["init_from"] is not None:
        # It is not read again, and says what the errors of the run are relative to.
        settings["init_from"] = str(run / ELSEWHERE / _file_name(settings["init_from"]))
    for lora in settings["base_loras"]:
        lora["file"] = replaced("base_loras", lora["file"])

    # These change previews and measured samples, never what is learnt.
    settings["sample"]["loras"] = []
    encoder = settings["sample_metrics"]["encoder"]
    if encoder is not None and not _HUB_ID.fullmatch(encoder):
        settings["sample_metrics"]["encoder"] = None
    if isinstance(settings["samples"], list):
        for prompt in settings["samples"]:
            if isinstance(prompt, dict):
                prompt["image"] = None
                prompt["loras"] = None


def _file_name(path: str) -> str:
    """Return the last part of a path of another machine, as the name of a file here."""
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return re.sub(r"[^\w.-]|^\.+", "_", name) or "_"


def _without_digest(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "digest"}
