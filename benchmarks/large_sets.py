"""What a large set costs: seconds, memory, and how both grow with the number of clips.

    python benchmarks/large_sets.py [--sizes 1000 10000 100000] [--cold 100 300 1000]
        [--first 1000 10000 100000] [--folder DIR] [--json FILE] [--tiny]

Each reading runs in its own process, and begins after the imports.

cold      ``check`` of real clips that no index knows: each is hashed, decoded and scanned.
first     the same of many small files: what a decoder would find is stood in.
known     ``check`` of clips that the index knows, as after a change of the settings.
again     the same ``check`` once more, no file changed.
start     a run's job, its buckets and the draws of its first step, no file changed.
draws     seconds of the draws of 64 steps, at ten places of the run.

The clips of ``cold`` are different videos. Those of ``first`` are different small files;
the processes that open clips hash them, and answer as if each were a video with pictures
of its own. Those of the others are stand-ins: hard links to one video, with rows in the
index as if each had been scanned. All else is the real code: every file is listed,
compared and opened, every window placed. ``windows`` is how many there are.

``peak_mb`` is the memory at its peak above that before; ``anonymous_mb`` that part of it
that is not pages of files, which the system takes back when it needs them; ``held_mb`` the
memory when the reading has ended and its result is still there. ``bytes_a_clip`` is how
much each grows from one size to the next.

"exponents" are those of n^k between one size and the next. Libraries below 5,000 clips
are not kept for the next start, so ``again`` is ``known`` there.
"""

import argparse
import base64
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

import av
import numpy as np

from videotune.data import worker_process, workers
from videotune.data.content_scan import ContentScan
from videotune.data.index_database import FileRow, IndexDatabase
from videotune.data.media_index import INDEX_NAME, INDEX_VERSION
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe

PARTS = ("known", "again", "start", "draws")
FOLDER_SIZE = 1000
"""Clips of a folder, which are links to one file."""

FRAMES = 160
BATCH = 64

SAMPLED_EVERY = 0.02
"""Seconds between two looks at the memory that is not pages of files."""

