"""Clips with damage in their middle: each is skipped with a reason, or every window of
it has the planned frames.

More of them: ``VIDEOTUNE_FUZZ=100000 pytest tests/fuzz/test_fuzz_clips.py``.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.test_odd_streams import changing, join, two_streams
from tests.support.clips import noise, write_clip
from tests.support.damaged_files import COUNT, damaged_bytes
from videotune.data.content_scan import ContentScan
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.workers import DecoderCrash, Workers

Damage = Callable[[bytes, random.Random], bytes]


def lost_packets(content: bytes, generator: random.Random) -> bytes:
    """A transport stream without some packets of its middle."""
    begin = generator.randrange(len(content) // 188) * 188
    return content[:begin] + content[begin + 188 * generator.choice((1, 2, 7)) :]


def moved_tail(content: bytes, generator: random.Random) -> bytes:
    """A file whose second half comes first: its clock falls somewhere in a picture."""
    middle = generator.randrange(1, len(content))
    return content[middle:] + content[:middle]


def repeated(content: bytes, generator: random.Random) -> bytes:
    """A file with a part of itself inserted again: its clock falls back for a while."""
    begin = generator.randrange(len(content))
    part = content[begin : begin + generator.randrange(1, len(content))]
    place = generator.randrange(len(content))
    return content[:place] + part + content[place:]


DAMAGES: tuple[Damage, ...] = (damaged_bytes, lost_packets, moved_tail, repeated)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Joined parts, sizes that change, several streams; small, with many keyframes."""
    folder = tmp_path_factory.mktemp("clips")
    options = {"g": "6", "bf": "2"}
    made = []
    for suffix, codec in (
        (".mpg", "mpeg2video"),
        (".ts", "libx264"),
        (".mkv", "mpeg4"),
    ):
        parts = [
            write_clip(
                folder / f"{i}{suffix}",
                noise(14, seed=i),
                codec=codec,
                options=options,
            )
            for i in range(2)
        ]
        made.append(join(folder / f"joined{suffix}", *parts))
    made.append(changing(folder / "sizes.webm", [(64, 96), (32, 48), (96, 64)]))
    made.append(two_streams(folder / "two" / "streams.ts", [(48, 96), (96, 144)], None))
    return made


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2, limit=20.0) as pool:
        yield pool


def windows_of(info: MediaInfo, scan: ContentScan) -> list[list[float]]:
    """Seven frames at 24 a second, from several places that were scanned and are
    sound.
    """
    end = min(info.seconds, scan.until)
    if scan.damaged_at is not None:
        end = min(end, scan.damaged_at)
    starts = [0.0, end / 3, end / 2, end - 7 / 24]
    return [
        [start + i / 24 for i in range(7)]
        for start in starts
        if 0 <= start < end - 0.25
    ]


def test_clips_with_damage_in_the_middle(
    files: list[Path], workers: Workers, tmp_path: Path
) -> None:
    used = 0
    skipped = 0
    for number in range(max(20, COUNT // 5)):
        generator = random.Random(number)
        source = files[number % len(files)]
        damage = generator.choice(DAMAGES)
        path = tmp_path / f"{number}{source.suffix}"
        path.write_bytes(damage(source.read_bytes(), generator))

        arguments = {"path": str(path), "until": 10.0}
        try:
            answer = workers.submit("examine", arguments).result()
        except DecoderCrash as crash:
            pytest.fail(f"{damage.__name__} {number}: {crash}")
        if "problem" in answer:
            skipped += 1
            continue

        info = MediaInfo.from_json(answer["info"])
        scan = ContentScan.from_json(answer["scan"])
        for times in windows_of(info, scan):
            decoding = {"info": info, "times": times, "height": 32, "width": 48}
            try:
                frames = workers.submit("decode", decoding).result()
            except ClipProblem as problem:
                pytest.fail(f"{damage.__name__} {number}: planned, and {problem}")
            assert frames.shape == (7, 32, 48, 3)
        used += 1
        path.unlink()
    assert used > 0
    assert skipped > 0
