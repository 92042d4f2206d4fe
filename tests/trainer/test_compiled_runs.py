"""Runs with compiled blocks beside the same runs without, for what a step may be given."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.command_line import Bases, train
from tests.support.launcher import STEPS, assert_runs_close, overrides_of
from tests.support.run_results import of_kind
from tests.support.sounding_run import sounding_overrides
from videotune.errors import DONE
from videotune.job.overrides import Overrides

CONDITIONS = (
    'conditions=[{"type": "reference", "probability": 0.6, "latent_frames": 1}, '
    '{"type": "last_frame", "probability": 0.5}, {"type": "mask"}]'
)
CONTROLS = (
    'conditions=[{"type": "mask", "probability": 0.5}, {"type": "suffix"}, '
    '{"type": "reference", "probability": 0.5}]'
)
CLEAN = ("first_frame_probability=0.6", "video_config.variants=1")
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "conditions": ("wan", None, (CONDITIONS,)),
    "masked loss": ("wan", None, ("loss_mask.outside=0.1",)),
    "clean first frames": ("wan", "ti2v", CLEAN),
    "first frames on channels": ("wan", "i2v", CLEAN),
    "controls": ("wan_vace", "vace", (CONTROLS,)),
    "two experts": ("wan", "t2v-a14b", ("expert_period=1",)),
    "dora": ("wan", None, ("lora.variant=DORA",)),
    "a new token": ("wan", None, ("training_method=EMBEDDING", "caption_dropout=0.5")),
}


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's graphs without its kernels, which take a minute a graph to build."""
    traced = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of 64x64 with references and masks."""
    videos = {f"{name}.mkv": noise(17, 64, 64, seed) for seed, name in enumerate("ab")}
    folder = tmp_path_factory.mktemp("compiled") / "clips"
    write_dataset(folder, videos, {name: f"clip {name}" for name in "ab"}, fps=16)
    for seed, name in enumerate("ab"):
        reference = noise(17, 64, 64, 10 + seed)
        path = folder / "references" / f"{name}.mov"
        write_clip(path, reference, 16, codec="png", pix_fmt="rgb24")
        mask = np.zeros((64, 64, 3), np.uint8)
        mask[:, : 24 + 8 * seed] = 255
        write_image(folder / "masks" / f"{name}.png", mask)
    return folder


def assert_compiled_is_plain(
    words: Overrides, folder: Path, parts: Sequence[str] = ("weights", "ema")
) -> None:
    """Losses, gradients and these parts, to rounding, and no word of a failure."""
    for name, setting in (("plain", "compile=false"), ("compiled", "compile=true")):
        overrides = Overrides(data=words.data, sets=(*words.sets, setting))
        assert train(overrides, folder / name) == DONE

    (end,) = of_kind(folder / "compiled", "end")
    assert end["compiled"] >= 1
    warnings = [of_kind(folder / name, "warning") for name in ("plain", "compiled")]
    assert warnings[0] == warnings[1]
    assert_runs_close(folder / "compiled", folder / "plain", parts)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("two experts", marks=pytest.mark.slow),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in KINDS
            if kind != "two experts"
        ),
    ],
)
def test_a_compiled_run_is_the_plain_one(
    kind: str, clips: Path, tiny_bases: Bases, tmp_path: Path, without_kernels: None
) -> None:
    family, variant, sets = KINDS[kind]
    base = tiny_bases(family, variant)
    words = overrides_of(
        clips, base, tmp_path / "cache", "resolution=64x64", "batch_size=2", *sets
    )
    assert_compiled_is_plain(words, tmp_path)


@pytest.mark.slow
def test_a_compiled_run_with_sound_is_the_plain_one(
    tiny_bases: Bases, tmp_path: Path, without_kernels: None
) -> None:
    """A silent clip in step 3: nothing that only sound reads may move in it."""
    sounding = sounding_overrides(
        tmp_path / "home", tiny_bases, generate=("video", "sound")
    )
    words = Overrides(
        sets=(*sounding.sets, f"steps={STEPS}", "sample_after=0", "validate_every=0")
    )
    assert_compiled_is_plain(words, tmp_path, ("weights",))
