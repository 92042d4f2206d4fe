"""What products in eight bits change, and what they do not go with."""

from typing import Any

import pytest

from tests.support.trainers import Lab, run_steps, trainer_of
from videotune.errors import VideotuneError
from videotune.memory.eight_bit_matmul import EightBitLinear
from videotune.trainer.trainer import Trainer

TOY = {"base_model_name": "asset:toy", "lora.targets": ["attn1.to_q"]}
"""A base model whose layers are wide enough."""

KEY = "transformer.matmul_dtype"
NEAR = {"FLOAT_8": 0.05, "INT_8": 0.01}


def multiplying(trainer: Trainer) -> int:
    modules = trainer.net.modules()
    return sum(isinstance(module, EightBitLinear) for module in modules)


def bytes_of(trainer: Trainer) -> int:
    return sum(parameter.nbytes for parameter in trainer.net.parameters())


@pytest.mark.effect("transformer.matmul_dtype")
def test_the_dtype_of_products_decides_layers_bytes_and_losses(lab: Lab) -> None:
    """All linear layers of six blocks; losses and gradients stay near."""
    layers, sizes, lines = {}, {}, {}
    for kind in ("auto", "FLOAT_8", "INT_8"):
        trainer = trainer_of(lab, TOY | {KEY: kind})
        layers[kind] = multiplying(trainer)
        sizes[kind] = bytes_of(trainer)
        (lines[kind],) = run_steps(trainer, 1)

    assert layers == {"auto": 0, "FLOAT_8": 60, "INT_8": 60}
    assert sizes["FLOAT_8"] == sizes["INT_8"] < sizes["auto"] / 2
    for value in ("loss", "grad_norm"):
        assert len({line[value] for line in lines.values()}) == 3
    for kind, near in NEAR.items():
        for value, times in (("loss", 1), ("grad_norm", 4)):
            exact = lines["auto"][value]
            assert lines[kind][value] == pytest.approx(exact, rel=near * times)


@pytest.mark.parametrize("method", ["LORA", "EMBEDDING"])
def test_streamed_blocks_train_with_the_same_losses(method: str, lab: Lab) -> None:
    knobs = TOY | {KEY: "INT_8", "training_method": method}
    if method == "EMBEDDING":
        del knobs["lora.targets"]
    plain = run_steps(trainer_of(lab, knobs | {"layer_offload_fraction": 0}), 2)
    streamed = {"layer_offload_fraction": 1, "gradient_checkpointing": "ON"}
    lines = run_steps(trainer_of(lab, knobs | streamed), 2)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"training_method": "FINE_TUNE"},
            "transformer.matmul_dtype: FINE_TUNE trains the transformer",
        ),
        ({"weight_dtype": "NFLOAT_4"}, "weight_dtype: products in INT_8"),
        (
            {"transformer.weight_dtype": "FLOAT_8"},
            "transformer.weight_dtype: products in INT_8 .* keep their weights in INT_8",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    knobs: dict[str, Any], words: str, lab: Lab
) -> None:
    with pytest.raises(VideotuneError, match=words):
        trainer_of(lab, TOY | {KEY: "INT_8"} | knobs)


def test_weights_of_other_layers_may_be_stored_in_the_same_dtype(lab: Lab) -> None:
    """The text encoder has a kind of its own."""
    knobs = TOY | {"weight_dtype": "NFLOAT_4", "transformer.weight_dtype": "INT_8"}
    trainer = trainer_of(lab, knobs | {KEY: "int_8"})
    assert multiplying(trainer) == 60
    assert trainer.family.weights.text_encoder == "NFLOAT_4"
