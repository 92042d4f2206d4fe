"""Damaged files of every kind end in frames or in a reason: never in another exception, a hang or a crash.

The cases go through the pool that reads clips in a run: a crash inside FFmpeg costs one child, and names its case.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.clips import noise, write_clip, write_image
from tests.fuzz.mutate import damaged_bytes
from videotune.data.file_checks import REASONS
from videotune.data.workers import DecoderCrash, Workers

LIMIT = 20.0
"""Seconds after which a case counts as a hang; the slowest of thousands takes less than one."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small whole files of every container, codec and image format."""
    folder, frames = tmp_path_factory.mktemp("seeds"), noise(14, 64, 96)
    fast = {"cpu-used": "8", "deadline": "realtime"}
    fragments = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    files = [
        write_clip(folder / "a.mp4", frames, options={"g": "5", "bf": "2"}, rotation=90),
        write_clip(folder / "first.mp4", frames, container_options={"movflags": "faststart"}),
        write_clip(folder / "fragmented.mp4", frames, options={"g": "5"}, container_options=fragments),
        write_clip(folder / "hevc.mp4", frames, codec="libx265", options={"x265-params": "log-level=none:keyint=6"}),
        write_clip(folder / "mpeg4.mp4", frames, codec="mpeg4"),
        write_clip(folder / "a.mov", frames, codec="prores_ks", pix_fmt="yuv422p10le"),
        write_clip(folder / "png.mov", frames[:4], codec="png", pix_fmt="rgba"),
        write_clip(folder / "a.mkv", frames, options={"g": "5"}),
        write_clip(folder / "ffv1.mkv", frames[:5], codec="ffv1"),
        write_clip(folder / "a.webm", frames, options=fast),
        write_clip(folder / "vp8.webm", frames, codec="libvpx", options=fast),
        write_clip(folder / "a.avi", frames, options={"g": "5"}),
        write_clip(folder / "mjpeg.avi", frames[:5], codec="mjpeg", pix_fmt="yuvj420p"),
    ]
    return files + [
        write_image(folder / f"a.{kind}", frames[0]) for kind in ("png", "jpg", "webp", "bmp", "tif", "gif")
    ]


def outcomes(seeds: list[Path], folder: Path, first: int, last: int) -> Counter[str]:
    """How the cases ended."""
    paths, ends = [], Counter[str]()
    for case in range(first, last):
        source, random_ = seeds[case % len(seeds)], random.Random(case)
        paths.append(folder / f"{case}-{source.name}")
        paths[-1].write_bytes(damaged_bytes(source.read_bytes(), random_))
    with Workers(2, limit=LIMIT) as workers:
        answers = list(workers.map(("examine", {"path": str(path), "until": 9.0}) for path in paths))
        for path, answer in zip(paths, answers, strict=True):
            assert not isinstance(answer, DecoderCrash), f"{path.name}: {answer}"
            if "info" not in answer:
                reason, detail = answer["problem"]
                assert reason in REASONS
                assert detail
                ends[reason] += 1
        infos = [answer["info"] for answer in answers if "info" in answer]
        how = {"times": [0.0, 0.0], "height": 32, "width": 48}
        for info, frames in zip(infos, workers.map(("decode", {"info": info} | how) for info in infos), strict=True):
            assert not isinstance(frames, DecoderCrash), f"{info['path']}: {frames}"
            ends["frames" if not isinstance(frames, Exception) else frames.reason] += 1
    return ends


def test_damaged_files_end_in_frames_or_a_reason(seeds: list[Path], tmp_path: Path) -> None:
    ends = outcomes(seeds, tmp_path, 0, 140)
    assert sum(ends.values()) == 140
    assert ends["frames"] > 10
    assert len(ends) >= 4  # several reasons
