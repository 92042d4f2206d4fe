"""A run over rounded weights from its first word to its files: resumed, sampled, exported, merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.safety_kit import Make, equal, facts_of, state
from tests.shell import export, train
from videotune.commands.sample import SampleOptions, open_sampler
from videotune.errors import DONE, VideotuneError
from videotune.trainer.checkpoint import last_checkpoint
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume


@pytest.fixture(scope="module")
def overrides(small_clips: Path, tiny_bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Words of a run of four steps over a tiny base in NFLOAT_4."""
    folder = tmp_path_factory.mktemp("packed")
    fixed = (
        f"cache_dir={folder / 'cache'}", "resolution=32x32", "steps=4", "save_every=2", "warmup_steps=0", "samples=1",
        "sample_after=4", "sample.steps=2", "sample.guidance=1", "validate_every=4", "sample_metrics.budget=0",
        "weight_dtype=NFLOAT_4",
        "dataloader_threads=0", "learning_rate=0.01", f"base_model_name={tiny_bases('wan')}",
    )  # fmt: skip
    return lambda *sets: Overrides(data=str(small_clips), sets=(*fixed, *sets))


@pytest.fixture(scope="module")
def straight(overrides: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    assert train(overrides(), run) == DONE
    return run


def test_resumed_is_never_stopped_and_streamed_from_there(straight: Path, overrides: Make, tmp_path: Path) -> None:
    """Rounding anew gives the same bits; another place for the weights too."""
    run = tmp_path / "run"
    assert train(overrides("steps=2"), run) == DONE
    assert train(Overrides(sets=("steps=4", "layer_offload_fraction=1")), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))
    assert facts_of(run)[-2:] == facts_of(straight)[-2:]


def test_another_kind_is_refused_on_a_resume(straight: Path) -> None:
    for key in ("weight_dtype", "text_encoder.weight_dtype"):
        with pytest.raises(VideotuneError, match=f"{key}: '.*' -> 'FLOAT_8'"):
            train(Overrides(sets=(f"{key}=FLOAT_8", "steps=5")), straight, resume=Resume())


def test_ruler_and_samples_are_of_the_rounded_base(straight: Path, overrides: Make, tmp_path: Path) -> None:
    from videotune.memory.quantization import share_of

    plain = tmp_path / "plain"
    assert train(overrides("weight_dtype=auto", "sample_after=0", "steps=1"), plain) == DONE
    one, other = (
        next(line for line in read_journal(run) if line["kind"] == "ruler")["train"]["mean"]
        for run in (straight, plain)
    )
    assert one != other
    assert one == pytest.approx(other, rel=0.05)
    sampler = open_sampler(SampleOptions(("a red circle",), run=straight))
    assert share_of(next(iter(sampler.nets.values()))).packed > 0
    assert list(straight.glob("samples/**/*.mp4")), "and previews were drawn"


def test_a_merged_model_is_the_base_s_own_numbers_and_the_adapter(
    straight: Path, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Not the rounded ones: what the adapter does not change is the base's to the bit, and what it does is near it."""
    assert export(straight, out=tmp_path / "whole", merge=True) == DONE
    (folder,) = (tmp_path / "whole").iterdir()
    name = "transformer/diffusion_pytorch_model.safetensors"
    ours, base = load_file(folder / name), load_file(tiny_bases("wan") / name)
    assert ours.keys() == base.keys()
    weights = last_checkpoint(straight).load("weights")
    changed = {key for key in base if not torch.equal(ours[key], base[key])}
    assert changed == {f"{key.removesuffix('.lora_A.weight')}.weight" for key in weights if "lora_A" in key}
    scale = json.loads((straight / "config.json").read_text())["settings"]["lora"]["rank"] / 16
    for key in changed:
        path = key.removesuffix(".weight")
        update = weights[f"{path}.lora_B.weight"].double() @ weights[f"{path}.lora_A.weight"].double() * scale
        torch.testing.assert_close(ours[key], (base[key].double() + update).float(), rtol=0, atol=1e-6)
