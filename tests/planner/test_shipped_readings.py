"""Tables of published base models: a preset is planned from them as from a fresh run on
fake tensors.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.write_ledgers import Case, cases, columns, missing
from tests.support.clips import noise, write_clip
from videotune.config.resolve import parse
from videotune.planner import shipped_readings as module
from videotune.planner.ledger import Reading
from videotune.planner.network_facts import network_facts
from videotune.planner.plan_inputs import PlanInputs, configs_of
from videotune.planner.read_step import open_family, read_step_spec
from videotune.planner.shipped_readings import (
    ShippedReadings,
    has_affine_rank,
    linear_weights,
    mixed,
    quadratic_weights,
    rank_weights,
    shipped_readings,
    step_key,
)
from videotune.planner.step_spec import MODES, StepSpec, assemble
from videotune.types import ClipShape

SMALL = "wan 2.1 1.3B LoRA 16GB"
ONE_OF_EACH = {
    "cogvideox 5B I2V LoRA 24GB": ClipShape(49, 480, 720, 8.0),
    "hidream LoRA 24GB": ClipShape(1, 896, 896, 1.0),
    "hunyuan 1.5 I2V LoRA 24GB": ClipShape(33, 448, 640, 24.0),
    "hunyuan 13B LoRA 24GB": ClipShape(33, 544, 960, 24.0),
    "kandinsky 5 Lite LoRA 24GB": ClipShape(33, 512, 768, 24.0),
    "ltx 13B LoRA 24GB": ClipShape(49, 512, 768, 30.0),
    "ltx 2.3 LoRA 24GB": ClipShape(49, 448, 768, 24.0),
    "wan 2.1 FLF2V 14B LoRA 48GB": ClipShape(33, 480, 832, 16.0),
    "wan 2.1 VACE 1.3B LoRA 24GB": ClipShape(33, 480, 640, 16.0),
    "wan 2.2 A14B LoRA 24GB": ClipShape(49, 480, 832, 16.0),
    "wan 2.2 Embedding": ClipShape(17, 416, 640, 24.0),
    "wan 2.2 Finetune": ClipShape(33, 704, 1280, 24.0),
}


@cache
def case_of(preset: str) -> Case:
    return next(case for case in cases() if case.preset == preset)


def inputs_of(preset: str, shape: ClipShape, rank: int | None = None) -> PlanInputs:
    inputs = case_of(preset).with_rank(rank)
    return replace(inputs, shapes=(shape,), preview=shape)


def from_tables(inputs: PlanInputs) -> StepSpec:
    readings = shipped_readings(inputs)
    assert readings is not None
    return assemble(readings, inputs, open_family(inputs))


def compare(inputs: PlanInputs, most: float) -> None:
    """Assert that tables and a fresh run agree within a share of each phase's bytes."""
    fresh = read_step_spec(inputs)
    shipped = from_tables(inputs)
    assert shipped.blocks == fresh.blocks
    assert shipped.trained == fresh.trained
    assert shipped.experts == fresh.experts
    assert shipped.optimizer_share == fresh.optimizer_share
    for mode in MODES:
        for samples in (1, 2):
            compare_readings(shipped.at(mode, samples), fresh.at(mode, samples), most)
        assert shipped.kept[mode] == pytest.approx(fresh.kept[mode], rel=most)

    assert dict(shipped.work) == pytest.approx(dict(fresh.work), rel=1e-6)
    assert shipped.encoding_flops_per_pixel == pytest.approx(
        fresh.encoding_flops_per_pixel, rel=0.2
    )
    assert shipped.other_phases.keys() == fresh.other_phases.keys()
    for phase, ways in fresh.other_phases.items():
        for way, parts in ways.items():
            total = sum(parts.values())
            other = sum(shipped.other_phases[phase][way].values())
            assert 0.98 * total <= other <= 1.05 * total, (phase, way)


def compare_readings(shipped: Reading, fresh: Reading, most: float) -> None:
    assert shipped.work.flops == pytest.approx(fresh.work.flops, rel=1e-6)
    assert shipped.work.attention == pytest.approx(fresh.work.attention, rel=1e-6)
    assert shipped.work.operations == pytest.approx(fresh.work.operations, rel=0.01)
    assert shipped.work.moved == pytest.approx(fresh.work.moved, rel=0.01)
    assert shipped.phases.keys() == fresh.phases.keys()
    for phase, parts in fresh.phases.items():
        total = sum(parts.values())
        for part in {*parts, *shipped.phases[phase]}:
            difference = shipped.phases[phase].get(part, 0) - parts.get(part, 0)
            assert abs(difference) <= most * total, (phase, part)