STAND_IN_PROGRAM = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.path.insert(0, {str(Path(__file__).parent)!r})
from large_sets import answer_with_stand_ins
answer_with_stand_ins()
"""
"""Program of the processes that open clips in ``first``."""


def write_video(path: Path, seed: int, frames: int) -> None:
    """Write a video of moving noise, 128x96, 16 frames a second."""
    rng = np.random.default_rng(seed)
    picture = np.kron(rng.integers(0, 255, (12, 16, 3)), np.ones((8, 8, 1)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width = 128
        stream.height = 96
        stream.pix_fmt = "yuv420p"
        stream.options = {"preset": "ultrafast"}
        for number in range(frames):
            rolled = np.roll(picture, number * 2, axis=1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(rolled, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def make_real(folder: Path, count: int) -> None:
    """Write different videos with captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        path = folder / f"v{number:06d}x.mp4"
        write_video(path, number, FRAMES // 5)
        path.with_suffix(".txt").write_text(f"pattern {number} moves to the right")


def picture_of(rng: np.random.Generator) -> str:
    """Return the signature of a picture unlike any other."""
    coarse = rng.normal(0, 40, (4, 4))
    brightness = np.kron(coarse, np.ones((3, 3)))[:10, :10] + rng.uniform(40, 215)
    brightness += rng.normal(0, 8, brightness.shape)
    colour = rng.normal(128, 15, 50)
    levels = np.clip(np.concatenate([brightness.ravel(), colour]), 0, 255)
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


def make_stand_ins(folder: Path, count: int) -> None:
    """Hard-link ``count`` clips to a few files, list their captions, and fill the index."""
    folder.mkdir(parents=True)
    source = folder.with_suffix(".mp4")
    write_video(source, 0, FRAMES)
    info = probe(source).to_json()
    info.pop("path")
    cache = folder / ".videotune-cache"
    versions = {"version": str(INDEX_VERSION), "av": version("av")}
    database = IndexDatabase(cache / INDEX_NAME, versions)
    rng = np.random.default_rng(0)
    content = source.read_bytes()
    with (folder / "metadata.jsonl").open("w") as metadata:
        for number in range(count):
            name = f"{number // FOLDER_SIZE:05d}/v{rng.integers(2**40):010x}.mp4"
            path = folder / name
            if number % FOLDER_SIZE == 0:
                path.parent.mkdir()
                path.write_bytes(content)
                first = path
                status = path.stat()
            else:
                os.link(first, path)
            scan = ContentScan(
                60.0, signatures=tuple(picture_of(rng) for _ in range(3))
            )
            key = f"{number:032x}.mp4"
            row = {"info": info, "scan": scan.to_json(), "until": 60.0}
            database.put_content(key, json.dumps(row))
            stamp = FileRow(status.st_size, status.st_mtime_ns, key)
            database.put_file(name, stamp)
            text = f"a person walks along street {number} in the evening, slowly"
            metadata.write(json.dumps({"file_name": name, "text": text}) + "\n")
    database.close()


def make_files(folder: Path, count: int) -> None:
    """Write ``count`` small files that all differ, each with a caption of its own."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number // FOLDER_SIZE:05d}/v{rng.integers(2**40):010x}.mp4"
        if number % FOLDER_SIZE == 0:
            path.parent.mkdir()
        path.write_bytes(rng.bytes(64 + number % 1999))
        text = f"a person walks along street {number} in the evening, slowly"
        path.with_suffix(".txt").write_text(text)


def stand_in_info(path: str) -> MediaInfo:
    """Return media info as ``probe`` does, of a video that is not there."""
    first_bytes = Path(path).read_bytes()[:2]
    frames = FRAMES + first_bytes[0]
    return MediaInfo(
        path=path,
        codec="h264",
        width=128,
        height=96,
        ticks=tuple(range(0, 1024 * frames, 1024)),
        frame_seconds=1 / 16,
        fps=16.0,
        keyframes=tuple(range(0, frames, 50)),
        container="mov,mp4,m4a,3gp,3g2,mj2",
        time_base=(1, 16384),
    )


def stand_in_scan(info: MediaInfo, until: float) -> ContentScan:
    """Return a content scan of pictures that depend on the file's bytes."""
    content = Path(info.path).read_bytes()
    rng = np.random.default_rng(list(content[:64]))
    return ContentScan(until, signatures=tuple(picture_of(rng) for _ in range(3)))


def answer_with_stand_ins() -> None:
    """Answer requests of the pool as its processes do, without a decoder."""
    worker_process.probe = stand_in_info  # type: ignore[assignment]
    worker_process.scan_content = stand_in_scan  # type: ignore[assignment]
    worker_process.main()


class AnonymousPeak:
    """While entered, looks at the memory that is not pages of files, again and again."""

    def __init__(self) -> None:
        self.mb = memory("RssAnon")
        self._has_ended = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._has_ended.wait(SAMPLED_EVERY):
            self.mb = max(self.mb, memory("RssAnon"))

    def __enter__(self) -> "AnonymousPeak":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self.mb = max(self.mb, memory("RssAnon"))


def memory(field: str) -> float:
    """Return a field of this process's status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) / 1024
    raise KeyError(field)


def stand_in_source(job: Any, family: Any) -> Any:
    """Return where batches come from, without models and with an empty cache."""
    from videotune.data.clip_table import MediaSizes, clips_by_id
    from videotune.latent_cache.batch_source import BatchSource
    from videotune.latent_cache.keys import CacheKeys
    from videotune.latent_cache.store import LatentCache
    from videotune.trainer.build import make_objective

    return BatchSource(
        config=job.config,
        spec=job.spec,
        store=LatentCache(job.cache / "no-entries"),
        keys=CacheKeys("vae", "text", 77, job.config.seed),
        collate_states=family.collate_states,
        clips=clips_by_id(job.library.clips),
        sizes=MediaSizes(job.library.media),
        buckets=job.buckets,
        schedule=job.schedule,
        objective=make_objective(job.spec, job.config),
    )


def measure(part: str, folder: Path) -> dict[str, Any]:
    """Take one reading in this process."""
    from videotune.commands.check import check
    from videotune.job.job import open_job
    from videotune.job.overrides import resolve_config, to_overrides
    from videotune.latent_cache.batches import draws_of
    from videotune.models.registry import find

    if part == "first":
        workers._PROGRAM = STAND_IN_PROGRAM
    overrides = to_overrides(None, {"data": str(folder), "preset": "toy"}, None)
    resolved = resolve_config(overrides, planning=True)
    family = find(resolved[1].name)
    source = None
    if part == "draws":
        source = stand_in_source(open_job(*resolved), family)
        _ = draws_of(source, 1)

    before = memory("VmRSS")
    anonymous_before = memory("RssAnon")
    begun = time.perf_counter()
    cpu_begun = time.process_time()
    with AnonymousPeak() as anonymous:
        if part == "start":
            job = open_job(*resolved)
            _ = draws_of(stand_in_source(job, family), 1)
            windows = len(job.library.windows)
        elif source is not None:
            for step in range(1, 640_001, 1000):
                _ = draws_of(source, step)
            windows = sum(len(bucket) for bucket in source.buckets)
        else:
            job = check(data=str(folder)).job
            windows = len(job.library.windows)
    return {
        "seconds": round(time.perf_counter() - begun, 3),
        "cpu_seconds": round(time.process_time() - cpu_begun, 3),
        "peak_mb": round(memory("VmHWM") - before, 1),
        "anonymous_mb": round(anonymous.mb - anonymous_before, 1),
        "held_mb": round(memory("VmRSS") - before, 1),
        "windows": windows,
    }


def in_process(part: str, folder: Path) -> dict[str, Any]:
    """Run one reading in its own process."""
    caches = folder.parent / "caches"
    done = subprocess.run(
        [sys.executable, __file__, "--part", part, "--folder", str(folder)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "XDG_CACHE_HOME": str(caches),
        },
    )
    reading: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name:>14} {part:6} {reading}", flush=True)
    return reading


def exponents(readings: dict[int, dict[str, Any]], field: str) -> list[float]:
    """Return the k of n^k between each size and the next."""
    sizes = sorted(readings)
    steps = []
    for smaller, larger in pairwise(sizes):
        ratio = max(readings[larger][field], 1e-3) / max(readings[smaller][field], 1e-3)
        steps.append(round(math.log(ratio) / math.log(larger / smaller), 2))
    return steps


def bytes_a_clip(readings: dict[int, dict[str, Any]], field: str) -> list[int]:
    """Return how many bytes a field of megabytes grows by a clip, from each size to the
    next.
    """
    sizes = sorted(readings)
    slopes = []
    for smaller, larger in pairwise(sizes):
        growth = readings[larger][field] - readings[smaller][field]
        slopes.append(round(growth * 2**20 / (larger - smaller)))
    return slopes


def main() -> None:
    """Make the sets and take all readings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--cold", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--first", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measure(arguments.part, arguments.folder)))
        return
    if arguments.tiny:
        arguments.sizes = [60, 120]
        arguments.cold = [4, 8]
        arguments.first = [60, 120]

    home = arguments.folder or Path(tempfile.mkdtemp())
    results: dict[str, dict[int, dict[str, Any]]] = {"cold": {}, "first": {}}
    for size in arguments.cold:
        folder = home / f"real-{size}"
        if not folder.exists():
            make_real(folder, size)
        results["cold"][size] = in_process("cold", folder)
    for size in arguments.first:
        folder = home / f"files-{size}"
        if not folder.exists():
            make_files(folder, size)
        for cache in (folder / ".videotune-cache", home / "caches"):
            shutil.rmtree(cache, ignore_errors=True)
        results["first"][size] = in_process("first", folder)
    for size in arguments.sizes:
        folder = home / f"set-{size}"
        if not folder.exists():
            make_stand_ins(folder, size)
        for part in PARTS:
            results.setdefault(part, {})[size] = in_process(part, folder)

    summary = {
        "command": "python benchmarks/large_sets.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "readings": results,
        "exponents": {
            part: {
                field: exponents(readings, field)
                for field in ("cpu_seconds", "peak_mb", "anonymous_mb")
            }
            for part, readings in results.items()
        },
        "bytes_a_clip": {
            part: {
                field: bytes_a_clip(readings, field)
                for field in ("peak_mb", "anonymous_mb", "held_mb")
            }
            for part, readings in results.items()
        },
    }
    text = json.dumps(summary, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
