"""What reading clips costs, as ratios to the ffmpeg program in the same run.

    python benchmarks/data.py decode [--rounds 5] [--threads 2] [--files …] [--json FILE]
    python benchmarks/data.py encode [--rounds 5] [--json FILE]

``--tiny`` rehearses either.

decode: both produce every frame of the same 60-second file at 16 frames a second as
RGB24: ours by ``decode`` in windows of 81 frames one after the other, as a cache is
filled (one window in memory at a time); ffmpeg's by its fps, scale and crop filters
into a pipe that is read to its end. The same number of threads, alternating rounds, the
files in the page cache. Ratio = ffmpeg's seconds / ours: above 1 we are faster. ``cpu``
is the same of CPU seconds, which other work on the machine disturbs less. "640x352" is
the size that ``resolution: 480`` gives to 16:9 (both scale); "832x480" of a 480p file
is only cropped: ffmpeg then takes a converter that repeats colour samples, ours still
interpolates them.
"""

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imageio_ffmpeg import get_ffmpeg_exe

from videotune.data.decode import decode
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.latent_cache.decode_ahead import GROUP_BYTES

SECONDS = 60
FPS = 16

FILES = {
    "h264-1080p": (
        "1920x1080",
        "h264-1080p.mp4",
        ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23"],
    ),
    "h264-480p": (
        "854x480",
        "h264-480p.mp4",
        ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23"],
    ),
    "vp9-480p": (
        "854x480",
        "vp9-480p.webm",
        ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-b:v", "2M"],
    ),
    "mpeg4-480p": ("854x480", "mpeg4-480p.mp4", ["-c:v", "mpeg4", "-q:v", "4"]),
}
"""Name -> size, file name, encoder.

The pictures are ffmpeg's test picture with noise, 30 frames a second.
"""

CASES = [(name, 352, 640) for name in FILES] + [
    ("h264-480p", 480, 832),
    ("vp9-480p", 480, 832),
    ("mpeg4-480p", 480, 832),
]


def make(folder: Path, name: str, seconds: int = SECONDS) -> Path:
    """Write one of ``FILES``."""
    size, file_name, encoder = FILES[name]
    path = folder / file_name
    picture = f"testsrc2=s={size}:r=30:d={seconds},noise=alls=8:allf=t"
    command = [
        get_ffmpeg_exe(),
        "-v",
        "error",
        "-y",
        "-f",
        "lavfi",
        "-i",
        picture,
        *encoder,
        "-pix_fmt",
        "yuv420p",
        str(path),
    ]
    subprocess.run(command, check=True)
    return path


