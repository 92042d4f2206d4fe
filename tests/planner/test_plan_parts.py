"""Parts of a plan, counted by hand."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of
from videotune.adapters.lora import add_lora
from videotune.config.base_models import download_size
from videotune.config.resolve import parse
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.job.job import ViewHistory
from videotune.latent_cache.exposure import most_views
from videotune.memory.checkpointing import ATTENTION_SAVED, OFF
from videotune.planner.cache_size import cache_size
from videotune.planner.ledger import Reading, Work
from videotune.planner.plan import (
    bytes_a_parameter,
    checkpoints_at_most,
    conditions_of,
    download_of,
    licence_of,
    make_plan,
    pipeline_arguments,
    sound_windows_of,
    steps_for_views,
)
from videotune.planner.step_spec import (
    StepSpec,
    state_bytes_per_number,
    with_shared_samples,
)
from videotune.types import BasePlace

Bases = Callable[..., Path]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The toy base model and two clips of 9 frames."""
    frames = {f"{name}.mkv": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=16)
    return Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"save_every": 100}, 10),
        ({"save_every": 300}, 4),
        ({"save_every": 0}, 1),
        ({"save_every": 100, "save_keep": 2}, 3),
        ({"save_every": 300, "save_keep": 20}, 4),
        ({"save_every": 100, "backup_every": 10, "backup_keep": 3}, 13),
        ({"save_every": 0, "backup_after": 5, "backup_keep": 2}, 3),
        ({"save_every": 0, "backup_keep": 2}, 1),
    ],
)
def test_saves_the_best_one_and_backups_are_counted(
    settings: dict[str, Any], count: int
) -> None:
    """Of a thousand steps."""
    config = parse({"backup_after": 0, "backup_every": 0} | settings)
    assert checkpoints_at_most(config, 1000) == count


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"optimizer": {"name": "ADAMW"}}, 12),
        ({"optimizer": {"name": "ADAMW"}, "ema": 0.9}, 16),
        ({"optimizer": {"name": "SCHEDULE_FREE"}}, 16),
        ({"optimizer": {"masters": "STOCHASTIC_ROUNDING"}}, 10),
    ],
)
def test_a_checkpoint_has_weights_state_and_an_average(
    settings: dict[str, Any], size: int
) -> None:
    assert bytes_a_parameter(parse(settings), state=8.0) == size


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("ADAMW", {}, 8),
        ("torch.optim:SGD", {"momentum": 0.9}, 4),
        ("torch.optim:Adam", {"amsgrad": True}, 12),
    ],
)
def test_the_state_of_an_optimizer_is_measured_for_each_number(
    name: str, args: dict[str, Any], size: int, tiny_family: Callable[..., Any]
) -> None:
    """Beside 4 bytes for the steps of each tensor."""
    config = parse({"optimizer": {"name": name, "args": args}, "lora": {"rank": 4}})
    family = tiny_family("wan")
    measured = state_bytes_per_number(family, family.spec, config)
    assert measured == pytest.approx(size, rel=0.02)


def test_both_experts_have_an_adapter_and_the_parts_are_of_one(
    lab: Lab, tiny_bases: Bases, tiny_family: Callable[..., Any]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "t2v-a14b"))
    adapter = make_plan(job_of(model, {"lora.rank": 4}))["adapter"]
    family = tiny_family("wan", variant="t2v-a14b")
    parameters = add_lora(family.denoiser(), family.spec, Lora(rank=4), seed=0)
    numbers = sum(value.numel() for value in parameters.values())
    modules = len(parameters) // 2
    assert sum(adapter["parts"].values()) == numbers
    assert sum(adapter["groups"].values()) == modules
    assert adapter["parameters"] == 2 * numbers
    assert adapter["modules"] == 2 * modules
    assert adapter["idle"] == {}


