"""What may differ on a resume: safe, allowed by name, or refused, and always reported.

After public threads of other trainers too: musubi-tuner #497 (the rate of a resume is
0), diffusion-pipe #278 (another rate is taken for the old one), OneTrainer #132 (a run
that is done resumes to nothing, and nothing says so).
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import write_image
from tests.support.command_line import Printed, train
from tests.support.run_parts import open_run
from tests.support.run_processes import Finished, Make, Work, refusal, resume, start
from tests.support.run_results import (
    assert_same_run,
    complete,
    facts_of,
    largest_weight_difference,
    of_kind,
    same_tensors,
    state,
    steps_of,
    warnings_of,
)
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import digest, read_json, write_json
from videotune.job.overrides import Overrides
from videotune.runs.run_dir import read_run_config
from videotune.trainer.resume import Resume

Begun = Callable[..., Path]


def rates(run: Path) -> list[float]:
    return [line["lr"]["transformer"] for line in steps_of(run)]


def rename_clip(data: Path, clip: str, folder: Path, name: str = "") -> None:
    """Move a clip and its caption into another folder, or under another name."""
    for part, ending in (("videos", ".mp4"), ("captions", ".txt")):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (data / part / f"{clip}{ending}").rename(
            folder / part / f"{name or clip}{ending}"
        )


@pytest.fixture
def begun(work: Work) -> Callable[..., Path]:
    """A copy of a run of four steps, saved at each second one."""
    return lambda *sets: work.copy("steps=4", "save_every=2", *sets)


# ---- keys


def test_safe_keys_apply_at_once_and_are_reported(
    begun: Begun, finished: Finished, capfd: Printed
) -> None:
    run = begun()
    assert resume(run, "steps=8", "save_every=3") == DONE
    assert complete(run) == [2, 4, 6, 8]
    assert [line["step"] for line in of_kind(run, "save")] == [2, 4, 6, 8], (
        "each third step from now on, and the last"
    )
    assert_same_run(run, finished("steps=8", "save_every=2"), 8)
    (line,) = of_kind(run, "resume")
    assert line["changes"] == [
        "steps: 4 -> 8 (the rate is constant)",
        "save_every: 2 -> 3",
    ]
    kept = read_run_config(run)
    assert (
        kept["settings"]["save_every"],
        kept["steps"],
        kept["origins"]["save_every"],
    ) == (
        3,
        8,
        "user",
    )
    before = read_json(run / "before" / "config-until-step-4.json")
    assert (before["settings"]["save_every"], before["steps"]) == (2, 4)
    assert resume(run) == DONE, "and a plain resume keeps them"
    assert "8 steps are done already" in capfd.readouterr().err
    assert "changes" not in of_kind(run, "resume")[-1]


LEAVE = "Leave it as it was, or start a new run; --init-from starts from these weights"
ALLOWED = {"override": True, "data_change": True}


@pytest.mark.parametrize(
    ("changes", "allowed", "named"),
    [
        (
            ("learning_rate=0.02", "optimizer.weight_decay=0.5", "save_every=1"),
            {},
            (
                "learning_rate: 0.01 -> 0.02",
                "optimizer.weight_decay: 0.01 -> 0.5",
                "add --override",
            ),
        ),
        (
            ("steps=3",),
            {},
            ("cannot end at step 3. ", "steps 2, 4"),
        ),  # its export would hold weights of later ones
        (("lora.rank=4",), ALLOWED, ("lora.rank: 2 -> 4", LEAVE)),
        (("lora.variant=LOHA",), ALLOWED, ("lora.variant: 'LORA' -> 'LOHA'", LEAVE)),
        (("lora.alpha=1.0",), ALLOWED, ("lora.alpha: None -> 1.0", LEAVE)),
        (
            ("optimizer=ADAMW_8BIT",),
            ALLOWED,
            ("optimizer.name: 'ADAMW' -> 'ADAMW_8BIT'", LEAVE),
        ),
        (("seed=1",), ALLOWED, ("seed: 0 -> 1", LEAVE)),
        (("shuffle=false",), ALLOWED, ("shuffle: True -> False", LEAVE)),
        (
            ("training_method=FINE_TUNE",),
            ALLOWED,
            ("training_method: 'LORA' -> 'FINE_TUNE'", LEAVE),
        ),
        (
            ("batch_size=2",),
            ALLOWED,
            ("a step would have 2 samples instead of 1", LEAVE),
        ),
        (
            ("train_dtype=BFLOAT_16",),
            ALLOWED,
            ("train_dtype: 'FLOAT_32' -> 'BFLOAT_16'", LEAVE),
        ),
    ],
)
def test_what_the_saved_state_does_not_fit_is_refused_with_the_reason(
    changes: tuple[str, ...],
    allowed: dict[str, bool],
    named: tuple[str, ...],
    begun: Begun,
) -> None:
    """Only what must be allowed is named."""
    text = refusal(begun(), "steps=6", *changes, **allowed)
    assert [part in text for part in named] == [True] * len(named), text
    assert "save_every" not in text


def test_an_override_applies_at_the_very_next_step(
    begun: Begun, finished: Finished
) -> None:
    run, straight = begun(), finished("steps=6", "save_every=2")
    saved = {step: state(run, step) for step in (2, 4)}
    assert resume(run, "learning_rate=0.02", "steps=6", override=True) == DONE
    assert rates(run) == [0.01] * 4 + [0.02] * 2
    assert facts_of(run, 4) == facts_of(straight, 4)
    assert all(same_tensors(state(run, step), saved[step]) for step in (2, 4))
    assert [line["window_ids"] for line in steps_of(run)] == [
        line["window_ids"] for line in steps_of(straight)
    ]
    # AdamW's update is the rate times what the moments say, which are those of the
    # checkpoint
    ours, theirs, before = (
        state(folder, step) for folder, step in ((run, 6), (straight, 6), (run, 4))
    )
    name = next(
        name for name in ours if name.startswith("weights/") and "lora_B" in name
    )
    moved = [
        float((after[name] - before[name]).abs().mean()) for after in (ours, theirs)
    ]
    assert moved[0] / moved[1] == pytest.approx(2, rel=0.2)


OTHER = (
    "optimizer.weight_decay=0.9",
    "optimizer.beta1=0.1",
    "max_grad_norm=0.001",
    "caption_dropout=1",
)


@pytest.mark.parametrize("change", OTHER)
def test_each_kind_of_override_has_an_effect(
    change: str, begun: Begun, finished: Finished
) -> None:
    """An optimizer's numbers too, which a restored state must not bring back."""
    run, plain = begun(), finished("steps=6", "save_every=2")
    assert resume(run, change, "steps=6", override=True) == DONE
    assert not same_tensors(state(run, 6), state(plain, 6))
    assert same_tensors(state(run, 4), state(plain, 4))


