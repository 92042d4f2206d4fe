"""``sample``: from a run, from a LoRA file, from the base; the strength is a scale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands.safety_kit import Finished
from tests.shell import export, sample
from videotune.commands.sample import SampleOptions, named_by
from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.errors import DONE, VideotuneError
from videotune.exporter.lora import export_lora
from videotune.models.registry import find
from videotune.trainer.checkpoint import last_checkpoint

NO_TEXT = ("a\0b", "a\x1b[31m", "a \ud800", "a" * 10**7)
SIZE = ("sample.frames=5", "sample.resolution=32x32", "sample.steps=3", "sample.guidance=1")


@pytest.fixture
def a_run(finished: Finished) -> Path:
    return finished("steps=20", "learning_rate=0.003", "lora.rank=16", *SIZE)


def sampled(options: SampleOptions, out: Path) -> np.ndarray:
    assert sample(options, out) == DONE
    facts = probe(next(out.glob("*.mp4")))
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_a_run_and_its_file_sample_the_same_and_strength_0_is_the_base(
    a_run: Path, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompts = str(tiny_bases("wan")), ("a red circle",)
    family = find("wan")(tiny_bases("wan"), torch.device("cpu"), torch.float32)
    state = last_checkpoint(a_run).load("weights")
    file = export_lora(family, "comfyui", state, 1.0, tmp_path / "lora.safetensors", {}).path
    from_run = sampled(SampleOptions(prompts, 3, run=a_run), tmp_path / "a")
    from_file = sampled(SampleOptions(prompts, 3, base=base, loras=(file,), sets=SIZE), tmp_path / "b")
    alone = sampled(SampleOptions(prompts, 3, base=base, sets=SIZE), tmp_path / "c")
    off = sampled(SampleOptions(prompts, 3, run=a_run, strength=0.0), tmp_path / "d")
    half = sampled(SampleOptions(prompts, 3, run=a_run, strength=0.5), tmp_path / "e")
    assert np.abs(from_run - from_file).max() <= 1
    assert np.abs(alone - off).max() <= 1
    assert np.abs(from_run - alone).mean() > 0.2
    assert 0.05 < np.abs(half - alone).mean() < np.abs(from_run - alone).mean()
    assert np.abs(half - from_run).mean() > 0.05


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompts": ("a",)}, ""),
        ({"prompts": ("a",), "base": "asset:toy", "loras": (Path("none.safetensors"),)}, "no such LoRA file"),
        *[({"prompts": ("a",), "base": "asset:toy", "seed": seed}, "seed") for seed in (2**63, 10**30, -1)],
        *[({"prompts": ("a",), "base": "asset:toy", "sets": (f"sample.seed={seed}",)}, "seed") for seed in (2**63, -1)],
        *[
            ({"prompts": (text,), "base": "asset:toy"}, "--prompt")
            for text in ("a\0b", "a\x1b[31m", "a \ud800", "a" * 10**7)
        ],
    ],
    ids=lambda value: str(value)[:60].encode("unicode_escape").decode(),
)
def test_options_that_make_no_sample_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    """A seed of more than 63 bits, a prompt that is no text."""
    with pytest.raises(VideotuneError, match=named):
        sample(SampleOptions(**options), tmp_path)


def test_options_that_contradict_a_run_are_refused(a_run: Path, tmp_path: Path) -> None:
    for options in (SampleOptions((), run=a_run), SampleOptions(("a",), run=a_run, base="x")):
        with pytest.raises(VideotuneError):
            sample(options, tmp_path)
    with pytest.raises(VideotuneError, match="no complete checkpoint of step 7; complete are those of the steps 20"):
        sample(SampleOptions(("a",), run=a_run, step=7), tmp_path)


def test_of_two_experts_files_a_sample_is_named_by_what_both_begin_with() -> None:
    from videotune.commands.sample import adapter_name

    files = (Path("mine_high_noise.safetensors"), Path("mine_low_noise.safetensors"))
    assert adapter_name(SampleOptions(("a",), base="x", loras=files)) == "mine-"
    assert adapter_name(SampleOptions(("a",), base="x", loras=files[:1])) == "mine_high_noise-"
    assert adapter_name(SampleOptions(("a",), base="x", loras=files, strength=0.5)) == "mine-strength-0.5-"
    assert adapter_name(SampleOptions(("a",), base="x")) == "base-"


def test_a_sample_is_named_by_its_prompt_too() -> None:
    assert (
        named_by("step-000004-0123-seed42.mp4", "A cat, in the rain/..\n日本!")
        == "step-000004-0123-seed42-a-cat-in-the-rain.mp4"
    )
    assert named_by("step-000004-0123-seed42.mp4", "日本") == "step-000004-0123-seed42.mp4"
    assert len(named_by("x.mp4", "a" * 1000)) < 60


def test_a_lora_of_another_base_is_reported(
    a_run: Path, tiny_bases: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the fingerprints in its header; nothing is said over the base that it was trained on."""
    assert export(a_run, ["diffusers"], out=tmp_path) == DONE
    (file,) = tmp_path.glob("*.safetensors")
    other = find("wan").tiny(tmp_path / "other", seed=5)
    for base, warns in ((tiny_bases("wan"), False), (other, True)):
        capsys.readouterr()
        sample(SampleOptions(("a cat",), base=str(base), loras=(file,), sets=SIZE), tmp_path / "out")
        assert ("was trained on" in capsys.readouterr().err) == warns
