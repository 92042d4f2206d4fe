"""A run over rounded weights from its first word to its files: resumed, sampled, exported, merged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.safety_kit import Finished, Make, assert_same_run, of_kind, resume
from tests.shell import export, train
from videotune.commands.sample import SampleOptions, open_sampler
from videotune.errors import DONE, VideotuneError
from videotune.trainer.checkpoint import last_checkpoint

SETS = ("save_every=2", "samples=1", "sample_after=4", "sample.steps=2", "sample.guidance=1", "validate_every=4")
QUANTIZED = (*SETS, "weight_dtype=NFLOAT_4")


@pytest.fixture
def straight(finished: Finished) -> Path:
    """A run of four steps over a tiny base in NFLOAT_4."""
    return finished("steps=4", *QUANTIZED)


def test_resumed_is_never_stopped_and_streamed_from_there(straight: Path, overrides: Make, tmp_path: Path) -> None:
    """Quantizing anew gives the same bits; another place for the weights too; another dtype is refused."""
    run = tmp_path / "run"
    assert train(overrides("steps=2", *QUANTIZED), run) == DONE
    assert resume(run, "steps=4", "layer_offload_fraction=1") == DONE
    assert_same_run(run, straight, 4)
    for key in ("weight_dtype", "text_encoder.weight_dtype"):
        with pytest.raises(VideotuneError, match=f"{key}: '.*' -> 'FLOAT_8'"):
            resume(run, f"{key}=FLOAT_8", "steps=5")


def test_validation_and_samples_are_of_the_quantized_base(straight: Path, finished: Finished) -> None:
    from videotune.memory.quantization import QuantizedLinear

    plain = finished("steps=1", "validate_every=4")
    one, other = (of_kind(run, "validation")[0]["train"]["mean"] for run in (straight, plain))
    assert one != other
    assert one == pytest.approx(other, rel=0.05)
    sampler = open_sampler(SampleOptions(("a red circle",), run=straight))
    (net,) = sampler.nets.values()
    assert any(isinstance(layer, QuantizedLinear) for layer in net.modules())
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
    for key in changed:
        path = key.removesuffix(".weight")
        update = weights[f"{path}.lora_B.weight"].double() @ weights[f"{path}.lora_A.weight"].double()
        torch.testing.assert_close(ours[key], (base[key].double() + update).float(), rtol=0, atol=1e-6)