def ours(info: MediaInfo, height: int, width: int, threads: int) -> int:
    """Every frame, in groups as the cache decodes them; how many."""
    times = [i / FPS for i in range(int(info.seconds * FPS + 1e-6))]
    step = max(1, GROUP_BYTES // (3 * height * width))
    groups = [times[first : first + step] for first in range(0, len(times), step)]
    return sum(
        len(decode(info, group, height, width, threads=threads)) for group in groups
    )


def theirs(path: Path, height: int, width: int, threads: int) -> int:
    """Every frame by the ffmpeg program; how many."""
    cover = f"fps={FPS},scale={width}:{height}:force_original_aspect_ratio=increase,crop={width}:{height}"
    command = [
        get_ffmpeg_exe(),
        "-v",
        "error",
        "-threads",
        str(threads),
        "-i",
        str(path),
    ]
    command += [
        "-filter_threads",
        str(threads),
        "-vf",
        cover,
        "-pix_fmt",
        "rgb24",
        "-f",
        "rawvideo",
        "-",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    held = bytearray(1 << 20)
    total = 0
    while got := process.stdout.readinto(held):  # type: ignore[attr-defined]
        total += got
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return total // (height * width * 3)


def clocked(work: Callable[[], int]) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds of this process and its children, what it returned)."""

    def cpu() -> float:
        used = [
            resource.getrusage(who)
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return sum(one.ru_utime + one.ru_stime for one in used)

    begun = time.perf_counter()
    spent = cpu()
    result = work()
    return time.perf_counter() - begun, cpu() - spent, result


def bootstrap(ratios: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the median of the rounds' ratios."""
    pick = random.Random(0)
    medians = sorted(
        statistics.median(pick.choices(ratios, k=len(ratios))) for _ in range(draws)
    )
    return medians[draws // 40], medians[-draws // 40]


def decode_case(
    path: Path, height: int, width: int, rounds: int, threads: int
) -> dict[str, Any]:
    """One file at one size: seconds and ratios of alternating rounds; the first of each
    only warms.
    """
    info = probe(path)
    sides: dict[str, Callable[[], int]] = {
        "ours": lambda: ours(info, height, width, threads),
        "ffmpeg": lambda: theirs(path, height, width, threads),
    }
    walls = []
    cpus = []
    for index in range(rounds + 1):
        order = list(sides) if index % 2 else list(reversed(sides))
        took = {side: clocked(sides[side]) for side in order}
        if took["ours"][2] != took["ffmpeg"][2]:
            raise RuntimeError(
                f"{path.name}: {took['ours'][2]} frames are ours, {took['ffmpeg'][2]} ffmpeg's"
            )
        if index:
            walls.append((took["ours"][0], took["ffmpeg"][0]))
            cpus.append((took["ours"][1], took["ffmpeg"][1]))
    ratios = [their / our for our, their in walls]
    low, high = bootstrap(ratios)
    return {
        "size": f"{width}x{height}",
        "ours_s": statistics.median(our for our, _ in walls),
        "ffmpeg_s": statistics.median(their for _, their in walls),
        "ratio": {
            "median": statistics.median(ratios),
            "low": low,
            "high": high,
            "allowed": 0.9,
            "rounds": ratios,
        },
        "cpu_ratio": statistics.median(their / our for our, their in cpus),
    }


def decode_part(words: argparse.Namespace) -> dict[str, Any]:
    """Every file and size that was asked for."""
    figures: dict[str, Any] = {
        "threads": words.threads,
        "rounds": words.rounds,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as name:
        paths = {file: make(Path(name), file, words.seconds) for file in words.files}
        for file, height, width in CASES:
            if file not in paths:
                continue
            case = decode_case(paths[file], height, width, words.rounds, words.threads)
            figures["cases"][f"{file} to {case['size']}"] = case
            ratio = case["ratio"]
            print(
                f"{file:>11} to {case['size']}: ours {case['ours_s']:6.2f} s, ffmpeg {case['ffmpeg_s']:6.2f} s, "
                f"ratio {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}), cpu {case['cpu_ratio']:.2f}",
                flush=True,
            )
    return figures


def encode_part(words: argparse.Namespace) -> dict[str, Any]:
    """The share of the encoding time that the VAE waits for frames: clips of 480p into
    the toy base's cache, at 64 x 64.

    Its VAE is far faster than a real one, so the share is an upper bound: a real VAE
    gives the decoders more time.
    """
    import torch

    from videotune.config.resolve import parse
    from videotune.data.dataset import scan
    from videotune.data.workers import Workers
    from videotune.latent_cache.cache_items import CacheItems, missing_items
    from videotune.latent_cache.encode import encode_missing
    from videotune.latent_cache.keys import CacheKeys
    from videotune.latent_cache.store import LatentCache
    from videotune.models.base_model import of_base, place
    from videotune.models.registry import find

    folder = place("asset:toy").folder
    figures: dict[str, Any] = {"rounds": words.rounds, "workers": {}}
    with tempfile.TemporaryDirectory() as name:
        paths = [make(Path(name), "h264-480p", words.seconds)]
        paths += [
            Path(shutil.copy(paths[0], paths[0].with_name(f"{i}.mp4")))
            for i in range(3)
        ]
        for number, path in enumerate(paths):
            path.with_suffix(".txt").write_text(f"clip {number}")
            with path.open("ab") as file:  # other bytes, so that it is another clip
                file.write(b"\x00\x00\x00\x08free" * (number + 1))
        spec = of_base(folder).read_spec(folder)
        video = {"max_duration": 20.0}
        config = parse(
            {
                "datasets": [{"path": name}],
                "video_config": video,
                "resolution": 64,
                "validation_fraction": 0.0,
            }
        )
        library = scan(config, spec.rules, Path(name) / "index.sqlite")
        takes = [(window, 0) for window in library.windows]
        for count in (0, 1, 2):
            rounds = []
            for index in range(words.rounds):
                family = find(spec.name)(folder, torch.device("cpu"), torch.float32)
                store = LatentCache(Path(name) / f"cache-{count}-{index}")
                todo = missing_items(
                    store, CacheKeys.of(family, 0), CacheItems((), tuple(takes))
                )
                workers = Workers(count) if count else None
                begun = time.monotonic()
                waited = encode_missing(
                    family,
                    store,
                    todo,
                    library.media,
                    0,
                    workers,
                    lambda what, done, total: None,
                )
                took = time.monotonic() - begun
                if workers is not None:
                    workers.close()
                rounds.append((took, waited / took))
            seconds, share = (
                statistics.median(column) for column in zip(*rounds, strict=True)
            )
            figures["workers"][str(count)] = {
                "seconds": seconds,
                "waited_share": share,
                "takes": len(takes),
            }
            print(
                f"{count} workers: {len(takes)} windows in {seconds:.1f} s, {share:.0%} of it waiting for frames",
                flush=True,
            )
    return figures


PARTS = {"decode": decode_part, "encode": encode_part}


def main() -> None:
    """Run one part and print its ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each file")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of a few seconds; its figures mean nothing",
    )
    words = parser.parse_args()
    if words.tiny:
        words.rounds = 1
        words.files = ["h264-480p"]
        words.seconds = 2
    figures = PARTS[words.part](words)
    if words.json:
        words.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