def test_every_preset_has_its_tables() -> None:
    """`make ledgers` writes them."""
    assert not missing()


def test_between_two_sizes_a_table_is_near_a_fresh_run() -> None:
    compare(inputs_of(SMALL, ClipShape(33, 480, 640, 16.0), rank=32), most=0.01)


@pytest.mark.parametrize(
    ("shape", "most"),
    [(ClipShape(17, 64, 64, 16.0), 0.002), (ClipShape(25, 96, 96, 16.0), 0.05)],
    ids=str,
)
def test_the_toy_s_table_is_near_a_fresh_run(shape: ClipShape, most: float) -> None:
    """Of such small clips some moments are not affine in the tokens."""
    compare(inputs_of("toy", shape, rank=16), most)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ONE_OF_EACH)
def test_of_every_model_a_table_is_near_a_fresh_run(preset: str) -> None:
    compare(inputs_of(preset, ONE_OF_EACH[preset]), most=0.01)


@pytest.mark.slow
def test_at_its_own_sizes_a_table_is_a_fresh_run() -> None:
    compare(inputs_of(SMALL, ClipShape(17, 320, 512, 16.0), rank=8), most=0)


def test_a_preset_is_planned_without_the_libraries_of_networks(tmp_path: Path) -> None:
    """Neither diffusers nor what shards is imported, and nothing is measured."""
    write_clip(tmp_path / "clips/square.mp4", noise(49, 480, 832), 16)
    (tmp_path / "clips/square.txt").write_text("a square\n")
    code = f"""
import sys
from videotune.commands.plan import plan
made = plan(preset={SMALL!r}, data="clips", card="4090").plan
assert made["fits"] and made["adapter"]["parameters"] > 0
heavy = ("diffusers", "transformers", "peft", "torch.distributed.fsdp")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[-2] == "[]"


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"variant": "DORA"}},
        {"lora": {"targets": "linear"}},
        {"lora": {"dropout": 0.1}},
        {"lora": {"modules": [{"pattern": "attn1", "rank": 4}]}},
        {"ema": {"decay": 0.999}},
        {"loss": "huber"},
        {"distilled_guidance": 5.0},
        {"compile": True},
        {"transformer": {"matmul_dtype": "FLOAT_8"}},
        {"weight_dtype": "NFLOAT_4"},
        {"optimizer": {"step_in_backward": True}},
        {"video_config": {"temporal_consistency_weight": 1.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_of_another_step_have_another_table(changes: dict[str, Any]) -> None:
    case = case_of(SMALL)
    config = case.inputs.config.model_dump(mode="json")
    merged = {
        key: {**config[key], **value} if isinstance(value, Mapping) else value
        for key, value in changes.items()
    }
    changed = type(case.inputs.config).model_validate({**config, **merged})
    other = replace(case.inputs, config=changed)
    assert step_key(other) != step_key(case.inputs)
    shape = ClipShape(33, 480, 640, 16.0)
    keys = {replace(inputs, shapes=(shape,)).key for inputs in (other, case.inputs)}
    assert len(keys) == 2, "nor is one remembered for the other"


def test_rank_and_settings_of_other_things_keep_the_table() -> None:
    case = case_of(SMALL)
    config = case.inputs.config.model_copy(
        update={"steps": 7, "learning_rate": 1e-5, "caption_dropout": 0.5}
    )
    assert step_key(replace(case.inputs, config=config)) == step_key(case.inputs)
    assert step_key(case.with_rank(17)) == step_key(case.inputs)


@pytest.mark.parametrize(
    "shape",
    [
        ClipShape(1, 64, 64, 16.0),
        ClipShape(401, 768, 1344, 16.0),
        ClipShape(33, 1600, 2560, 16.0),
    ],
)
def test_sizes_beyond_a_table_are_not_taken_from_it(shape: ClipShape) -> None:
    assert shipped_readings(inputs_of(SMALL, shape)) is None


@pytest.mark.parametrize(
    ("tokens", "frames", "side", "in_step", "in_pixels"),
    [
        (9, 1, 8, False, True),
        (10, 1, 8, True, True),
        (20, 9, 16, True, True),
        (21, 9, 16, False, True),
        (10, 10, 16, True, False),
        (10, 9, 17, True, False),
        (10, 1, 7, True, False),
    ],
)
def test_a_table_reaches_from_its_smallest_size_to_its_largest(
    tokens: int, frames: int, side: int, in_step: bool, in_pixels: bool
) -> None:
    spec: Any = SimpleNamespace(tokens=lambda shape: tokens)
    sizes = {"frames": [1, 9], "areas": [64, 256]}
    tables = ShippedReadings(spec, 4, {"tokens": [10, 20]}, {"whole": sizes}, {})
    shape = ClipShape(frames, side, side, 16.0)
    assert tables.reaches_step(shape) == in_step
    assert tables.reaches_pixels(shape) == in_pixels


class AnyKey(dict[str, Any]):
    """A table for every key."""

    def get(self, key: str, default: Any = None) -> Any:
        return self["table"]


def test_latents_that_are_appended_are_in_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokens are not among those of a table, whatever its key says."""
    tables = {
        "steps": AnyKey(table={"tokens": [1, 10**6], "ranks": []}),
        "autoencoders": AnyKey(
            table={"whole": {"frames": [1, 99], "areas": [1, 10**7]}}
        ),
        "texts": AnyKey(table={}),
    }
    monkeypatch.setattr(module, "family_tables", lambda family: tables)
    inputs = inputs_of(SMALL, ClipShape(33, 480, 640, 16.0))
    assert shipped_readings(inputs) is not None

    config = inputs.config.model_dump(mode="json")
    reference = {"conditions": [{"type": "reference"}]}
    config = type(inputs.config).model_validate({**config, **reference})
    assert shipped_readings(replace(inputs, config=config)) is None


