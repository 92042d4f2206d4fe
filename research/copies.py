"""How well planted copies are found, and how often clips that are none are taken for
one.

    python research/copies.py [--real FOLDER] [--copies 40] [--unrelated 200] [--out
    research/copies.json]

A copy is five frames of a known clip cropped to 80 % of its sides anywhere, mirrored,
and encoded by x264 at CRF 35. Clips are landscapes of noise that a camera pans over
(tests/support/landscapes.py), pieces in time and space of the videos in --real, and, on
their own since they look alike, clips of the toy world.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from videotune.data.video_writer import video_bytes
from videotune.files import write_json
from videotune.rng import generator_for
from videotune.toy.shapes import COMBINATIONS, draw_clip
from videotune.validation.embeddings import (
    FrameEmbedding,
    default_embedding,
    embed_views,
    embed_with_mirror,
)
from videotune.validation.metrics import (
    Baselines,
    Gallery,
    NearestClip,
    ReferenceWindow,
    measure_baselines,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZE = (128, 208)
"""Rows and columns of every clip but the toy's, which has 64 by 64: half of what small
training windows have.
"""

SHORT = 64
"""The shorter side of the known clips as they are compared, as in a run."""

FRAMES = 17
SAMPLE = 5
EVERY = 1
"""Every so many frames are compared, as in a run with windows of 17 frames."""

SHARE = 0.8
CRF = 35


@dataclass(frozen=True)
class Film:
    """A clip's name, the video that it is a piece of, and its frames uint8 (T, H, W,
    3).
    """

    name: str
    source: str
    frames: np.ndarray


def landscapes(count: int, first: int = 0) -> list[Film]:
    """Pans at various speeds, each over its own landscape."""
    from tests.support.landscapes import pan

    films = []
    for seed in range(first, first + count):
        speed = generator_for(0, "copies", "speed", seed).uniform(0.3, 3)
        name = f"landscape-{seed}"
        films.append(
            Film(name, name, pan(seed, [i * speed for i in range(FRAMES)], *SIZE))
        )
    return films


def real_pieces(folder: Path | None) -> list[Film]:
    """Quarters and middles of each second of each video."""
    films = []
    for path in sorted(folder.glob("*.mp4")) if folder else []:
        with av.open(str(path)) as container:
            step = max(
                1, round(float(container.streams.video[0].average_rate or 16) / 16)
            )
            big = (SIZE[1] * 2, SIZE[0] * 2)
            kept = [
                f.reformat(*big, format="rgb24")
                for i, f in enumerate(container.decode(video=0))
                if i % step == 0
            ]
        whole = np.stack([frame.to_ndarray() for frame in kept])
        for second in range(len(whole) // FRAMES):
            part = whole[second * FRAMES : (second + 1) * FRAMES]
            corners = [
                (0, 0),
                (0, SIZE[1]),
                (SIZE[0], 0),
                SIZE,
                (SIZE[0] // 2, SIZE[1] // 2),
            ]
            for number, (y, x) in enumerate(corners):
                frames = part[:, y : y + SIZE[0], x : x + SIZE[1]]
                films.append(Film(f"{path.stem}-{second}-{number}", path.stem, frames))
    return films


def toys(count: int, first: int = 0) -> list[Film]:
    """Clips of the toy world, whose looks repeat after 72."""
    films = []
    for number in range(first, first + count):
        clip = draw_clip(
            generator_for(0, "copies", "toy", number),
            *COMBINATIONS[number * 7 % len(COMBINATIONS)],
        )
        films.append(Film(f"toy-{number}", f"toy-{number}", clip))
    return films


def encoded(frames: np.ndarray, crf: int = CRF) -> np.ndarray:
    """Frames through x264 and back."""
    with av.open(io.BytesIO(video_bytes(frames, 16, crf))) as container:
        return np.stack(
            [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        )


def planted(film: Film, number: int, mirrored: bool = True) -> np.ndarray:
    """A copy: some frames in a row, cropped somewhere, mirrored, encoded."""
    rng = generator_for(0, "copies", "planted", film.name, number)
    start = int(rng.integers(0, len(film.frames) - SAMPLE + 1))
    height, width = film.frames.shape[1:3]
    y, x = (int(place) for place in rng.uniform(0, 1 - SHARE, 2) * (height, width))
    cut = film.frames[
        start : start + SAMPLE, y : y + int(SHARE * height), x : x + int(SHARE * width)
    ]
    return encoded(cut[:, :, ::-1] if mirrored else cut)


def seen(embedding: FrameEmbedding, frames: np.ndarray) -> torch.Tensor:
    """What a sample of these frames is compared by."""
    return embed_with_mirror(embedding, frames[:SAMPLE:EVERY])


def shrunk(frames: np.ndarray) -> np.ndarray:
    """Frames as a run decodes known clips: the shorter side has 64 pixels."""
    by = min(frames.shape[1:3]) // SHORT
    count = frames.shape[0]
    height = frames.shape[1] // by
    width = frames.shape[2] // by
    cells = frames[:, : height * by, : width * by].reshape(
        count, height, by, width, by, 3
    )
    small: np.ndarray = cells.mean((2, 4)).round().astype(np.uint8)
    return small


def measure(
    known: Sequence[Film], others: Sequence[Film], copies: int
) -> dict[str, Any]:
    """Copies of known clips, and clips that are none, held against the known ones by
    the rule of a run.
    """
    embedding = default_embedding()
    gallery = Gallery(
        ReferenceWindow(
            film.name, film.source, embed_views(embedding, shrunk(film.frames[::EVERY]))
        )
        for film in known
    )
    usual = measure_baselines(
        gallery,
        {},
        [(film.source, seen(embedding, shrunk(film.frames))) for film in known],
    )
    line = usual.line()
    assert line is not None
    chosen = [known[i * len(known) // copies] for i in range(copies)]
    found = [
        gallery.nearest(seen(embedding, planted(film, i)))
        for i, film in enumerate(chosen)
    ]
    none = [
        gallery.nearest(seen(embedding, film.frames), exclude_source=film.source)
        for film in others
    ]
    return figures(
        chosen, found, [one for one in none if one is not None], usual, line, len(known)
    )


def figures(
    chosen: Sequence[Film],
    found: Sequence[NearestClip | None],
    none: Sequence[NearestClip],
    usual: Baselines,
    line: float,
    known: int,
) -> dict[str, Any]:
    """Shares and similarities, rounded."""
    near = [one for one in found if one is not None]
    marked = sum(one.similarity > line for one in near)
    named = sum(one.clip == film.name for film, one in zip(chosen, near, strict=True))
    video = sum(
        one.clip.rsplit("-", 2)[0] == film.source or one.clip == film.name
        for film, one in zip(chosen, near, strict=True)
    )
    return {
        "known": known,
        "copies": len(near),
        "recall": round(marked / len(near), 4),
        "right_clip": round(named / len(near), 4),
        "right_video": round(video / len(near), 4),
        "unrelated": len(none),
        "false_alarms": round(
            sum(one.similarity > line for one in none) / len(none), 4
        ),
        "line": round(line, 4),
        "baseline": usual.to_json()["others"],
        "copies_similarity": spread_of([one.similarity for one in near]),
        "unrelated_similarity": spread_of([one.similarity for one in none]),
    }


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Least, middle and greatest."""
    least, middle, most = np.quantile(values, [0, 0.5, 1])
    return {
        "least": round(float(least), 3),
        "median": round(float(middle), 3),
        "most": round(float(most), 3),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, default=None)
    parser.add_argument("--copies", type=int, default=40)
    parser.add_argument("--unrelated", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("research/copies.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    real = real_pieces(asked.real)
    known = [*landscapes(60 if real else 100), *real]
    foreign = landscapes(max(1, asked.unrelated - len(real)), first=1000)
    out = {
        "textured": measure(known, [*foreign, *real], asked.copies),
        "toy": measure(toys(72), toys(72, 72), asked.copies),
    }
    write_json(asked.out, out, durable=False)
    for name, one in out.items():
        print(name, one)


if __name__ == "__main__":
    main()