def test_an_average_that_is_asked_for_later_begins_at_the_weights_of_then(
    begun: Begun,
) -> None:
    run = begun()
    assert resume(run, "ema.decay=0.5", "steps=5", override=True) == DONE
    ours, before = state(run, 5), state(run, 4)
    share = 1 - min(0.5, 6 / 15)
    for name in (name for name in ours if name.startswith("ema/")):
        weights = name.replace("ema/", "weights/")
        wanted = before[weights] + share * (ours[weights] - before[weights])
        assert float((ours[name] - wanted).abs().max()) < 1e-6
    assert resume(run, "ema.decay=null", "steps=6", override=True) == DONE
    assert not any(name.startswith("ema/") for name in state(run, 6))


def test_more_steps_under_a_falling_rate_need_the_override(begun: Begun) -> None:
    run = begun("learning_rate_scheduler=COSINE")
    assert (
        "steps: 4 -> 8 (the rate of a COSINE schedule depends on the number of steps)"
        in refusal(run, "steps=8")
    )
    assert resume(run, "steps=8", override=True) == DONE
    assert rates(run)[4] == pytest.approx(0.005), "half way of eight"
    assert rates(run)[:2] == pytest.approx([0.01, 0.01 * 0.8535534])


def test_epochs_may_be_given_instead_of_steps(begun: Begun) -> None:
    run = begun()
    assert resume(run, "epochs=1") == DONE
    assert len(steps_of(run)) == 6, "six windows, one a step"
    assert of_kind(run, "resume")[0]["changes"] == [
        "epochs: None -> 1.0 (the rate is constant)"
    ]
    assert read_run_config(run)["settings"]["steps"] == 6


