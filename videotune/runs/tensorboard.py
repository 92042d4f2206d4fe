"""TensorBoard: what the journal says, once more as event files, for those who watch many runs there.

The journal stays what counts: the board follows it line by line and is read by nothing here. A resumed run writes a further
file whose start tells TensorBoard to drop what came after the step that it goes on from.
"""

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from PIL import Image

from videotune.data.video_writer import read_video
from videotune.files import append_whole
from videotune.runs.scalars import scalars

FOLDER = "tensorboard"


class TensorBoardWriter:
    """An event file in the run's folder ``tensorboard``.

    What cannot be written, on a full disk, never ends a run: it is missing there, and ``on_error`` is told once.
    TensorBoard's own writer has a thread, whose errors come later and end it; its records are written here at once.
    """

    def __init__(self, run: Path, first: int, on_error: Callable[[str], None]) -> None:
        """``first``: the first step to come; what earlier files say of it and of later ones is dropped by TensorBoard."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._run = run
        self._on_error = on_error
        self._told = False
        self._file: FileIO | None = None
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._add(
            Event(
                wall_time=time.time(),
                step=first,
                session_log=SessionLog(status=SessionLog.START),
            )
        )

    def _add(self, event: Any) -> None:
        """Append an event; the first that cannot be is told."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        try:
            self._file = self._file or opened(self._run / FOLDER)
            append_whole(self._file, record.getvalue())
        except OSError as error:
            if not self._told:
                self._told = True
                self._on_error(
                    f"the curves for TensorBoard have a gap, the journal has none: {error}"
                )

    def line(self, line: Mapping[str, Any]) -> None:
        """Write a line of the journal; kinds that TensorBoard has no place for are left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()
        ]
        if line["kind"] == "verdict":
            values.append(
                text_pb(
                    "verdict", f"**{line['verdict'] or 'no verdict'}**: {line['reason']}"
                ).value[0]
            )
        if line["kind"] == "sample":
            values.append(
                gif_value(f"{line['prompt']} (seed {line['seed']})", self._run / line["path"])
            )
        if values:
            when = float(line.get("time", time.time()))
            self._add(
                Event(wall_time=when, step=int(line["step"]), summary=Summary(value=values))
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def opened(folder: Path) -> FileIO:
    """A new event file under a name that TensorBoard looks for; it reads them in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    who = f"{socket.gethostname()}.{os.getpid()}.{len(list(folder.iterdir()))}"
    return (folder / f"events.out.tfevents.{int(time.time()):010d}.{who}").open(
        "xb", buffering=0
    )


def gif_value(tag: str, path: Path) -> Any:
    """A video file as an animated GIF, which TensorBoard's image page plays."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames, rate = read_video(path, 1 << 12)
    pictures = [Image.fromarray(frame) for frame in frames]
    content = io.BytesIO()
    duration = max(20, round(1000 / rate))
    pictures[0].save(
        content, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0
    )
    width, height = pictures[0].size
    image = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=content.getvalue()
    )
    return Summary.Value(tag=tag, image=image)
