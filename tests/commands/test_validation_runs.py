"""What a whole run says of itself (validation, times seen, the verdict, samples that
are measured), and how much of its time that takes: by default 8 %, planned as it
happens.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.command_line import Patch, Printed, plan, train
from tests.support.reports import part as chapter_text
from tests.support.run_parts import build_trainer, measure, open_run, preview
from tests.support.run_processes import Finished, Make, Work, resume
from tests.support.run_results import assert_same_run, of_kind, steps_of, warnings_of
from videotune.cli.plan import overhead_text
from videotune.commands import train as train_command
from videotune.errors import DONE, INTERRUPTED
from videotune.files import digest, read_json, write_json
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.view_bands import views_text
from videotune.model_spec import VideoRules
from videotune.planner.plan import make_plan
from videotune.runs.checkpoint import pick
from videotune.runs.journal import readings_of
from videotune.runs.run_dir import begin, run_settings
from videotune.toy.dataset import write_dataset
from videotune.trainer.loop import train_loop
from videotune.trainer.progress import (
    announce,
    progress_parts,
    seconds_left,
    steps_left,
    tokens_of_buckets,
)
from videotune.trainer.resume import Resume
from videotune.trainer.throughput import time_left
from videotune.trainer.trainer import Trainer, count_due, due
from videotune.trainer.views_counted import ViewsCounted
from videotune.types import ClipShape
from videotune.validation import embeddings
from videotune.validation import sample_metrics as probes
from videotune.validation.overhead import (
    decide_spacings,
    overhead,
    share_of_run,
    total_share,
)
from videotune.validation.sample_metrics_plan import (
    metric_prompts,
    metric_shape,
    sample_metrics_plan,
)


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in line.items()
            if key not in ("time", "seconds", "waited")
        }
        for line in lines
    ]


@pytest.fixture
def settings(work: Work, small_clips: Path) -> Make:
    """A run on four clips that is measured on two others, with an average of its
    weights.
    """
    for part in ("videos", "captions"):
        for number, path in enumerate(sorted((small_clips / part).iterdir())):
            place = work.tmp / ("own" if number < 4 else "others") / part
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)

    def make(*sets: str) -> Overrides:
        data = [
            {"path": str(work.tmp / "own")},
            {"path": str(work.tmp / "others"), "kind": "validation"},
        ]
        often = (
            "steps=4",
            "validate_every=1",
            "save_every=2",
            "ema.decay=0.5",
            f"datasets={json.dumps(data)}",
        )
        return Overrides(sets=(*work.overrides().sets, *often, *sets))

    return make


def test_a_killed_and_resumed_run_measures_the_same_bits(
    settings: Make, tmp_path: Path
) -> None:
    """Readings, views and verdicts, of the average and of the weights; the first half
    ends as a kill would leave it.
    """
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert train(settings(), straight) == DONE
    assert train(settings("steps=2"), run) == DONE
    ended = [
        line
        for line in (run / "journal.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] != "end"
    ]
    (run / "journal.jsonl").write_text("\n".join(ended) + "\n")
    assert resume(run, "steps=4") == DONE
    assert without_times(of_kind(run, "validation")) == without_times(
        of_kind(straight, "validation")
    )
    seen, wanted = (
        without_times(of_kind(folder, "views")) for folder in (run, straight)
    )
    plans = [
        [line.pop("by_the_end")["max"] for line in lines] for lines in (seen, wanted)
    ]
    assert seen == wanted
    most = [
        read_json(folder / "plan.json")["views"]["per_window"]["max"]
        for folder in (run, straight)
    ]
    assert plans[1] == [most[1]] * 5
    assert plans[0][3:] == [most[0]] * 2 == [most[1]] * 2, (
        "planned for two steps at first, and for four since"
    )
    assert read_json(run / "validation.json") == read_json(straight / "validation.json")

    readings = of_kind(run, "validation")
    assert [line["step"] for line in readings] == [0, 1, 2, 3, 4]
    first, last = readings[0], readings[-1]
    assert first["live"] == {part: first[part] for part in ("held_out", "train")}, (
        "nothing is averaged yet"
    )
    assert last["live"]["train"]["mean"] != last["train"]["mean"]
    assert len(last["held_out"]["clips"]) == 2
    assert sum(last["held_out"]["clips"].values()) / 2 == pytest.approx(
        last["held_out"]["normalised"]
    )
    views = of_kind(run, "views")
    shown = [name[:12] for line in of_kind(run, "step") for name in line["window_ids"]]
    assert [line["step"] for line in views] == [0, 1, 2, 3, 4], (
        "once, where a reading and a save meet"
    )
    assert views[-1]["clips"] == {
        name: shown.count(name) for name in views[-1]["clips"]
    }
    assert of_kind(run, "verdict")[-1]["step"] == 4
    assert of_kind(run, "end")[-1]["take"]["step"] in (2, 4)


def test_the_validation_set_is_frozen_and_a_changed_one_is_reported(
    settings: Make, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(settings("steps=1"), run) == DONE
    frozen = read_json(run / "validation.json")
    assert of_kind(run, "validation")[0]["validation"] == frozen["name"]
    assert [len(frozen[part]) for part in ("held_out", "train", "levels")] == [2, 2, 9]
    assert (
        len({row["latents"] for part in ("held_out", "train") for row in frozen[part]})
        == 4
    )
    caption = next((tmp_path / "others" / "captions").glob("*.txt"))
    caption.write_text("quite another caption")
    assert resume(run, "steps=2", data_change=True) == DONE
    (warning,) = [
        text for text in warnings_of(run) if "the validation set changed" in text
    ]
    assert "the text of its clips kept aside differ" in warning
    assert frozen["mean"] == "clips, each at a third of the levels"
    assert (
        read_json(run / "validation.json")["name"]
        == of_kind(run, "validation")[-1]["validation"]
        != frozen["name"]
    )
    kept = read_json(run / "validation.json")
    write_json(run / "validation.json", kept | {"seed": 5})
    assert resume(run, "steps=3") == DONE
    assert read_json(run / "validation.json") == kept, (
        "a file that was changed gives way"
    )
    assert (
        len([text for text in warnings_of(run) if "the validation set changed" in text])
        == 1
    )
    older = {
        key: value for key, value in kept.items() if key not in ("name", "mean")
    }  # it averaged over windows
    write_json(run / "validation.json", {"name": digest(older)[:8], **older})
    text = (run / "journal.jsonl").read_text().replace(kept["name"], digest(older)[:8])
    (run / "journal.jsonl").write_text(text)
    assert resume(run, "steps=4") == DONE
    assert "its averaging differ" in warnings_of(run)[-1]


def test_a_validation_set_goes_on_where_training_clips_change(
    settings: Make, tmp_path: Path
) -> None:
    """The error on clips kept aside stays a share of the base model's."""
    run = tmp_path / "run"
    assert train(settings("steps=2"), run) == DONE
    frozen = read_json(run / "validation.json")
    for caption in (tmp_path / "own" / "captions").glob("*.txt"):
        caption.write_text("quite another caption")
    assert resume(run, "steps=4", data_change=True) == DONE

    readings = of_kind(run, "validation")
    assert {reading["validation"] for reading in readings} == {frozen["name"]}
    assert readings_of(readings) == readings
    assert readings[0]["held_out"]["normalised"] == 1.0
    assert readings[-1]["held_out"]["normalised"] != 1.0
    (warning,) = warnings_of(run)
    assert "the text of its training clips changed" in warning
    now = read_json(run / "validation.json")
    assert now["named_with"] == frozen["train"] != now["train"]

    assert resume(run, "steps=5") == DONE
    assert warnings_of(run) == [warning]
    assert of_kind(run, "validation")[-1]["validation"] == frozen["name"]