def test_versions_of_libraries_in_a_config_are_no_other_network(tmp_path: Path) -> None:
    config = {"_class_name": "Net", "_diffusers_version": "0.1", "layers": 2}
    folders = []
    for changes in (
        {},
        {"_diffusers_version": "9", "transformers_version": "4"},
        {"layers": 3},
        {"_class_name": "Other"},
    ):
        folder = tmp_path / str(len(folders))
        (folder / "transformer").mkdir(parents=True)
        text = json.dumps({**config, **changes})
        (folder / "transformer/config.json").write_text(text)
        folders.append(folder)
    plain, later, deeper, other = map(configs_of, folders)
    assert plain == later
    assert deeper != plain != other


def test_numbers_between_two_sizes() -> None:
    knots = [10, 20, 40]
    line = [3.0 * knot + 5 for knot in knots]
    parabola = [2.0 * knot**2 - knot + 7 for knot in knots]
    for value in (10, 13, 20, 33, 40):
        assert mixed(line, linear_weights(knots, value)) == pytest.approx(3 * value + 5)
        assert mixed(parabola, quadratic_weights(knots, value)) == pytest.approx(
            2 * value**2 - value + 7
        )
    # Only the first, a middle and the last count.
    assert quadratic_weights([1, 2, 3, 5, 9], 4)[1::2] == [0.0, 0.0]
    assert linear_weights([5], 5) == [1.0]
    assert quadratic_weights([5], 5) == [1.0]
    assert quadratic_weights([10, 20], 15) == [0.5, 0.5]
    assert mixed([10.0, 40.0], rank_weights([8, 32], 16)) == pytest.approx(20.0)
    assert rank_weights([], 16) == [1.0]


def test_a_part_that_a_size_lacks_is_zero_there() -> None:
    points = [{"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, {}]
    assert columns(points) == {"a": {"x": [1, 1, 0], "y": [2, 0, 0]}}
    assert columns([{"x": 4}, {"x": 4}]) == {"x": 4}


def test_a_table_has_the_rows_of_new_words_that_train() -> None:
    inputs = case_of("wan 2.2 Embedding").inputs
    job: Any = SimpleNamespace(
        base=SimpleNamespace(folder=inputs.folder),
        spec=inputs.spec,
        config=inputs.config,
    )
    facts = network_facts(job)
    numbers = inputs.config.embedding.vectors * inputs.spec.text_width
    assert facts.text == (1, numbers)
    assert (facts.modules, facts.parameters) == (0, 0)


@pytest.mark.parametrize(
    ("keys", "is_affine"),
    [
        ({}, True),
        ({"lora": {"modules": [{"pattern": "a", "alpha": 2}]}}, True),
        ({"lora": {"modules": [{"pattern": "a", "rank": 2}]}}, False),
        (
            {
                "lora": {
                    "modules": [
                        {"pattern": "a", "alpha": 2},
                        {"pattern": "b", "rank": 2},
                    ]
                }
            },
            False,
        ),
        ({"lora": {"dropout": 0.1}}, False),
        ({"lora": {"variant": "LOHA"}}, False),
        ({"training_method": "FINE_TUNE"}, False),
    ],
)
def test_numbers_are_affine_in_one_rank_of_plain_loras(
    keys: dict[str, Any], is_affine: bool
) -> None:
    assert has_affine_rank(parse(keys)) is is_affine
