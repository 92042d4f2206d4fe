"""What the keys about how frozen weights are kept do to bytes, to what the base predicts, and to a training over it."""

import itertools
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, run_steps, trainer_of, watched
from videotune.config.drift import class_of
from videotune.config.fields import ROUNDED
from videotune.memory.quantization import QuantizedLinear
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.trainer import Trainer

NEAR = {"FLOAT_8": 0.02, "INT_8": 0.005, "NFLOAT_4": 0.05, "BFLOAT_16": 0.005}
"""How far the losses over rounded weights may lie from those over plain ones, as a share of them."""

METHODS: dict[str, dict[str, Any]] = {
    "LORA": {"lora.dropout": 0.2},
    "EMBEDDING": {"training_method": "EMBEDDING"},
    "FINE_TUNE": {
        "training_method": "FINE_TUNE",
        "transformer.train": False,
        "text_encoder.train": True,
        "text_encoder.weight_dtype": "FLOAT_32",
    },
}
"""What each method trains over frozen weights; FINE_TUNE the text encoder alone, since what trains is not rounded."""

SEEN: dict[tuple[str, str], list[float]] = {}


def packed(net: torch.nn.Module) -> set[str]:
    return {path for path, module in net.named_modules() if isinstance(module, QuantizedLinear)}


def bytes_of(trainer: Trainer) -> int:
    return sum(parameter.nbytes for parameter in trainer.net.parameters())


def first_text(lab: Lab, knobs: dict[str, Any]) -> torch.Tensor:
    """The text states of the network in the first step."""
    trainer = trainer_of(lab, knobs)
    with watched(trainer.net) as calls:
        run_steps(trainer, 1)
    return calls[0]["text"]


def losses(lab: Lab, knobs: dict[str, Any], steps: int = 2) -> list[float]:
    return [line["loss"] for line in run_steps(trainer_of(lab, {"learning_rate": 0.01} | knobs), steps)]


@pytest.mark.effect("weight_dtype")
def test_the_kind_decides_bytes_and_the_base(lab: Lab) -> None:
    size, first = {}, {}
    for kind in ("auto", "BFLOAT_16", *ROUNDED):
        trainer = trainer_of(lab, {"weight_dtype": kind})
        assert bool(packed(trainer.net)) == (kind != "auto")
        size[kind] = bytes_of(trainer)
        first[kind] = run_steps(trainer, 1)[0]["loss"]
    assert size["auto"] > size["BFLOAT_16"] > size["FLOAT_8"] == size["INT_8"] > size["NFLOAT_4"]
    assert len(set(first.values())) == 5
    for kind, near in NEAR.items():
        assert first[kind] == pytest.approx(first["auto"], rel=near)


@pytest.mark.effect("transformer.weight_dtype")
def test_the_denoiser_has_a_kind_of_its_own(lab: Lab) -> None:
    """Text is read as it was; beside weight_dtype it wins."""
    both, own = {"weight_dtype": "INT_8"}, {"transformer.weight_dtype": "INT_8"}
    off = both | {"transformer.weight_dtype": "FLOAT_32"}
    assert packed(trainer_of(lab, own).net) == packed(trainer_of(lab, both).net)
    assert not packed(trainer_of(lab, off).net)
    assert torch.equal(first_text(lab, own), first_text(lab, {}))
    assert torch.equal(first_text(lab, off), first_text(lab, both))


@pytest.mark.effect("text_encoder.weight_dtype")
def test_the_text_encoder_has_a_kind_of_its_own(lab: Lab) -> None:
    """Its states are other ones, and are kept under another name, so that no run is given those of another kind."""
    plain, rounded = first_text(lab, {}), first_text(lab, {"text_encoder.weight_dtype": "NFLOAT_4"})
    assert not torch.equal(plain, rounded)
    assert torch.equal(first_text(lab, {}), plain), "what the cache has of plain weights stays"
    off = {"weight_dtype": "NFLOAT_4", "text_encoder.weight_dtype": "FLOAT_32"}
    assert torch.equal(first_text(lab, off), plain)
    assert not packed(trainer_of(lab, {"text_encoder.weight_dtype": "NFLOAT_4"}).net)


def expected(lab: Lab, kind: str, method: str) -> list[float]:
    """The losses of the run that keeps everything on the device; near those of plain weights."""
    if (kind, method) not in SEEN:
        knobs = METHODS[method] | {"gradient_checkpointing": "OFF"}
        plain = SEEN.setdefault(("auto", method), losses(lab, knobs))
        SEEN[kind, method] = losses(lab, knobs | {"weight_dtype": kind})
        assert SEEN[kind, method] == pytest.approx(plain, rel=NEAR[kind])
        assert SEEN[kind, method] != plain
    return SEEN[kind, method]


SOME = [
    ("FLOAT_8", "LORA", "ON", 0.5),
    ("INT_8", "LORA", "CPU_OFFLOADED", 1.0),
    ("NFLOAT_4", "LORA", "OFF", 1.0),
    ("FLOAT_8", "EMBEDDING", "CPU_OFFLOADED", 1.0),
    ("INT_8", "FINE_TUNE", "OFF", 0.5),
    ("NFLOAT_4", "EMBEDDING", "ON", 0.5),
]
"""Each pair of values is there."""

ALL = itertools.product(NEAR, METHODS, ("OFF", "ON", "CPU_OFFLOADED"), (0.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("kind", "method", "mode", "fraction"),
    [*SOME, *(pytest.param(*one, marks=pytest.mark.long) for one in ALL if one not in SOME)],
)
def test_quantized_weights_train_with_the_same_losses_wherever_they_lie(
    kind: str, method: str, mode: str, fraction: float, lab: Lab
) -> None:
    """To the bit those of the same weights on the device, near those of plain weights."""
    knobs = {"weight_dtype": kind, "gradient_checkpointing": mode, "layer_offload_fraction": fraction}
    assert losses(lab, METHODS[method] | knobs) == expected(lab, kind, method)


def test_frozen_parts_of_a_fine_tuning_may_be_quantized(lab: Lab) -> None:
    """And a statement of the dtype that the weights have anyway is none of another."""
    knobs = {"training_method": "FINE_TUNE", "transformer.weight_dtype": "FLOAT_32", "weight_dtype": "INT_8"}
    trainer = trainer_of(lab, knobs)
    assert not packed(trainer.net)
    assert trainer.family.weights.text_encoder == "INT_8"
    assert trainer.family.weights.transformer is None


def test_dtypes_are_not_case_sensitive_and_auto_undoes_a_preset_s(lab: Lab) -> None:
    sets = (f"base_model_name={lab.model}", "weight_dtype=nfloat_4", "transformer.weight_dtype=AUTO")
    config = resolve_config(Overrides(sets=sets))[0].config
    assert (config.weight_dtype, config.transformer.weight_dtype) == ("NFLOAT_4", "auto")


def test_another_kind_is_another_base_on_a_resume() -> None:
    assert {class_of(f"{part}weight_dtype") for part in ("", "transformer.", "text_encoder.")} == {"fatal"}
