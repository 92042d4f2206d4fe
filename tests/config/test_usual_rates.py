"""Rates that are far above the usual ones."""

from typing import Any

import pytest

from videotune.config.resolve import parse
from videotune.config.usual_rates import far_rates
from videotune.presets.shipped import preset_names, read_preset
from videotune.studio import far_values


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"learning_rate": 5}, "learning_rate"),
        ({"learning_rate_low": 1e4}, "learning_rate_low"),
        ({"learning_rate": 1e-2, "optimizer": "LION"}, "learning_rate"),
        (
            {"learning_rate": 1e-3, "training_method": "FINE_TUNE"},
            "learning_rate",
        ),
        ({"text_encoder": {"learning_rate": 1e5}}, "text_encoder.learning_rate"),
        (
            {"embedding_learning_rate": 5, "training_method": "EMBEDDING"},
            "embedding_learning_rate",
        ),
        (
            {"lora": {"modules": [{"pattern": "x", "learning_rate": 1e4}]}},
            "lora.modules.learning_rate",
        ),
    ],
)
def test_each_rate_far_above_the_usual_one_is_noted(
    settings: dict[str, Any], key: str
) -> None:
    notes = far_rates(parse(settings))
    assert list(notes) == [key]
    assert far_values.FAR_VALUES["learning_rate"][0] in notes[key]


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1.0, "optimizer": "PRODIGY"},
        {"learning_rate": 1.0, "optimizer": "pytorch_optimizer:DAdaptAdam"},
        {"learning_rate": 0.1, "optimizer": "torch.optim:SGD"},
        {"learning_rate": 1e-3},
        {"learning_rate": 0.01, "base_model_name": "asset:toy"},
        {
            "learning_rate": 1e-3,
            "base_model_name": "asset:toy",
            "training_method": "FINE_TUNE",
        },
        {"embedding_learning_rate": 5e-3, "training_method": "EMBEDDING"},
    ],
)
def test_other_rates_are_not(settings: dict[str, Any]) -> None:
    assert far_rates(parse(settings)) == {}


@pytest.mark.parametrize("preset", preset_names())
def test_no_preset_is_noted(preset: str) -> None:
    assert far_rates(parse(read_preset(preset))) == {}