def test_previews_keep_their_prompts_where_another_caption_changes(
    work: Work, small_clips: Path
) -> None:
    """Otherwise no preview after the change would have one before it."""
    data = work.tmp / "data"
    shutil.copytree(
        small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache")
    )
    captions = sorted((data / "captions").glob("*.txt"))
    for number, path in enumerate(captions):
        path.write_text(f"a caption of {max(number, 1)}")
    run = work.run
    sets = ("steps=2", "sample_after=2", "sample.steps=1", "samples=3")
    assert train(work.overrides(*sets, data=data), run) == DONE
    before = [(line["seed"], line["prompt"]) for line in of_kind(run, "sample")[:3]]
    assert len({prompt for _, prompt in before}) == 3

    # One caption more now, which moves those that are chosen evenly.
    captions[0].write_text("quite another caption")
    assert resume(run, "steps=4", data_change=True) == DONE
    now = [(line["seed"], line["prompt"]) for line in of_kind(run, "sample")[-3:]]
    assert now == before

    # A prompt whose caption is gone is replaced, and only that one.
    gone = before[1][1]
    for path in captions:
        if path.read_text() == gone:
            path.write_text("changed at last")
    assert resume(run, "steps=6", data_change=True) == DONE
    now = [(line["seed"], line["prompt"]) for line in of_kind(run, "sample")[-3:]]
    assert [now[0], now[2]] == [before[0], before[2]]
    assert now[1][1] not in [prompt for _, prompt in before]


