"""Damaged files of every kind end in frames or in a reason: never in another exception, a hang or a crash.

The cases run in a child process (this file as a program), which says a line a case: a crash inside FFmpeg then names the
case and does not end the tests.
"""

import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

SLOW = 20.0
"""Seconds after which a case counts as a hang; the slowest of thousands takes less than one."""

Bytes = bytearray
Random = np.random.Generator


def flip_bits(data: Bytes, others: list[Path], random: Random) -> Bytes:
    for place in random.integers(0, len(data), 1 + int(random.integers(24))):
        data[place] ^= 1 << int(random.integers(8))
    return data


def flip_in_header(data: Bytes, others: list[Path], random: Random) -> Bytes:
    for place in random.integers(0, min(len(data), 1200), 1 + int(random.integers(6))):
        data[place] = int(random.integers(256))
    return data


def flip_at_the_end(data: Bytes, others: list[Path], random: Random) -> Bytes:
    """An MP4's index stands there."""
    for place in random.integers(max(0, len(data) - 1500), len(data), 1 + int(random.integers(6))):
        data[place] = int(random.integers(256))
    return data


def cut_short(data: Bytes, others: list[Path], random: Random) -> Bytes:
    return data[: int(random.integers(1, len(data)))]


def zero_a_range(data: Bytes, others: list[Path], random: Random) -> Bytes:
    first = int(random.integers(len(data)))
    length = min(len(data) - first, int(random.integers(1, 1 + len(data) // 3)))
    data[first : first + length] = bytes(length)
    return data


def swap_boxes(data: Bytes, others: list[Path], random: Random) -> Bytes:
    """The names of two boxes (MP4) or chunks (AVI, PNG) change places."""
    boxes = (
        "moov mdat trak mdia stbl stts ctts stss stsc stsz stco elst avcC tkhd mdhd hdlr strh strf movi idx1 IHDR IDAT"
    )
    names = [name.encode() for name in [*boxes.split(), "PLTE", "IEND"]]
    there = [name for name in names if name in data]
    if len(there) < 2:
        return flip_bits(data, others, random)
    a, b = (data.find(there[int(i)]) for i in random.choice(len(there), 2, replace=False))
    data[a : a + 4], data[b : b + 4] = data[b : b + 4], data[a : a + 4]
    return data


def huge_number(data: Bytes, others: list[Path], random: Random) -> Bytes:
    """A size or a count of all ones, or one that is negative."""
    place = int(random.integers(max(1, len(data) - 4)))
    if random.random() < 0.7:
        place %= 1500
    data[place : place + 4] = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00"][int(random.integers(3))]
    return data


def splice(data: Bytes, others: list[Path], random: Random) -> Bytes:
    other = others[int(random.integers(len(others)))].read_bytes()
    return data[: int(random.integers(1, len(data)))] + other[int(random.integers(len(other))) :]


MUTATIONS: list[Callable[[Bytes, list[Path], Random], Bytes]]
MUTATIONS = [flip_bits, flip_in_header, flip_at_the_end, cut_short, zero_a_range, swap_boxes, huge_number, splice]


def write_seeds(folder: Path) -> Path:
    """Small whole files of every container, codec and image format."""
    from tests.clips import noise, write_clip, write_image

    frames = noise(14, 64, 96)
    write_clip(folder / "a.mp4", frames, options={"g": "5", "bf": "2"}, rotation=90)
    write_clip(folder / "first.mp4", frames, container_options={"movflags": "faststart"})
    fragments = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    write_clip(folder / "fragmented.mp4", frames, options={"g": "5"}, container_options=fragments)
    write_clip(folder / "hevc.mp4", frames, codec="libx265", options={"x265-params": "log-level=none:keyint=6"})
    write_clip(folder / "mpeg4.mp4", frames, codec="mpeg4")
    write_clip(folder / "a.mov", frames, codec="prores_ks", pix_fmt="yuv422p10le")
    write_clip(folder / "png.mov", frames[:4], codec="png", pix_fmt="rgba")
    write_clip(folder / "a.mkv", frames, options={"g": "5"})
    write_clip(folder / "ffv1.mkv", frames[:5], codec="ffv1")
    write_clip(folder / "a.webm", frames, options={"cpu-used": "8", "deadline": "realtime"})
    write_clip(folder / "vp8.webm", frames, codec="libvpx", options={"cpu-used": "8", "deadline": "realtime"})
    write_clip(folder / "a.avi", frames, options={"g": "5"})
    write_clip(folder / "mjpeg.avi", frames[:5], codec="mjpeg", pix_fmt="yuvj420p")
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tif", "a.gif"):
        write_image(folder / name, frames[0])
    return folder


def perform(seeds: Path, first: int, last: int) -> None:
    """The child's work: a line before each case and one after it."""
    from videotune.data.decode import decode
    from videotune.data.file_checks import REASONS, ClipProblem
    from videotune.data.media_info import probe
    from videotune.rng import draws

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # an allocation beyond all reason is an error, too
    files = sorted(path for path in seeds.iterdir() if path.is_file())
    for case in range(first, last):
        random = draws(0, "fuzz", case)
        source = files[case % len(files)]
        mutate = MUTATIONS[int(random.integers(len(MUTATIONS)))]
        path = seeds / "mutated" / f"case{source.suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(mutate(bytearray(source.read_bytes()), files, random))
        print(f"{case} {source.name} {mutate.__name__} begins", flush=True)
        begun = time.perf_counter()
        try:
            facts = probe(path)
            times = sorted(float(one) for one in random.random(5) * facts.seconds)
            frames = decode(facts, times, 32, 48, threads=1 + case % 2)
            assert frames.shape == (5, 32, 48, 3)
            end = "frames"
        except ClipProblem as problem:
            end = problem.reason if problem.reason in REASONS and problem.detail else f"WRONG {problem!r}"
        except BaseException:
            wrong = traceback.format_exc().replace("\n", " | ")
            print(f"{case} WRONG {wrong}", flush=True)
            continue
        print(f"{case} ends after {time.perf_counter() - begun:.2f} s: {end}", flush=True)


def outcomes(seeds: Path, first: int, last: int) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and what must not be: crashes and hangs (named by their case), other exceptions."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    while first < last:
        command = [sys.executable, __file__, str(seeds), str(first), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            watch = threading.Timer(3 * SLOW, child.kill)
            watch.start()
            line = ""
            for line in child.stdout:
                watch.cancel()
                watch = threading.Timer(SLOW, child.kill)
                watch.start()
                if " WRONG " in line:
                    first = int(line.split()[0]) + 1
                    wrong.append(line)
                elif " ends after " in line:
                    first = int(line.split()[0]) + 1
                    ends[line.rsplit(": ", 1)[1].strip()] += 1
            watch.cancel()
        if child.returncode:
            wrong.append(f"exit code {child.returncode} in: {line.strip()}")
            if not line:
                break
            first += 1
    return ends, wrong


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds"))


def test_damaged_files_end_in_frames_or_a_reason(seeds: Path) -> None:
    ends, wrong = outcomes(seeds, 0, 140)
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) == 140
    assert ends["frames"] > 10
    assert len(ends) >= 4  # several reasons


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_damaged_files(seeds: Path, part: int) -> None:
    first = 1000 * (1 + part)
    ends, wrong = outcomes(seeds, first, first + 1000)
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) == 1000


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    perform(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