@pytest.mark.parametrize(
    ("channels", "passes"), [((0, 0), 1), ((4, 16), 2), ((0, 16), 1)]
)
def test_the_channels_of_a_video_are_a_second_clip_to_encode(
    channels: tuple[int, int], passes: int, lab: Lab
) -> None:
    """Those of an image alone are not."""
    job = job_of(lab)
    spec = replace(job.spec, image_channels=channels)
    windows = cache_size(replace(job, spec=spec)).windows
    assert windows.count == 2
    assert windows.pixels == passes * windows.count * 9 * 32 * 32


def test_a_part_of_work_starts_as_many_kernels() -> None:
    work = Work(flops=80, attention=40, moved=20, operations=7, eight_bit=8)
    part = Work(flops=20, attention=10, moved=5, operations=7, eight_bit=2)
    assert work.shared(4) == part
    assert work.plus(Work(1, 2, 3, 4, 5), 10) == Work(90, 60, 50, 47, 58)


def test_a_shared_sample_is_a_part_and_an_exchange_for_each_attention() -> None:
    """Of two samples: two blocks, each of which two processes compute at most three times.

    Attention runs once more: of 3.5 parts that it has forward and backward, one is
    forward.
    """

    def reading(samples: int) -> Reading:
        sizes = {"weights": 1000, "activations": 501 * samples}
        work = Work(
            flops=1000 * samples,
            attention=70 * samples,
            moved=40 * samples,
            operations=9,
        )
        return Reading({"forward": sizes, "end": sizes, "kept": sizes}, work)

    spec = StepSpec(
        one_sample={OFF: reading(1)},
        two_samples={OFF: reading(2)},
        blocks=(300, 300),
        trained=(0, 0, 0),
        kept={OFF: (7, 8), ATTENTION_SAVED: (1, 1)},
        encoding_flops_per_pixel=1.0,
    )
    shared = with_shared_samples(spec, 2, exchanged=100)
    assert shared.kept == {OFF: (4, 4)}
    one, two = shared.at(OFF, 1), shared.at(OFF, 2)
    assert one.phases["forward"] == {
        "weights": 1000,
        "activations": 251,
        "exchanged by attention": 2 * 100 / 2,
    }
    assert one.phases["kept"] == {"weights": 1000, "activations": 251}
    assert one.phases["end"] == {"weights": 1000, "activations": 501}
    assert two.phases["forward"]["exchanged by attention"] == 2 * 100
    attentions = 3 * 2
    assert two.work == Work(
        flops=(2000 + 2 * 20) / 2,
        attention=(140 + 2 * 20) / 2,
        moved=80 / 2 + attentions * 28 * 100,
        operations=9 + attentions * 14,
    )


UNKNOWN = (
    *("fits", "verdict", "chosen", "processes", "simulation", "ways", "price"),
    *("hours", "hours_beside", "hours_encoding", "seconds_a_step", "device", "host"),
)
"""What other modules fill."""