def test_a_run_without_captions_says_that_it_makes_no_previews(
    work: Work, small_clips: Path, capfd: Printed
) -> None:
    data = work.tmp / "data"
    shutil.copytree(small_clips / "videos", data)
    sets = ("steps=1", "sample_after=1", "sample.steps=1", "missing_caption=empty")
    assert train(work.overrides(*sets, data=data), work.run) == DONE
    assert "no previews are made" in capfd.readouterr().err
    page = (work.run / "report.html").read_text()
    for anchor in ("before", "samples"):
        said = chapter_text(page, anchor)
        assert "no training clip has one" in said
        assert "yet" not in said
    assert not of_kind(work.run, "sample")


def test_the_plan_has_the_steps_for_a_number_of_times_seen(
    overrides: Make, capsys: Printed
) -> None:
    """Two samples a step."""

    def planned(*sets: str, **more: Any) -> dict[str, Any]:
        capsys.readouterr()
        assert (
            plan(
                overrides("batch_size=2", "video_config.frames=9", *sets),
                as_json=True,
                **more,
            )
            == DONE
        )
        return json.loads(capsys.readouterr().out)

    found = planned("steps=9")
    steps = found["views"]["steps_for"]
    assert list(steps) == ["10", "20", "50", "100"]
    assert steps["10"] == pytest.approx(10 * found["windows"] / 2, abs=found["windows"])
    again = planned(f"steps={steps['10']}", views=(10, 33))["views"]
    assert again["per_window"]["max"] == 10
    assert list(again["steps_for"]) == ["10", "33"]


def test_without_held_out_clips_the_verdict_says_so(finished: Finished) -> None:
    run = finished("steps=3", "validate_every=1", "early_stopping=1")
    verdicts = of_kind(run, "verdict")
    assert [(line["step"], line["verdict"]) for line in verdicts] == [
        (step, None) for step in range(4)
    ]
    reason = verdicts[-1]["reason"]
    assert "no clip is kept aside for checking" in reason
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3], "and nothing stops it"
    assert of_kind(run, "end")[-1]["take"] == {
        "step": 3,
        "why": f"no verdict: {reason}",
    }