def test_steps_may_be_given_instead_of_epochs(begun: Begun) -> None:
    """And intervals in passes, beside those in steps that they were begun with."""
    run = begun("epochs=0.5")
    assert len(steps_of(run)) == 3
    assert resume(run, "steps=6", "save_every=2", "save_every_epochs=0.5") == DONE
    assert len(steps_of(run)) == 6
    settings = read_run_config(run)["settings"]
    assert settings["epochs"] is None
    assert settings["save_every"] == 3, "half a pass, not the steps beside it"


def rename_preset(run: Path, preset: str | None) -> None:
    """Make a run that names a preset, or one of an earlier version, which names none."""
    content = read_json(run / "config.json")
    del content["digest"], content["preset"]
    if preset is not None:
        content["preset"] = preset
    write_json(run / "config.json", content | {"digest": digest(content)})


@pytest.mark.parametrize("preset", ["toy", None])
def test_a_resume_keeps_the_name_of_the_preset(
    begun: Begun, preset: str | None
) -> None:
    run = begun()
    rename_preset(run, preset)
    assert resume(run, "steps=6") == DONE
    assert read_run_config(run)["preset"] == preset


def test_another_split_of_a_step_agrees_to_rounding(work: Work) -> None:
    settings = ("save_every=3", "batch_size=4")
    run, straight = (
        shutil.copytree(work.finished("steps=3", *settings), work.run),
        work.finished("steps=6", *settings),
    )
    assert (
        resume(run, "steps=6", "batch_size=2", "gradient_accumulation_steps=2") == DONE
    )
    assert 0 <= largest_weight_difference(state(run, 6), state(straight, 6)) < 1e-3
    assert [line["window_ids"] for line in steps_of(run)] == [
        line["window_ids"] for line in steps_of(straight)
    ]


def test_another_split_of_a_step_is_refused_where_it_shows_other_samples(
    clips: Path, work: Work
) -> None:
    """Videos among images have batches of their own size, rounded from batch_size."""
    for grey, stem in enumerate(stems(clips)[:2]):
        pixels = np.full((64, 64, 3), 90 * grey, np.uint8)
        still = write_image(clips / f"{stem}-still.png", pixels)
        still.with_suffix(".txt").write_text("a still", encoding="utf-8")
    split = ("batch_size=3", "video_config.video_batch_size_multiplier=0.5")
    settings = ("steps=2", "save_every=2", *split, "gradient_accumulation_steps=2")
    assert train(work.overrides(*settings, data=clips), work.run) == DONE

    other = ("batch_size=6", "gradient_accumulation_steps=1", "steps=3")
    assert "batch_size: images and videos are mixed" in refusal(work.run, *other)
    assert resume(work.run, "steps=3") == DONE


def test_a_key_that_the_run_did_not_know_yet_is_no_change(begun: Begun) -> None:
    """A run that an older version began goes on with the default that holds today."""
    run = begun()
    kept = read_json(run / "config.json")
    for name in ("backup_every", "save_keep", "max_grad_norm"):
        del kept["settings"][name], kept["origins"][name]
    del kept["digest"]
    write_json(run / "config.json", kept | {"digest": digest(kept)})
    assert resume(run, "steps=5") == DONE
    assert of_kind(run, "resume")[0]["changes"] == [
        "steps: 4 -> 5 (the rate is constant)"
    ]