def test_a_plan_has_the_run_s_numbers_and_places_for_memory_and_time(lab: Lab) -> None:
    """Two clips of 9 frames, two samples a pass of which a step has three."""
    knobs = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "save_every": 2,
        "backup_after": 0,
        "backup_every": 0,
        "ema.decay": 0.9,
    }
    job = job_of(lab, knobs)
    plan = make_plan(job, targets=(6, 12))
    assert [plan.pop(key) for key in UNKNOWN] == [None] * len(UNKNOWN)
    assert [plan.pop(key) for key in ("examples", "remedies")] == [[], []]

    spec = job.spec
    (shape,) = job.shapes
    numbers = plan["adapter"]["parameters"]
    text_numbers = spec.text_tokens * spec.text_width + spec.text_numbers
    checkpoint = (4 + 8 + 4) * numbers
    assert plan.pop("disk") == {
        "latent_entries": 2,
        "latent_bytes": 2 * 4 * spec.cached_numbers(shape),
        "condition_entries": 0,
        "condition_bytes": 0,
        "text_bytes_at_most": 4 * text_numbers * 3,  # two captions, and none
        "checkpoint_bytes": checkpoint,
        "checkpoints": 2,
        "run_bytes": 2 * checkpoint + 4 * numbers,
    }
    assert plan.pop("buckets") == [
        {
            "shape": str(shape),
            "sound": False,
            "windows": 2,
            "share": 1.0,
            "batch": 12,
            "tokens": spec.tokens(shape),
        }
    ]
    views = plan.pop("views")
    exposure = job.exposure(4).to_json(job.config.learning_rate)
    assert views == exposure | {"steps_for": views["steps_for"]}
    assert views["steps_for"] == {"6": 1, "12": 2}  # twelve samples of two windows
    assert views["per_window"]["max"] == 4 * 12 / 2
    assert plan["note_codes"]
    expected = {
        "effective_batch": 12,
        "micro_batch": 2,
        "steps": 4,
        "windows": 2,
        "sound_windows": None,
        "held_out_windows": 0,
        "experts": None,
        "conditions": [],
        "takes": list(spec.conditions),
        "licence": None,
        "licence_name": spec.licence,
        "download": None,
        "settings": job.config.model_dump(mode="json"),
    }
    assert {key: plan[key] for key in expected} == expected
    others = {"clips", "adapter", "beside", "notes", "note_codes", "pipeline_arguments"}
    assert plan.keys() == expected.keys() | others

    whole = make_plan(job_of(lab, {"batch_size": 4}))
    assert whole["micro_batch"] == 4
    larger = make_plan(job_of(lab, {"batch_size": 4, "micro_batch_size": 8}))
    assert larger["micro_batch"] == 4


def test_windows_of_a_shape_and_batch_are_a_row_of_the_buckets(tmp_path: Path) -> None:
    """A clip of 9 frames and one of 17, which has a window of 9, too."""
    frames = {"a.mkv": noise(9, 32, 32), "b.mkv": noise(17, 32, 32, seed=1)}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=16)
    lab = Lab(Path("asset:toy"), clips, tmp_path / "cache", tmp_path)
    knobs = {"video_config.frames": [9, 17]}
    job = job_of(lab, knobs)
    rows = make_plan(job)["buckets"]
    assert [row["windows"] for row in rows] == [1, 2]
    assert [row["shape"] for row in rows] == [
        str(shape) for shape in job.shapes_by_cost
    ]
    assert [row["share"] for row in rows] == [0.3333, 0.6667]
    assert [row["tokens"] for row in rows] == [
        job.spec.tokens(shape) for shape in job.shapes_by_cost
    ]


def test_steps_for_views_are_those_of_clips_that_train(lab: Lab) -> None:
    repeated = [{"path": str(lab.clips), "repeats": 3}]
    job = job_of(lab, {"datasets": repeated, "batch_size": 2})
    steps = steps_for_views(job, (12, 3, 6))
    assert list(steps) == ["3", "6", "12"]
    for views, step in steps.items():
        before, at = (most_views(job.exposure(count)) for count in (step - 1, step))
        assert before < int(views) <= at

    # Of views from before a change of the data only the step of that is known.
    window_ids = [window.id for window in job.library.windows]
    history = ViewHistory(5, dict.fromkeys(window_ids, 7))
    assert steps_for_views(replace(job, view_history=history), (3,)) == {"3": 5}

    regularization = [{"path": str(lab.clips), "kind": "regularization"}]
    without_training = job_of(lab, {"datasets": regularization})
    assert steps_for_views(without_training, (3,)) == {}


def test_terms_of_a_licence_are_of_a_model_that_has_them(lab: Lab) -> None:
    job = job_of(lab)
    assert licence_of(job) is None
    spec = replace(job.spec, title="A model", licence="its own", licence_terms="a URL")
    terms = {"model": "A model", "name": "its own", "terms": "a URL"}
    assert licence_of(replace(job, spec=spec)) == terms


