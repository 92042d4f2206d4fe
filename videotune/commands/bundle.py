"""``doctor --bundle``: a zip for a bug report, in which nothing names the user, and no
clip, caption or prompt is.
"""

import getpass
import json
import os
import re
import socket
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from videotune._version import __version__
from videotune.commands import doctor
from videotune.config.notify_addresses import masked_list
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import read_json, read_lines, user_cache, write_whole
from videotune.reporter.diagnosis import diagnose
from videotune.reporter.privacy import PathNames
from videotune.reporter.read import refuse_no_run
from videotune.runs.trackers import without_secrets

FORMAT = 1
FIRST_LINES = 20
LAST_LINES = 400
"""Lines of the journal that are taken from its beginning and its end."""

CRASH_LETTERS = 60_000

HIDDEN_TEXT = "(left out)"

DEFAULT_PROJECT = "videotune"
"""The default of ``tracker_project``, which names nobody."""

TEXT_KEYS = frozenset(
    {
        "prompt",
        "prompts",
        "caption",
        "captions",
        "negative",
        "samples",
        "trigger",
        "token",
        "caption_prefix",
        "caption_suffix",
        "missing_caption_text",
        "init_text",
        "push_to",
        "push_checkpoints_to",
        "tracker_project",
    }
)
"""Keys whose texts a user wrote about clips, or that name the user's accounts."""

SHOWN_VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|(PYTORCH|TORCH|NCCL|OMP|MKL|HF_HUB|TRANSFORMERS|VIDEOTUNE)_\w+)"
)
_SECRET_NAME = re.compile("KEY|TOKEN|PASSWORD|SECRET|URL|ENDPOINT|SERVERS")
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|xox[a-z]-)[\w-]{8,}")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*)://[^\s\"'<>)\]]+")
_SHORTEST_NAME = 3
_SHORTEST_STEM = 5
_CAPTION_BEGIN = 12