def test_a_changed_validation_set_is_reported_once_and_measured_at_once(
    begun: Begun,
) -> None:
    run = begun("validate_every=2")
    names = [line["validation"] for line in of_kind(run, "validation")]
    assert resume(run, "learning_rate=0.02", "steps=6", override=True) == DONE
    assert warnings_of(run) == []
    assert resume(run, "timestep_shift=1.5", "steps=8", override=True) == DONE
    losses = of_kind(run, "validation")
    assert [line["step"] for line in losses] == [0, 2, 4, 6, 6, 8], (
        "again at 6: the next one compares with it"
    )
    assert losses[-1]["validation"] == losses[-2]["validation"] != names[0]
    assert [line["validation"] for line in losses[:4]] == names[:1] * 4
    assert losses[4]["train"]["normalised"] == 1.0
    (warning,) = warnings_of(run)
    assert warning.startswith(
        "the validation set changed (its noise levels differ): validation losses from step 6 on"
    )
    assert resume(run, "steps=10") == DONE
    assert warnings_of(run) == [warning]


def test_a_clip_held_out_later_is_refused_or_changes_the_validation_set(
    clips: Path, work: Work, capfd: Printed
) -> None:
    """What was measured before compares with nothing that is measured after."""
    run, held = work.run, work.tmp / "held"
    assert train(work.overrides("steps=2", "validate_every=2", data=clips), run) == DONE
    rename_clip(clips, stems(clips)[0], held)
    rows = json.dumps([{"path": str(clips)}, {"path": str(held), "kind": "validation"}])
    assert "1 clip trained on before, now kept aside" in refusal(
        run, f"datasets={rows}", "steps=3"
    )
    assert "the validation set changed" not in capfd.readouterr().err
    assert resume(run, f"datasets={rows}", "steps=4", data_change=True) == DONE
    ((step, text),) = [(line["step"], line["text"]) for line in of_kind(run, "warning")]
    assert step == 2
    assert text.startswith("the validation set changed (")
    assert f"warning: {text}" in " ".join(capfd.readouterr().err.split())
    losses = of_kind(run, "validation")
    held_out = [(line["step"], line["held_out"] is not None) for line in losses]
    assert held_out == [(0, False), (2, False), (2, True), (4, True)]
    assert losses[1]["validation"] != losses[2]["validation"] == losses[3]["validation"]


# ---- the base model


def test_a_base_model_may_move_and_not_change(work: Work) -> None:
    settings, straight = (
        work.overrides("steps=2", "save_every=2"),
        work.finished("steps=4", "save_every=2"),
    )
    here, there, run = work.tmp / "here", work.tmp / "there", work.run
    shutil.copytree(read_run_config(straight)["settings"]["base_model_name"], here)
    assert (
        train(
            Overrides(
                data=settings.data, sets=(*settings.sets, f"base_model_name={here}")
            ),
            run,
        )
        == DONE
    )
    here.rename(there)
    assert "here" in refusal(run, "steps=4")
    assert resume(run, f"base_model_name={there}", "steps=4") == DONE
    assert facts_of(run) == facts_of(straight)
    assert read_run_config(run)["base"]["name"] == str(there)
    weights = there / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "base model" in refusal(run, "steps=5")


# ---- the clips


def stems(data: Path) -> list[str]:
    return sorted(path.stem for path in (data / "videos").iterdir())


