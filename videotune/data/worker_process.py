"""The child process of the worker pool: reads requests, opens clips, writes answers.

A request is a JSON line [task, arguments] on stdin; an answer is a JSON line [kind,
value] on stdout. The kinds:

- "ok": value is the result.
- "frames": value is the shape (T, H, W, 3); the bytes of the uint8 array follow.
- "sound": value is the shape (2, n); the bytes of the float32 array follow.
- "problem": value is [reason, detail]; the clip's content is at fault.
- "refused": value is the message of a VideotuneError, such as of an object store.
- "crash": value is [reason, detail]; the next attempt may succeed.
- "error": value is a traceback.

The first line, ["ok", "ready"], reports that the process has started. The process ends
when stdin does, even during a task, so that a killed parent leaves no children behind.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

import numpy as np

from videotune.data.content_scan import scan_content
from videotune.data.control_filters import ControlSettings
from videotune.data.control_writer import write_control
from videotune.data.decode import Frames, decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import local_copy
from videotune.data.probe import probe
from videotune.data.sound import Waveform, read_sound
from videotune.data.sound_scan import SoundScan, scan_sound
from videotune.errors import VideotuneError
from videotune.files import hash_file


def examine(path: str, until: float, known_ids: Iterable[str] = ()) -> dict[str, Any]:
    """Hash a file, read its media info and scan its first seconds.

    Args:
        path: file path.
        until: seconds of the clip to scan.
        known_ids: hashes of contents that need no media info and scan.

    Returns:
        One of these:

        - a content in ``known_ids``: only "id", the hash of the bytes;
        - a usable clip: "id", "info" and "scan";
        - a clip that cannot be used: "id" and "problem", with "info" unless probing
          failed;
        - a file that cannot be read: "id", which is "", and "problem", with "info" if
          reading failed only after probing.
    """
    try:
        with local_copy(path) as local:
            answer: dict[str, Any] = {"id": hash_file(local)}
    except OSError as error:
        # Missing rights or a disconnected disk: not a property of the content.
        return {"id": "", "problem": ["unreadable", error.strerror or str(error)]}

    if answer["id"] in known_ids:
        return answer

    try:
        info = probe(path)
        answer["info"] = info.to_json()
        scan = scan_content(info, until)
        if scan.form_changes_at is not None:
            answer["info"] = info.ended_at(scan.form_changes_at).to_json()
        answer["scan"] = scan.to_json()
    except ClipProblem as problem:
        answer["problem"] = [problem.reason, problem.detail]
        if not _is_readable(path):
            answer["id"] = ""
    return answer


def listen(info: dict[str, Any], until: float) -> dict[str, Any]:
    """Scan the sound of a clip's first seconds.

    Args:
        info: media info as JSON; earlier versions wrote it without the sound.
        until: seconds of the clip to scan.

    Returns:
        "sound" and "unusable_sound" of its media info, and "scan": the sound scan, or
        None if there is no usable track.
    """
    media = MediaInfo.from_json(info)
    if "sound" not in info:
        probed = probe(media.path)
        media = replace(media, sound=probed.sound, unusable_sound=probed.unusable_sound)

    scan = None
    if media.sound is not None:
        try:
            scan = scan_sound(media, until)
        except ClipProblem as problem:
            if not _is_readable(media.path):
                raise
            scan = SoundScan(until, problem=problem.detail)
    return {
        "sound": None if media.sound is None else vars(media.sound),
        "unusable_sound": media.unusable_sound,
        "scan": None if scan is None else scan.to_json(),
    }


def read_clip_sound(info: dict[str, Any], **options: Any) -> Waveform:
    """Read a part of a clip's sound.

    Args:
        info: media info as JSON.
        options: further arguments of ``read_sound``.
    """
    return read_sound(MediaInfo.from_json(info), **options)


def decode_clip(info: dict[str, Any], **options: Any) -> Frames:
    """Decode frames in one thread, since the pool has a process per CPU.

    Args:
        info: media info as JSON.
        options: further arguments of ``decode``.
    """
    return decode(MediaInfo.from_json(info), **options, threads=1)


def derive(info: dict[str, Any], path: str, **settings: Any) -> dict[str, Any]:
    """Write the control of a clip in one thread.

    Args:
        info: media info of the clip as JSON.
        path: the file to write.
        settings: fields of ``ControlSettings``.

    Returns:
        "error", arguments of an OSError, if the file cannot be written.
    """
    try:
        write_control(
            Path(path), MediaInfo.from_json(info), ControlSettings(**settings)
        )
    except OSError as error:
        return {"error": [error.errno, error.strerror or str(error), path]}
    return {}


TASKS: dict[str, Callable[..., Any]] = {
    "examine": examine,
    "listen": listen,
    "decode": decode_clip,
    "read_sound": read_clip_sound,
    "derive": derive,
}
"""Functions by the task's name in a request."""

ARRAY_KINDS = {"decode": "frames", "read_sound": "sound"}
"""Kind of the answer of tasks whose result is an array."""


def _is_readable(path: str) -> bool:
    """Return whether the whole file can still be read; if not, its content is not at
    fault.
    """
    with suppress(OSError, VideotuneError), local_copy(path) as local:
        hash_file(local)
        return True
    return False


def _answer(task: str, arguments: dict[str, Any], out: BinaryIO) -> None:
    """Perform a request and write the answer, which may be any failure."""
    result: Any = None
    kind: str
    value: Any
    try:
        result = TASKS[task](**arguments)
        if task in ARRAY_KINDS:
            kind = ARRAY_KINDS[task]
            value = result.shape
        else:
            kind = "ok"
            value = result
    except VideotuneError as error:
        kind = "refused"
        value = str(error)
    except ClipProblem as problem:
        kind = "problem" if _is_readable(arguments["info"]["path"]) else "crash"
        value = [problem.reason, problem.detail]
    except MemoryError:
        kind = "crash"
        value = ["decode_error", "there is not enough memory for it"]
    except Exception:  # a bug, raised again in the parent
        kind = "error"
        value = traceback.format_exc()

    out.write(json.dumps([kind, value]).encode() + b"\n")
    if kind in ARRAY_KINDS.values():
        out.write(np.ascontiguousarray(result).data)
    out.flush()


def _read_requests(lines: Iterable[bytes], requests: SimpleQueue[list[Any]]) -> None:
    """Pass requests on; end the process at the end of stdin, since nobody reads the
    answer.
    """
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Answer requests until stdin ends."""
    # Libraries that print must not disturb the answers, so stdout gets another
    # descriptor.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    requests: SimpleQueue[list[Any]] = SimpleQueue()
    out.write(b'["ok", "ready"]\n')
    out.flush()

    # The parent has closed stderr once the process is ready.
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)

    reader = Thread(
        target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True
    )
    reader.start()
    try:
        while True:
            task, arguments = requests.get()
            _answer(task, arguments, out)
    except BrokenPipeError:  # the parent has ended
        os._exit(0)
