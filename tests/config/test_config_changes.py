"""Each key of the config is in one class of what a resume does with it, and what
differs is judged by it.
"""

from typing import Any

import pytest

from videotune.config.config_changes import Change, class_of, drift
from videotune.config.nested_keys import merge
from videotune.config.resolve import parse
from videotune.config.schema import leaves


def whole(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config as config.json keeps it."""
    return parse(merge({"family": "wan", "steps": 100}, changes or {})).model_dump(
        mode="json"
    )


def changed(key: str, value: Any, before: dict[str, Any] | None = None) -> Change:
    """The one change that a key makes."""
    nested: Any = value
    for name in reversed(key.split(".")):
        nested = {name: nested}
    (change,) = drift(whole(before), whole(merge(before or {}, nested)))
    return change


def test_every_key_has_a_class() -> None:
    assert {class_of(key) for key in leaves()} == {
        "safe",
        "override",
        "data",
        "fatal",
        "checked",
    }


def test_what_is_equal_is_no_change() -> None:
    assert drift(whole(), whole()) == []
    assert drift(whole({"optimizer": "ADAMW"}), whole()) == []


CLASSES: dict[str, dict[str, Any]] = {
    "safe": {
        "save_every": 10,
        "sample.guidance": 3.0,
        "gradient_checkpointing": "OFF",
        "samples": ["a cat"],
    },
    "override": {
        "learning_rate": 0.5,
        "optimizer.weight_decay": 0.5,
        "ema.decay": 0.9,
        "timestep_shift": 2.0,
    },
    "data": {"resolution": 64, "video_config.windows": "head"},
    "fatal": {
        "lora.rank": 8,
        "lora.alpha": 8.0,
        "optimizer.name": "LION",
        "training_method": "FINE_TUNE",
        "seed": 1,
    },
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_change_is_of_the_class_of_its_key(kind: str) -> None:
    for key, value in CLASSES[kind].items():
        change = changed(key, value)
        assert (change.key, change.kind, change.after) == (key, kind, value)
    assert changed("datasets", [{"path": "/clips"}]).kind == "data"
    assert changed("base_model_name", "/elsewhere").kind == "safe"


@pytest.mark.parametrize("key", ["steps", "epochs"])
def test_the_number_of_steps_is_safe_where_the_rate_does_not_follow_from_it(
    key: str,
) -> None:
    assert changed(key, 200).kind == "safe"
    for decay in ("COSINE", "LINEAR"):
        change = changed(key, 200, {"learning_rate_scheduler": decay})
        assert change.kind == "override"
        assert decay in change.why


def test_epochs_decide_the_steps_whatever_stands_there() -> None:
    """config.json freezes the steps; who gives epochs instead is not told of steps that
    nobody set.
    """
    changes = drift(whole(), whole({"epochs": 2, "steps": 7}))
    assert [str(change) for change in changes] == [
        "epochs: None -> 2.0 (the rate is constant)"
    ]


@pytest.mark.parametrize(
    ("batch", "accumulation"), [(2, 2), (1, 4), (2, 4), (4, 2), (1, 1)]
)
def test_another_split_of_a_step_is_safe_and_another_size_fatal(
    batch: int, accumulation: int
) -> None:
    kind = "safe" if batch * accumulation == 4 else "fatal"
    after = whole({"batch_size": batch, "gradient_accumulation_steps": accumulation})
    changes = drift(whole({"batch_size": 4}), after)
    assert {change.kind for change in changes} == {kind}
    if kind == "fatal":
        assert all(
            f"would have {batch * accumulation} samples instead of 4" in change.why
            for change in changes
        )


def test_changed_datasets_are_told_key_by_key_and_dataset_by_dataset() -> None:
    two = whole({"datasets": [{"path": "/a"}, {"path": "/b", "repeats": 2}]})
    (change,) = drift(
        two,
        whole(
            {"datasets": [{"path": "/a", "trigger": "x"}, {"path": "/c", "repeats": 2}]}
        ),
    )
    assert (
        str(change) == "datasets.0.trigger: None -> 'x'; datasets.1.path: '/b' -> '/c'"
    )
    (change,) = drift(two, whole({"datasets": [{"path": "/a"}]}))
    assert str(change) == "datasets.1: '/b' -> None"