def edit(data: Path, what: str) -> str:
    """Change the clips; what the refusal must say of it."""
    clip, other = stems(data)[1], stems(data)[2]
    video, caption = data / "videos" / f"{clip}.mp4", data / "captions" / f"{clip}.txt"
    match what:
        case "added":
            film = (data / "videos" / f"{other}.mp4").read_bytes()
            (data / "videos" / "zz-new.mp4").write_bytes(
                film + b"\0"
            )  # other bytes, the same pictures
            (data / "captions" / "zz-new.txt").write_text("a new one")
            return "1 clip added (zz-new.mp4)"
        case "removed":
            video.unlink()
            caption.unlink()
            return f"1 clip removed ({clip}.mp4)"
        case "caption":
            caption.write_text("quite another caption")
            return f"1 clip with another caption ({clip}.mp4)"
        case "bytes":
            video.write_bytes(video.read_bytes() + b"\0")
            return f"1 clip with other bytes under the same name ({clip}.mp4)"
    rename_clip(data, clip, data, "zz-last")
    return "1 clip renamed (zz-last.mp4)"


@pytest.fixture(scope="module")
def nine(
    small_clips: Path, overrides: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of nine steps, on clips that lie beside it."""
    home = tmp_path_factory.mktemp("nine")
    data = shutil.copytree(
        small_clips, home / "data", ignore=shutil.ignore_patterns(".videotune-cache")
    )
    assert (
        train(
            overrides("steps=9", "save_every=3", "caption_dropout=0", data=data),
            home / "run",
        )
        == DONE
    )
    return home


@pytest.mark.parametrize("what", ["added", "removed", "caption", "bytes", "renamed"])
def test_changed_clips_are_named_and_refused_unless_allowed(
    what: str, nine: Path, tmp_path: Path
) -> None:
    run, data, clips = (
        shutil.copytree(nine / "run", tmp_path / "run"),
        nine / "data",
        tmp_path / "clips",
    )
    shutil.copytree(data, clips)
    saved, facts, named = state(run, 9), facts_of(run), edit(data, what)
    text = refusal(run, "steps=21", override=True)
    assert named in text
    assert "continue with the changed data: --allow-data-change" in text
    assert resume(run, "steps=21", data_change=True) == DONE
    assert facts_of(run, 9) == facts
    assert same_tensors(state(run, 9), saved)
    assert any(named in text for text in of_kind(run, "resume")[0]["changes"])
    counts_agree(run, 21)
    if what == "added":
        new = next(
            clip
            for clip in read_json(run / "check.json")["clips"]
            if clip["path"].endswith("zz-new.mp4")
        )
        assert new["views"] > 0
    for name in ("config", "check", "plan"):
        assert (run / "before" / f"{name}-until-step-9.json").is_file()
    assert len(read_json(run / "before" / "check-until-step-9.json")["clips"]) == 6
    shutil.rmtree(data)
    shutil.copytree(clips, data)


def counts_agree(run: Path, steps: int) -> None:
    """Views that the account promised are those that the journal counts: what had been,
    and the new stream.
    """
    shown = Counter(name for line in steps_of(run) for name in line["window_ids"])
    assert sum(shown.values()) == steps
    job = open_run(Overrides(), run, Resume()).job
    promised = job.exposure(steps)
    now = {window.id for window in job.library.windows}
    views = {name: count for name, count in shown.items() if name in now}
    assert views == {name: count for name, count in promised.windows.items() if count}
    by_clip = {
        clip["id"]: clip["views"]
        for clip in read_json(run / "check.json")["clips"]
        if clip["used"]
    }
    assert by_clip == dict(promised.clips)
    planned = read_json(run / "plan.json")["views"]
    assert planned["per_window"]["max"] == max(promised.windows.values())
    assert min(planned["steps_for"].values()) >= job.view_history.step, (
        "no step of which nothing is known any more"
    )
    assert job.views_at(steps) == pytest.approx(sum(views.values()) / len(now), abs=1)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert all(
        Path(clip["path"]).name in page
        for clip in read_json(run / "check.json")["clips"]
    )


def test_clips_may_move_and_an_edit_of_moved_clips_is_refused(
    clips: Path, work: Work
) -> None:
    run, straight, moved = work.run, work.tmp / "straight", work.tmp / "moved"
    assert (
        train(work.overrides("steps=8", "save_every=4", data=clips), straight) == DONE
    )
    assert train(work.overrides("steps=4", "save_every=4", data=clips), run) == DONE
    clips.rename(moved)
    assert "data" in refusal(run, "steps=8")
    assert (
        train(Overrides(data=str(moved), sets=("steps=8",)), run, resume=Resume())
        == DONE
    )
    assert_same_run(run, straight, 8)
    assert read_run_config(run)["data"] == read_run_config(straight)["data"]
    named = edit(moved, "caption")
    with pytest.raises(VideotuneError) as caught:
        train(Overrides(data=str(moved)), straight, resume=Resume())
    assert f"since it started: {named}. Restore it" in str(caught.value)


def test_a_key_of_the_data_is_judged_by_what_it_changes(
    clips: Path, work: Work
) -> None:
    head = ("video_config.windows=head", "video_config.frames=9")
    run = work.train("steps=2", data=clips)
    assert "clips, their windows or how they are shown differ" in refusal(
        run, "steps=3", *head, override=True
    )
    assert resume(run, "steps=3", "missing_caption=skip") == DONE, (
        "every clip has a caption: nothing differs"
    )
    assert resume(run, "steps=12", *head, data_change=True) == DONE
    assert "+9x32x32" in steps_of(run)[-1]["window_ids"][0]
    counts_agree(run, 12)


def test_data_that_changes_twice_with_a_rollback_between(
    clips: Path, work: Work
) -> None:
    """What was seen before each change is counted from the journal; a rollback forgets
    the later change.
    """
    run = work.train("steps=6", "save_every=3", "caption_dropout=0", data=clips)
    for what, steps in (("removed", 12), ("added", 18)):
        edit(clips, what)
        assert resume(run, f"steps={steps}", data_change=True) == DONE
        counts_agree(run, steps)
    assert read_run_config(run)["past"]["step"] == 12
    assert "1 clip added" in refusal(run, "steps=18", step=9)
    assert resume(run, "steps=15", step=9, data_change=True) == DONE
    assert read_run_config(run)["past"]["step"] == 9
    counts_agree(run, 15)


def test_the_first_command_with_resume_added_changes_nothing(
    work: Work, capsys: Printed
) -> None:
    """A preset, clips and settings that are the run's own are no change, also where
    they were left open and then frozen.
    """
    run, plain = work.run, work.overrides("steps=2")
    sets = (
        *(text for text in plain.sets if not text.startswith("base_model_name")),
        "epochs=2",
        "steps=null",
    )
    command = Overrides(
        preset="toy",
        data=plain.data,
        sets=(*sets, "save_every=2", "sample.steps=1", "batch_size=2"),
    )
    assert train(command, run) == DONE
    before = (run / "config.json").read_bytes()
    capsys.readouterr()
    assert train(command, run, resume=Resume()) == DONE
    assert "changed" not in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before
    with pytest.raises(VideotuneError, match="cannot be resumed with another"):
        train(Overrides(preset="toy"), run, resume=Resume())


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("there", [True, False])
def test_the_first_command_resumes_also_when_it_began_with_a_file(
    there: bool, work: Work
) -> None:
    """The file is not read again, so it need not be there; another one is refused."""
    file, settings = work.tmp / "file.safetensors", work.overrides("steps=2")
    shutil.copy(work.finished("steps=3") / "export" / "run-step-3.safetensors", file)
    begin = ("--init-from", str(file))
    assert start(settings, work.run, *begin).ended() == DONE
    before = state(work.run, 2)
    if not there:
        file.unlink()
    running = start(settings, work.run, *begin, "--resume")
    assert running.ended() == DONE, running.stderr
    assert "init_from is not read again" in running.stderr
    assert "changed:" not in running.stderr
    assert same_tensors(state(work.run, 2), before)
    other = start(
        settings,
        work.run,
        "--init-from",
        str(work.tmp / "other.safetensors"),
        "--resume",
    )
    assert other.ended() == FAILED