def test_a_run_that_validates_too_rarely_says_so_before_its_first_step(
    settings: Make, work: Work, capsys: Printed
) -> None:
    """A resume counts the validations so far, so a spacing that is made smaller too late
    is named too.
    """
    (work.run).mkdir()
    (work.run / "control.json").write_text('{"stop": true}')
    assert train(settings("validate_every=4", "save_every=1"), work.run) == INTERRUPTED
    printed = " ".join(capsys.readouterr().err.split())
    assert "a verdict needs 3 validations, the run makes 2" in printed

    (work.run / "control.json").write_text('{"stop": true}')
    assert resume(work.run, "validate_every=5") == INTERRUPTED
    printed = " ".join(capsys.readouterr().err.split())
    assert "a verdict needs 3 validations, the run makes 2" in printed

    assert resume(work.run, "validate_every=1") == DONE
    printed = " ".join(capsys.readouterr().err.split())
    assert "a verdict needs" not in printed
    assert of_kind(work.run, "verdict")[-1]["verdict"] is not None


SETS = ("steps=4", "save_every=2", "ema.decay=0.5")
PROBED = (
    "sample_metrics.budget=100000",
    "sample_metrics.steps=1",
    "sample_metrics.samples=4",
    "sample.guidance=1",
    "forgetting.budget=100000",
    "forgetting.steps=1",
)