def test_a_download_is_of_a_base_that_is_not_here(lab: Lab) -> None:
    job = job_of(lab)
    assert download_of(job) is None
    assert download_of(replace(job, base=None)) is None
    hub = BasePlace("Wan-AI/Wan2.1-T2V-1.3B-Diffusers@main", lab.tmp / "nowhere")
    size = download_size("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    assert size is not None
    assert download_of(replace(job, base=hub)) == asdict(size)
    newest = replace(hub, name="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    assert download_of(replace(job, base=newest)) == asdict(size)
    unknown = replace(hub, name="somebody/unknown")
    assert download_of(replace(job, base=unknown)) is None


def test_windows_with_sound_are_counted_where_the_run_reads_it(lab: Lab) -> None:
    job = job_of(lab)
    assert sound_windows_of(job) is None


@pytest.mark.parametrize(
    ("spec_changes", "knobs", "arguments"),
    [
        ({}, {"sample.guidance": 1}, {"off": 0}),
        ({}, {"sample.guidance": 1.5}, {"a": 1}),
        ({"sample_guidance": 1.0}, {"sample.guidance": None}, {"off": 0}),
        ({"sample_guidance": 3.0}, {"sample.guidance": None}, {"a": 1}),
        (
            {},
            {"sample.guidance": 4, "sample.guidance_rescale": 0.5},
            {"a": 1, "guidance_rescale": 0.5},
        ),
        (
            {"sample_rescale": 0.5},
            {"sample.guidance": 4, "sample.guidance_rescale": 0.5},
            {"a": 1},
        ),
        (
            {"takes_frame_rate": True},
            {"sample.guidance": 4, "video_config.target_fps": 12},
            {"a": 1, "frame_rate": 12.0},
        ),
        (
            {"takes_frame_rate": True},
            {"sample.guidance": 4},
            {"a": 1, "frame_rate": 16.0},
        ),
    ],
)
def test_diffusers_gets_what_differs_from_its_defaults(
    spec_changes: dict[str, Any],
    knobs: dict[str, Any],
    arguments: dict[str, Any],
    lab: Lab,
) -> None:
    """A pipeline with one argument of its own, and one more without guidance."""
    job = job_of(lab, knobs)
    if knobs["sample.guidance"] is None:  # of a config that no base has completed
        sample = job.config.sample.model_copy(update={"guidance": None})
        config = job.config.model_copy(update={"sample": sample})
        job = replace(job, resolved=replace(job.resolved, config=config))
    spec = replace(
        job.spec,
        pipeline_arguments={"a": 1},
        unguided_arguments={"off": 0},
        **spec_changes,
    )
    result = pipeline_arguments(replace(job, spec=spec))
    unguided = {"a": 1} if "off" in arguments else {}
    assert result == unguided | arguments
    assert all(
        isinstance(value, float)
        for name, value in result.items()
        if name == "frame_rate"
    )


def test_conditions_of_no_sample_are_left_out(lab: Lab) -> None:
    conditions = [
        {"type": "prefix", "probability": 0.25},
        {"type": "last_frame", "probability": 0.0},
        {"type": "suffix", "latent_frames": 2, "probability": 0.5},
    ]
    knobs = {"conditions": conditions, "first_frame_probability": 0.1}
    job = job_of(lab, knobs)
    rows = conditions_of(job)
    assert [
        (row["type"], row["probability"], row["latent_frames"]) for row in rows
    ] == [("first_frame", 0.1, None), ("prefix", 0.25, 1), ("suffix", 0.5, 2)]
    for row in rows:
        support = job.spec.conditions[row["type"]]
        assert row["mechanism"] == support.mechanism
        assert row["in_diffusers"] == support.in_diffusers
        assert len(row) == 5
    assert conditions_of(job_of(lab)) == []


def test_experts_share_the_steps(lab: Lab, tiny_bases: Bases) -> None:
    model = replace(lab, model=tiny_bases("wan", "t2v-a14b"))
    experts = make_plan(job_of(model, {"steps": 2000}))["experts"]
    assert experts["period"] > 0
    assert [(row["name"], row["from"], row["to"]) for row in experts["each"]] == [
        (expert.name, expert.t_lo, expert.t_hi) for expert in job_of(model).spec.experts
    ]
    assert sum(row["steps"] for row in experts["each"]) == 2000
    assert all(row["steps"] > 0 for row in experts["each"])


def test_remarks_on_the_run_and_on_its_validations_are_notes_once_each(
    lab: Lab, tmp_path: Path
) -> None:
    """One validation is too few for a verdict."""
    held_out = write_dataset(tmp_path / "held", {"c.mkv": noise(9, 32, 32)}, {}, fps=16)
    datasets = [{"path": str(lab.clips)}, {"path": str(held_out), "kind": "validation"}]
    job = job_of(lab, {"datasets": datasets, "validate_every": 4})
    remark = job.notes[0]
    plan = make_plan(replace(job, notes=(remark, remark)))
    assert plan["notes"].count(remark) == 1
    assert "few_validations" in plan["note_codes"]
    assert len(plan["notes"]) == len(plan["note_codes"]) == 2
    assert plan["held_out_windows"] == 1


def test_a_checkpoint_has_the_state_that_an_optimizer_class_keeps(lab: Lab) -> None:
    """Momentum of 4 bytes beside 4 of each number; what is exported has no state."""
    knobs = {"optimizer.name": "torch.optim:SGD", "optimizer.args": {"momentum": 0.9}}
    plan = make_plan(job_of(lab, knobs))
    numbers = plan["adapter"]["parameters"]
    disk = plan["disk"]
    assert disk["checkpoint_bytes"] == pytest.approx(8 * numbers, rel=0.02)
    checkpoints = disk["checkpoints"] * disk["checkpoint_bytes"]
    assert disk["run_bytes"] == checkpoints + 4 * numbers


def test_a_format_that_cannot_be_written_is_refused_before_the_run(lab: Lab) -> None:
    knobs = {"training_method": "EMBEDDING", "output_model_format": "kohya"}
    with pytest.raises(VideotuneError, match="output_model_format"):
        make_plan(job_of(lab, knobs))


def test_batches_of_a_shape_are_rows_of_their_own_the_smallest_first(
    lab: Lab, tmp_path: Path
) -> None:
    other = write_dataset(tmp_path / "c", {"c.mkv": noise(9, 32, 32)}, {}, fps=16)
    later = write_dataset(tmp_path / "d", {"d.mkv": noise(9, 32, 32)}, {}, fps=16)
    datasets = [
        {"path": str(lab.clips), "batch_size": 4},
        {"path": str(other), "batch_size": 3},
        {"path": str(later), "batch_size": 4, "from_step": 3},
    ]
    job = job_of(lab, {"datasets": datasets})
    assert len(job.buckets) > 2
    rows = make_plan(job)["buckets"]
    assert [(row["batch"], row["windows"]) for row in rows] == [(3, 1), (4, 3)]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)


def test_text_that_trains_is_a_part_of_the_adapter(lab: Lab) -> None:
    full = {"training_method": "FINE_TUNE", "transformer.layers": ["blocks.0.attn1"]}
    denoiser = make_plan(job_of(lab, full))["adapter"]
    both = make_plan(job_of(lab, full | {"text_encoder.train": True}))["adapter"]
    text = {"transformer.train": False, "text_encoder.train": True}
    alone = make_plan(job_of(lab, {"training_method": "FINE_TUNE"} | text))["adapter"]
    for key in ("modules", "parameters"):
        assert both[key] == denoiser[key] + alone[key]
        assert alone[key] > 0
    assert alone["parts"] == alone["groups"] == {}


def test_a_caption_has_its_states_and_the_numbers_beside_them(lab: Lab) -> None:
    job = job_of(lab)
    spec = replace(job.spec, text_numbers=7)
    numbers = spec.text_tokens * spec.text_width + 7
    captions = cache_size(job).captions
    plan = make_plan(replace(job, spec=spec))
    assert plan["disk"]["text_bytes_at_most"] == 4 * numbers * captions
