"""A tiny model and small real clips, made once; every effect test runs on the CPU,
where numbers repeat bit for bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab
from videotune.models.wan import Wan
from videotune.rng import generator_for
from videotune.toy.dataset import encode_clip
from videotune.toy.shapes import caption, draw_clip

LOOKS = [
    look.split()
    for look in (
        "red circle left",
        "green square right",
        "blue triangle up",
        "white circle down",
    )
]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Wan.tiny(tmp_path_factory.mktemp("models") / "tiny-wan")


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips a.mp4 … d.mp4 of 17 frames at 16 fps, 32 x 32, with their captions."""
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "captions").mkdir()
    for name, look in zip("abcd", LOOKS, strict=True):
        (folder / "videos").mkdir(exist_ok=True)
        encode_clip(
            folder / "videos" / f"{name}.mp4",
            draw_clip(generator_for(0, name), *look, side=32),
            16,
        )
        (folder / "captions" / f"{name}.txt").write_text(
            caption(*look), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty clips of 5 frames at 16 fps, each from a video of its own: enough to hold
    some out.
    """
    names = [f"video {letter}" for letter in "abcdefghijklmnopqrst"]
    clips = {f"{name}.mp4": noise(5, 32, 32, seed=i) for i, name in enumerate(names)}
    return write_dataset(tmp_path_factory.mktemp("twenty"), clips, {}, fps=16)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def lab(
    tiny_wan: Path, shapes: Path, shared_cache: Path, tmp_path: Path
) -> Iterator[Lab]:
    lab = Lab(tiny_wan, shapes, shared_cache, tmp_path)
    yield lab
    for trainer in lab.open:
        trainer.journal.close()


@pytest.fixture
def pair(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    """The lab over a model with two experts."""
    return replace(lab, model=tiny_bases("wan", "t2v-a14b"))