@pytest.fixture(scope="module")
def two(
    overrides: Make, finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same run with sample metrics, stopped after its second step and resumed, and
    without, in one go.
    """
    run = tmp_path_factory.mktemp("probed") / "run"
    run.mkdir()
    (run / "control.json").write_text('{"stop": true}')
    assert train(overrides(*SETS, *PROBED), run) == INTERRUPTED
    assert resume(run) == DONE
    return run, finished(*SETS)


def test_sample_metrics_change_nothing_of_the_training(two: tuple[Path, Path]) -> None:
    """Bit for bit, with an average of the weights too, over a stop and a resume."""
    run, quiet = two
    assert_same_run(run, quiet, 4)
    assert of_kind(quiet, "sample_metrics") == []
    assert of_kind(quiet, "forgetting") == []
    kept = of_kind(run, "forgetting")
    assert [line["step"] for line in kept] == [0, 2, 4]
    assert kept[-1]["distance"]["mean"] > 0
    assert not (quiet / "sample_metrics").exists()


def test_metrics_at_each_checkpoint_and_before_the_first_step(
    two: tuple[Path, Path],
) -> None:
    run, _ = two
    lines = of_kind(run, "sample_metrics")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(run) == []
    assert len({line["sample_metrics"] for line in lines}) == 1
    paths = {sample["path"] for line in lines for sample in line["samples"]}
    assert paths == {
        path.relative_to(run).as_posix()
        for path in (run / "sample_metrics").glob("*.mp4")
    }
    assert len(paths) == 12
    known = {clip["path"] for clip in read_json(run / "check.json")["clips"]}
    assert {sample["clip"] for line in lines for sample in line["samples"]} <= known
    first, last = lines[0], lines[-1]
    assert first["motion"]["energy"]["to_base"] == first["diversity"]["to_base"] == 1
    assert last["replication"]["base"] == first["replication"]["mean"]
    assert last["motion"]["energy"]["base"] == first["motion"]["energy"]["value"]
    assert last["motion"]["energy"]["value"] != first["motion"]["energy"]["value"], (
        "what was learnt is seen"
    )
    assert all(line["seconds"] > 0 for line in lines)


KINDS = {
    "two experts": ("t2v-a14b", ("expert_period=1", "expert_share=0.5")),
    "new tokens": (
        "t2v",
        ("training_method=EMBEDDING", "embedding.token=<zorble>", "learning_rate=2"),
    ),
    "text encoder": (
        "t2v",
        ("training_method=FINE_TUNE", "text_encoder.train=true", "lora.rank=2"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_trained_is_measured(kind: str, work: Work) -> None:
    """Of two experts, and of captions encoded in the step: what was learnt is seen, and
    nothing of the training moves.
    """
    variant, more = KINDS[kind]
    sets, run = ("steps=4", "save_every=2", *more), work.run
    assert train(work.overrides(*sets, *PROBED, base=("wan", variant)), run) == DONE
    assert_same_run(run, work.finished(*sets, base=("wan", variant)), 4)
    lines = of_kind(run, "sample_metrics")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert warnings_of(run) == []
    assert lines[0]["motion"]["energy"]["to_base"] == 1
    measured = [json.dumps([line["motion"], line["replication"]]) for line in lines]
    assert len(set(measured)) == 3


def test_other_settings_than_the_base_s_are_not_measured(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    """The base's samples are made once and kept."""
    run = shutil.copytree(two[0], tmp_path / "run")
    with np.load(run / "sample_metrics" / "base.npz") as file:
        assert file["films"].shape == (4, 5, 32, 32, 3)
    kept = read_json(run / "sample_metrics.json")["reading"]["name"]
    assert kept == of_kind(run, "sample_metrics")[0]["sample_metrics"]
    assert len(list((run / "sample_metrics").glob("step-000000-*.mp4"))) == 4
    assert resume(run, "steps=6", "sample_metrics.steps=2") == DONE
    assert "differ from those" in of_kind(run, "sample_metrics")[-1]["not_measured"]


def test_another_encoder_on_a_resume_compares_the_base_s_samples_anew(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """They lie there as pixels, so the last measurement compares with them by the new
    encoder.
    """
    run = shutil.copytree(two[0], tmp_path / "run")
    other = replace(embeddings.default_embedding(), name="edges-0")
    monkeypatch.setattr(probes, "default_embedding", lambda: other)
    before = (run / "sample_metrics" / "base.npz").read_bytes()
    assert resume(run, "steps=6") == DONE
    *_, old, new = of_kind(run, "sample_metrics")
    assert (new["step"], new["embedding"]) == (6, "edges-0")
    assert new["sample_metrics"] != old["sample_metrics"]
    assert new["replication"]["base"] == old["replication"]["base"]
    assert (run / "sample_metrics" / "base.npz").read_bytes() == before


def test_a_failing_measurement_is_a_warning(work: Work, monkeypatch: Patch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such picture")

    monkeypatch.setattr(probes, "read_samples", fail)
    work.train("steps=1", *PROBED)
    said = "the sample metrics at step {} failed: RuntimeError: no such picture"
    assert warnings_of(work.run) == [said.format(step) for step in (0, 1)]
    assert of_kind(work.run, "sample_metrics") == []


def test_samples_have_the_smallest_shape_of_the_model() -> None:
    rules = VideoRules(
        frame_step=4,
        frame_rest=1,
        side_multiple=16,
        fps=16,
        spatial_stride=8,
        temporal_stride=4,
    )
    assert metric_shape(ClipShape(17, 480, 832, 16.0), rules) == ClipShape(
        5, 240, 416, 16.0
    )
    halved = metric_shape(ClipShape(17, 368, 640, 16.0), rules)
    assert halved == ClipShape(5, 176, 320, 16.0)
    assert metric_shape(ClipShape(1, 256, 256, 16.0), rules) == ClipShape(
        1, 128, 128, 16.0
    )
    # Of a picture of less than 128 pixels nothing could be measured.
    for height, width in ((240, 832), (480, 240), (64, 64), (16, 48)):
        kept = metric_shape(ClipShape(17, height, width, 16.0), rules)
        assert kept == ClipShape(5, height, width, 16.0)
    only = VideoRules(0, 49, 16, 8, 8, 4, most_frames=49, size=(480, 720))
    assert metric_shape(ClipShape(49, 480, 720, 8.0), only) == ClipShape(
        49, 480, 720, 8.0
    )


def test_what_is_sampled_and_its_share_of_the_run(overrides: Make) -> None:
    """The captions of clips, the same seeds for each; twice the steps of the run halve
    the share.
    """

    def job_of(*sets: str) -> Any:
        return open_job(*resolve_config(overrides("sample_metrics.budget=0.05", *sets)))

    job = job_of(
        "steps=100",
        "sample_metrics.samples=6",
        "sample_metrics.steps=3",
        "sample.guidance=2",
    )
    plan = sample_metrics_plan(job)
    assert plan is not None
    captions = {caption for clip in job.library.clips for caption in clip.captions}
    assert len(plan.prompts) == 2
    assert set(plan.prompts) <= captions
    assert plan.pairs == [(0, 42), (1, 42), (0, 43), (1, 43), (0, 44), (1, 44)]
    assert share_of_run(plan, job_of("steps=200")) == pytest.approx(
        share_of_run(plan, job) / 2
    )
    tokens = job.spec.tokens(plan.settings.shape)
    windows = [job.spec.tokens(window.shape) for window in job.training_windows]
    assert share_of_run(plan, job) == pytest.approx(
        6 * 3 * 2 * tokens / (3 * 100 * sum(windows) / len(windows))
    )
    assert metric_prompts(job_of("sample_metrics.budget=0")) == []


def test_first_frames_of_samples_are_those_of_clips(overrides: Make) -> None:
    """Where none is held out, of training clips; in the windows' own shape, since that
    is what is cached.
    """
    job = open_job(
        *resolve_config(overrides("sample_metrics.budget=0.05", base=("wan", "i2v")))
    )
    plan = sample_metrics_plan(job)
    assert plan is not None
    assert len(plan.condition_windows) == len(plan.prompts) == 2
    assert all(
        str(window.shape) == str(plan.settings.shape)
        for window in plan.condition_windows
    )
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert all(
        prompt in captions[window.clip_id]
        for prompt, window in zip(plan.prompts, plan.condition_windows, strict=True)
    )


# ---- the time that it takes


LOOKS = (
    "validate_every=2",
    "sample_after=3",
    "samples=1",
    "sample.steps=2",
    "save_every=2",
)
OFTEN = ("steps=5", *LOOKS, "sample_metrics.budget=0")


@contextmanager
def counted(trainer: Trainer) -> Iterator[list[int]]:
    """The samples of each pass through the network, taken from its calls."""
    seen: list[int] = []

    def count(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        tensors = [
            value
            for value in (*args, *given.values())
            if isinstance(value, torch.Tensor) and value.dim() == 5
        ]
        seen.append(tensors[0].shape[0])

    handle = trainer.net.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@given(st.integers(0, 12), st.integers(1, 60), st.integers(-1, 60))
def test_it_is_counted_as_often_as_it_is_due(every: int, last: int, after: int) -> None:
    assert count_due(every, last, after) == sum(
        due(step, every, last) for step in range(after + 1, last + 1)
    )


@pytest.mark.parametrize(
    ("family", "more"),
    [("wan", ("ema.decay=0.5",)), ("hunyuan_video", ("sample.guidance=6",))],
    ids=["guided", "guidance embedded"],
)
def test_the_plan_knows_how_often_and_how_many_passes(
    family: str, more: tuple[str, ...], work: Work
) -> None:
    """Against the calls of the network: what passes through it in a validation and a
    preview, and how many there were.
    """
    run = work.run
    job = open_run(work.overrides(*OFTEN, *more, base=(family,)), run).job
    trainer, planned = build_trainer(job, run, False), make_plan(job)["beside"]
    announce(trainer, None)
    for act, part in ((measure, "readings"), (preview, "previews")):
        with counted(trainer) as seen:
            act(trainer, 0)
        assert sum(seen) == planned[part]["passes"], part
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    assert (
        len({line["step"] for line in of_kind(run, "validation")})
        == planned["readings"]["count"]
        == 4
    )
    assert (
        len({line["step"] for line in of_kind(run, "sample")})
        == planned["previews"]["count"]
        == 3
    )


def test_the_share_is_that_of_the_tokens(work: Work) -> None:
    """By hand: 4 validations of 9 passes, beside 5 steps of 2 samples that count
    threefold; all of one shape. With twice the processes the same: as many steps have
    twice the samples in the same time.
    """

    def found(*sets: str, processes: int = 1) -> dict[str, Any]:
        settings = work.overrides("batch_size=2", "video_config.frames=5", *sets)
        return make_plan(open_run(settings, work.run, None, processes).job)["beside"]

    facts = found(*OFTEN)
    windows = (
        facts["readings"]["held_out_windows"] + facts["readings"]["training_windows"]
    )
    assert facts["readings"]["passes"] == 9
    assert facts["readings"]["share"] == pytest.approx(4 * 9 / (3 * 2 * 5), rel=0.01)
    assert facts["previews"]["share"] == pytest.approx(
        3 * facts["previews"]["passes"] / (3 * 2 * 5), rel=0.01
    )
    assert total_share(facts) == facts["readings"]["share"] + facts["previews"]["share"]
    printed = overhead_text(facts)
    assert f"4 validations of {windows} windows" in printed
    assert "3 × 1 preview of" in printed
    parts = ("readings", "previews", "probes", "forgetting")
    assert found() == dict.fromkeys(parts)
    assert overhead_text(found()) == ""
    often = (*OFTEN[:-1], "sample_metrics.budget=1000")
    assert found(*often) == found(*often, processes=2)


def test_the_progress_bar_has_times_seen_with_their_band(work: Work) -> None:
    """By the window that is seen most, step by step as the exposure has it."""
    trainer = build_trainer(
        open_run(work.overrides("steps=200", "batch_size=6"), work.run).job,
        work.run,
        False,
    )
    trainer.journal.close()
    counted_at = []
    texts = {}
    for step in range(1, 201):
        per_window = trainer.job.exposure(step).ranges()["per_window"]
        texts[step] = views_text(per_window)
        if progress_parts(trainer, step, {"loss": 0.1})[-1] == texts[step]:
            counted_at.append(step)
    assert len({text.partition("(")[2] for text in texts.values()}) == 4
    assert counted_at == list(texts), "a step shows each window once"
    assert texts[200] == views_text(trainer.plan["views"]["per_window"])


def test_views_are_counted_anew_as_they_grow_and_at_the_end(work: Work) -> None:
    """Going through all windows at each step would be slow with many of them."""
    job = open_run(work.overrides("steps=200", "batch_size=6"), work.run).job
    steps = []

    class SlowlySeenJob:
        steps = 40

        def views_at(self, step: int) -> float:
            return step / 30

        def exposure(self, step: int) -> Any:
            steps.append(step)
            return job.exposure(step)

    views = ViewsCounted()
    for step in range(1, 41):
        views.text_at(step, cast(Job, SlowlySeenJob()))
    assert steps[:3] == [1, 4, 7]
    assert steps[-1] == 40
    assert len(steps) < 15


def test_the_time_left_counts_what_is_done_between_steps(work: Work) -> None:
    run = work.run
    settings = work.overrides(*OFTEN)
    trainer = build_trainer(open_run(settings, run).job, run, False)
    announce(trainer, None)
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    took = {one: trainer.throughput.took[one] for one in trainer.callbacks}
    # which parts move, saves, validation, previews
    spacing = dict(zip(trainer.callbacks, (2, 2, 2, 3), strict=True))
    for step in range(1, 6):
        steps = time_left(
            trainer.throughput.by_bucket,
            steps_left(trainer.job, step),
            tokens_of_buckets(trainer.job),
        )
        left = {
            one: sum(due(later, every, 5) for later in range(step, 6))
            for one, every in spacing.items()
        }
        wanted = (steps or 0) + sum(took[one] * count for one, count in left.items())
        assert seconds_left(trainer, step) == pytest.approx(wanted), (
            "asked before what follows the step"
        )


BIG = ("family=wan", "resolution=480x832", "allow_crop=true")


def open_planned(clips: Path, *sets: str) -> Job:
    return decide_spacings(
        open_job(*resolve_config(Overrides(data=str(clips), sets=sets)))
    )


@pytest.fixture(scope="module")
def forty_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forty")
    write_dataset(folder, concept_clips=40, reminder_clips=0, seed=1)
    return folder


@pytest.mark.parametrize(
    "key",
    ["seed=0", "batch_size=4", "ema.decay=0.99", "sample.guidance=1", "save_every=100"],
)
@pytest.mark.parametrize("family", ["wan", "ltx_video"])
def test_from_500_steps_on_all_of_it_takes_8_percent(
    family: str, key: str, forty_clips: Path
) -> None:
    for steps in (500, 1100, 4000):
        found = overhead(
            open_planned(forty_clips, *BIG, f"family={family}", f"steps={steps}", key)
        )
        assert 0.02 < total_share(found) <= 0.08, (steps, found)
        assert found["readings"]["count"] >= 2
        assert found["previews"]["count"] >= 2
        if key != "ema.decay=0.99":
            assert found["readings"]["count"] >= 3, "a verdict takes three"


def test_a_number_that_is_named_stays_and_a_longer_run_looks_oftener(
    forty_clips: Path,
) -> None:
    named = ("validate_every=10", "sample_after=20", "validation_windows=9")
    job = open_planned(forty_clips, *BIG, "steps=500", *named)
    assert (
        job.config.validate_every,
        job.config.sample_after,
        job.config.validation_windows,
    ) == (10, 20, 9)
    assert job.config.samples == 2
    assert job.config.sample.steps == job.spec.sample_steps
    short, long = (
        open_planned(forty_clips, *BIG, f"steps={steps}") for steps in (500, 8000)
    )
    assert (
        short.resolved.origins["validate_every"]
        == short.resolved.origins["sample.steps"]
        == "plan"
    )
    counts = [overhead(job)["readings"]["count"] for job in (short, long)]
    assert counts[0] < counts[1]
    assert (
        short.config.sample.steps < long.config.sample.steps == long.spec.sample_steps
    )
    assert short.config.samples == 1


def test_a_run_keeps_its_spacing_when_it_is_prolonged(work: Work) -> None:
    """The spacing stands in config.json; a resume to more steps reads it there."""
    run = work.run
    first = open_run(
        work.overrides("steps=4", "validate_every=null", "sample_after=null"), run
    ).job
    begin(run, first, {}, make_plan(first), "FLOAT_32")
    later = open_run(Overrides(sets=("steps=400",)), run, Resume()).job
    for key in ("validate_every", "sample_after", "validation_windows"):
        assert getattr(later.config, key) == getattr(first.config, key)
        assert later.resolved.origins[key] == "plan"
    assert overhead(later)["readings"]["count"] > overhead(first)["readings"]["count"]
    assert first.resolved.origins["sample.steps"] == "plan"
    assert first.config.sample.steps < first.spec.sample_steps
    assert run_settings(run)["sample"]["steps"] is None, (
        "what `videotune sample` takes is the family's own"
    )


def test_the_files_of_the_recommended_checkpoint_are_written_too(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best is an earlier step than the last: both are exported, and verified."""
    monkeypatch.setattr(
        train_command,
        "recommend_checkpoint",
        lambda trainer, step: {"step": 2, "why": "clips kept aside were best there"},
    )
    work.train("steps=3", "save_every=1")
    exports = json.loads((work.run / "exports.json").read_text())
    names = [Path(export["path"]).name for export in exports]
    assert names == [
        "run-step-3.safetensors",
        "run-step-3-comfyui.safetensors",
        "run-step-2.safetensors",
        "run-step-2-comfyui.safetensors",
    ]
    weights = [load_file(work.run / export["path"]) for export in exports]
    key = next(name for name in weights[0] if name.endswith("lora_B.weight"))
    assert not torch.equal(weights[0][key], weights[2][key])
    saved = pick(work.run, 2).result()
    assert any(torch.equal(weights[2][key], value) for value in saved.values())