class Masks:
    """Takes what names a person, a machine or a clip's content out of texts."""

    def __init__(self, texts: Iterable[str] = (), clips: Sequence[str] = ()) -> None:
        """Collect what is replaced.

        Args:
            texts: captions and prompts.
            clips: paths of clips; each becomes its number.
        """
        self._paths = PathNames({str(Path.home()): "~"})
        self._replaced: list[tuple[re.Pattern[str], str]] = []
        for text in sorted({text.strip() for text in texts}, key=len, reverse=True):
            if len(text) >= _SHORTEST_NAME:
                # A message may show only its beginning.
                pattern = rf"(?<!\w){re.escape(text)}(?!\w)"
                if len(text) > _CAPTION_BEGIN and " " in text:
                    pattern = re.escape(text[:_CAPTION_BEGIN]) + r"[^'\"\n]*"
                self._replaced.append((re.compile(pattern), HIDDEN_TEXT))
        for number, path in enumerate(clips, start=1):
            file = Path(path)
            # "a" is a word, and "a.mp4" is not.
            is_short = len(file.stem) < _SHORTEST_STEM
            stem = re.escape(file.stem)
            follows = rf"(?={re.escape(file.suffix)})" if is_short else r"(?![\w-])"
            pattern = rf"(?:[^\s'\"]*/)?(?<![\w-]){stem}{follows}"
            self._replaced.append((re.compile(pattern), f"clip-{number}"))
        for name, placeholder in (
            (_user(), "(user)"),
            (socket.gethostname(), "(host)"),
        ):
            if len(name) >= _SHORTEST_NAME:
                pattern = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
                self._replaced.append((re.compile(pattern), placeholder))

    def in_text(self, text: str) -> str:
        """Return a text without secrets, paths of folders, names and clips."""
        text = _TOKEN.sub("(token)", without_secrets(text))
        text = _URL.sub(r"\1://(hidden)", text)
        for pattern, placeholder in self._replaced:
            text = pattern.sub(placeholder, text)
        return self._paths.in_text(text)

    def in_value(self, value: Any, *, with_texts: bool, key: str = "") -> Any:
        """Return JSON data with all its texts masked; with ``with_texts`` those that
        the user wrote stay.
        """
        if key == "notify":
            return masked_list(value)
        if isinstance(value, Mapping):
            return {
                self.in_text(str(name)): self.in_value(
                    inner, with_texts=with_texts, key=str(name)
                )
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [
                self.in_value(inner, with_texts=with_texts, key=key) for inner in value
            ]
        if isinstance(value, str):
            if key in TEXT_KEYS and not with_texts:
                return HIDDEN_TEXT
            return self.in_text(value)
        return value


def _user() -> str:
    with suppress(KeyError, OSError, ImportError):  # a container's user has no name
        return getpass.getuser()
    return ""


def write_bundle(
    out: Path, run: Path | None, *, with_captions: bool = False
) -> dict[str, Any]:
    """Write a bundle, and return {"bundle", "bytes", "files"}.

    Args:
        out: the zip, which must not exist.
        run: the run that it is about. None: only this machine.
        with_captions: keep captions, prompts and names of clips.

    Raises:
        VideotuneError: if the file exists, or the folder holds no run.
    """
    refuse_bundle(out, run)
    parts: dict[str, Any] = {"machine.json": machine_facts()}
    masks = Masks()
    crash = newest_crash()
    if crash:
        parts["crash.txt"] = crash
    if run is not None:
        account = _record(run / "check.json")
        journal = read_lines(run / "journal.jsonl")
        if not with_captions:
            clips = [str(clip.get("path", "")) for clip in _clips(account)]
            masks = Masks(
                _texts_of(run, account, journal), [clip for clip in clips if clip]
            )
        parts |= run_facts(run, journal)

    files = {}
    for name, content in parts.items():
        files[name] = _encoded(content, masks, with_captions)
    rows = [{"path": name, "bytes": len(content)} for name, content in files.items()]
    about = {
        "format": FORMAT,
        "videotune": __version__,
        "made": round(time.time()),
        "with_captions": with_captions,
        "files": rows,
    }
    files = {"bundle.json": json.dumps(about, indent=1).encode(), **files}

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    write_whole(out, write)
    return {"bundle": str(out), "bytes": out.stat().st_size, "files": rows}


def refuse_bundle(out: Path, run: Path | None) -> None:
    """Raise VideotuneError if a bundle cannot be written, before any work."""
    if os.path.lexists(out):
        raise VideotuneError(f"--bundle: {out} already exists. Choose another file")
    if out.suffix.lower() != ".zip":
        raise VideotuneError(f"--bundle: {out} has to end in .zip")
    if run is not None:
        refuse_no_run(run)


def machine_facts() -> dict[str, Any]:
    """Return what ``doctor`` prints, the versions of all packages, and variables."""
    rows, missing = doctor.machine()
    packages = {item.name: item.version for item in metadata.distributions()}
    variables = {}
    for name, value in sorted(os.environ.items()):
        if SHOWN_VARIABLES.fullmatch(name):
            is_secret = _SECRET_NAME.search(name) is not None
            variables[name] = "(set)" if is_secret else value
    facts: dict[str, Any] = {
        "machine": [
            dict(zip(("what", "found", "note"), row, strict=True)) for row in rows
        ],
        "missing": missing,
        "packages": dict(sorted(packages.items())),
        "variables": variables,
    }
    if not missing:
        facts["devices"] = doctor.devices()
        facts["can_train"] = doctor.can_train()
    return facts


def newest_crash() -> str | None:
    """Return the traceback of the newest crash report; without the config in it."""
    reports = sorted((user_cache() / "crashes").glob("crash-*.txt"))
    if not reports:
        return None
    text = reports[-1].read_text(encoding="utf-8", errors="replace")
    start = text.find("Traceback (most recent call last)")
    return text[start:][-CRASH_LETTERS:] if start >= 0 else None


def run_facts(run: Path, journal: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the records of a run that a bundle has, by their names in it."""
    facts: dict[str, Any] = {}
    for name in ("config.json", "plan.json", "heartbeat.json"):
        content = _record(run / name)
        if content is not None:
            facts[f"run/{name}"] = content
    account = _record(run / "check.json")
    if isinstance(account, Mapping):
        clips = _clips(account)
        kept = {key: value for key, value in account.items() if key != "clips"}
        outcomes = [
            {key: clip.get(key) for key in ("used", "held_out", "shape", "source_fps")}
            for clip in clips
        ]
        facts["run/clips.json"] = {"totals": _numbers(kept), "clips": outcomes}

    ends = list(journal)
    if len(ends) > FIRST_LINES + LAST_LINES:
        ends = [*ends[:FIRST_LINES], *ends[-LAST_LINES:]]
    facts["run/journal.jsonl"] = _Lines(ends)
    try:
        summary, problems = diagnose(run)
        facts["run/doctor.json"] = {
            "summary": summary,
            "problems": [asdict(problem) for problem in problems],
        }
    except VideotuneError as error:
        facts["run/doctor.json"] = {"summary": str(error), "problems": []}
    facts["run/listing.json"] = _listing(run)
    return facts


class _Lines(list[Any]):
    """Values that are written as a line each."""


def _encoded(content: Any, masks: Masks, with_captions: bool) -> bytes:
    """Return the masked bytes of a file of the bundle."""
    if isinstance(content, str):
        return masks.in_text(content).encode(errors="replace")
    value = masks.in_value(content, with_texts=with_captions)
    if isinstance(content, _Lines):
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in value)
    else:
        text = json.dumps(value, indent=1, ensure_ascii=False)
    return text.encode(errors="replace")


def _record(path: Path) -> Any:
    """Return a run's record; None, with a note, if it cannot be read."""
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except (OSError, ValueError):
        echo(f"note: {path.name} is damaged, and is left out")
        return None


def _clips(account: Any) -> list[Mapping[str, Any]]:
    clips = account.get("clips") if isinstance(account, Mapping) else None
    if not isinstance(clips, list):
        return []
    return [clip for clip in clips if isinstance(clip, Mapping)]


def _numbers(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a mapping, at any depth; texts may be of clips."""
    numbers: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            numbers[key] = _numbers(inner)
        elif isinstance(inner, int | float) or inner is None:
            numbers[key] = inner
    return numbers


def _texts_of(
    run: Path, account: Any, journal: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield every caption and prompt that a run knows."""
    config = _record(run / "config.json")
    settings = config.get("settings") if isinstance(config, Mapping) else None
    for source in (_clips(account), settings, list(journal)):
        yield from _written_texts(source, key="")


def _written_texts(value: Any, key: str) -> Iterator[str]:
    """Yield the texts under the keys of texts that a user wrote."""
    if isinstance(value, str) and key in TEXT_KEYS:
        if value != DEFAULT_PROJECT:
            yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            # what is below samples may have keys of its own
            is_text = key in TEXT_KEYS and name not in ("image", "loras", "resolution")
            yield from _written_texts(inner, key if is_text else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _written_texts(inner, key)


def _listing(run: Path) -> list[dict[str, Any]]:
    """Return the run's files with their bytes, a checkpoint's too; not those of clips."""
    rows = []
    for path in sorted(run.rglob("*")):
        relative = path.relative_to(run)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        is_picture = relative.parts[0] in ("pictures", "samples", "sampled", "compare")
        if path.is_file() and not is_hidden and not is_picture:
            rows.append({"path": relative.as_posix(), "bytes": path.stat().st_size})
    return rows
