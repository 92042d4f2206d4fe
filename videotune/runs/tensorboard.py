"""Copy the journal into event files for TensorBoard.

The journal stays the record: nothing here reads the event files. A resumed run writes a
further file, which begins by telling TensorBoard to drop what came after the step that
the run resumes from.
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
from videotune.runs.journal import shown_verdict
from videotune.runs.scalars import scalars

FOLDER = "tensorboard"


class TensorBoardWriter:
    """An event file in the run's folder ``tensorboard``.

    A full disk never ends a run: what cannot be written is missing, and ``on_error`` is
    called once. TensorBoard's own writer has a thread, whose errors come later and end
    it, so its records are written here at once.
    """

    def __init__(self, run: Path, first: int, on_error: Callable[[str], None]) -> None:
        """Open a file.

        Args:
            run: the run folder.
            first: the first step to come. TensorBoard drops what earlier files say of
                it and of later ones.
            on_error: called with a sentence on the first failure.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._run = run
        self._on_error = on_error
        self._has_reported = False
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
        """Append an event. The first failure is reported."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        try:
            if self._file is None:
                self._file = open_event_file(self._run / FOLDER)
            append_whole(self._file, record.getvalue())
        except OSError as error:
            if not self._has_reported:
                self._has_reported = True
                self._on_error(
                    f"the curves for TensorBoard have a gap, the journal has none: {error}"
                )

    def line(self, line: Mapping[str, Any]) -> None:
        """Write a line of the journal.

        Kinds that TensorBoard cannot show are left out.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(line).items()
        ]
        if line["kind"] == "verdict":
            text = f"**{shown_verdict(line)}**: {line['reason']}"
            values.append(text_pb("verdict", text).value[0])
        if line["kind"] == "sample":
            tag = f"{line['prompt']} (seed {line['seed']})"
            values.append(gif_value(tag, self._run / line["path"]))

        if values:
            wall_time = float(line.get("time", time.time()))
            summary = Summary(value=values)
            self._add(
                Event(wall_time=wall_time, step=int(line["step"]), summary=summary)
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def open_event_file(folder: Path) -> FileIO:
    """Create an event file with a name that TensorBoard looks for.

    It reads them in the order of their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))
    process = f"{socket.gethostname()}.{os.getpid()}.{number}"
    path = folder / f"events.out.tfevents.{int(time.time()):010d}.{process}"
    return path.open("xb", buffering=0)


def gif_value(tag: str, path: Path) -> Any:
    """Return a video file as an animated GIF, which TensorBoard's image page plays."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames, rate = read_video(path, 1 << 12)
    pictures = [Image.fromarray(frame) for frame in frames]
    content = io.BytesIO()
    duration = max(20, round(1000 / rate))
    pictures[0].save(
        content,
        "GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=duration,
        loop=0,
    )
    width, height = pictures[0].size
    image = Summary.Image(
        height=height,
        width=width,
        colorspace=3,
        encoded_image_string=content.getvalue(),
    )
    return Summary.Value(tag=tag, image=image)
