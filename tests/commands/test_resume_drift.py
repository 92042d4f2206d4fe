"""What may differ when a run goes on: taken, asked for by name, or refused, and always told."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.safety_kit import equal, facts_of, furthest, of_kind, start, state, steps_of, warnings_of
from tests.runs import open_run
from tests.shell import train
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import digest, read_json, write_json
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import read_run_config

Say = Callable[..., Overrides]


def complete(run: Path) -> list[int]:
    return [one.step for one in complete_checkpoints(run)]


def rates(run: Path) -> list[float]:
    return [line["lr"]["transformer"] for line in steps_of(run)]


def files(run: Path) -> dict[str, bytes]:
    """What a refusal must leave alone."""
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "heartbeat.json"}


def going_on(run: Path, *sets: str, **allowed: bool) -> int:
    return train(Overrides(sets=sets), run, resume=Resume(**allowed))


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of four steps that tests copy instead of making them again."""
    return {}


@pytest.fixture
def begun(
    first: dict[str, Path], said: Say, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A copy of a run of four steps, saved at each second one."""

    def make(*sets: str) -> Path:
        name = " ".join(sets)
        if name not in first:
            first[name] = tmp_path_factory.mktemp("begun") / "run"
            assert train(said("steps=4", "save_every=2", *sets), first[name]) == DONE
        return shutil.copytree(first[name], tmp_path / "run")

    return make


# ---- keys


def test_safe_keys_take_effect_at_once_and_are_told(begun: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    run, straight = begun(), tmp_path / "straight"
    assert train(said("steps=8", "save_every=2"), straight) == DONE
    assert going_on(run, "steps=8", "save_every=3") == DONE
    assert complete(run) == [2, 4, 6, 8]
    assert [line["step"] for line in of_kind(run, "save")] == [2, 4, 6, 8], "each third step from now on, and the last"
    assert facts_of(run) == facts_of(straight)
    assert equal(state(run, 8), state(straight, 8))
    (line,) = of_kind(run, "resume")
    assert line["changes"] == ["steps: 4 -> 8 (the rate is constant)", "save_every: 2 -> 3"]
    kept = read_run_config(run)
    assert (kept["settings"]["save_every"], kept["steps"], kept["origins"]["save_every"]) == (3, 8, "user")
    before = read_json(run / "before" / "config-until-step-4.json")
    assert (before["settings"]["save_every"], before["steps"]) == (2, 4)
    assert going_on(run) == DONE, "and a plain resume keeps them"
    assert "changes" not in of_kind(run, "resume")[-1]


def test_what_changes_learning_is_refused_without_a_word_for_it_and_nothing_is_touched(
    begun: Callable[..., Path],
) -> None:
    run = begun()
    before = files(run)
    with pytest.raises(VideotuneError) as caught:
        going_on(run, "learning_rate=0.02", "optimizer.weight_decay=0.5", "save_every=1", "steps=6")
    text = str(caught.value)
    assert "learning_rate: 0.01 -> 0.02" in text
    assert "optimizer.weight_decay: 0.01 -> 0.5" in text
    assert "save_every" not in text, "only what is asked about"
    assert text.endswith("If that is meant, add --override")
    assert files(run) == before


def test_an_override_takes_effect_at_the_very_next_step(begun: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    run, straight = begun(), tmp_path / "straight"
    saved = {step: state(run, step) for step in (2, 4)}
    assert train(said("steps=6", "save_every=2"), straight) == DONE
    assert going_on(run, "learning_rate=0.02", "steps=6", override=True) == DONE
    assert rates(run) == [0.01] * 4 + [0.02] * 2
    assert facts_of(run, 4) == facts_of(straight, 4)
    assert all(equal(state(run, step), saved[step]) for step in (2, 4))
    assert [line["window_ids"] for line in steps_of(run)] == [line["window_ids"] for line in steps_of(straight)]
    # AdamW's update is the rate times what the moments say, which are those of the checkpoint
    ours, theirs, before = (state(folder, step) for folder, step in ((run, 6), (straight, 6), (run, 4)))
    name = next(name for name in ours if name.startswith("weights/") and "lora_B" in name)
    moved = [float((after[name] - before[name]).abs().mean()) for after in (ours, theirs)]
    assert moved[0] / moved[1] == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize(
    "change", ["optimizer.weight_decay=0.9", "optimizer.beta1=0.1", "max_grad_norm=0.001", "caption_dropout=1"]
)
def test_each_kind_of_override_is_felt(change: str, begun: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    """An optimizer's numbers too, which a restored state must not bring back."""
    run, plain = begun(), tmp_path / "plain"
    shutil.copytree(run, plain)
    assert going_on(run, change, "steps=6", override=True) == DONE
    assert going_on(plain, "steps=6") == DONE
    assert not equal(state(run, 6), state(plain, 6))
    assert equal(state(run, 4), state(plain, 4))


def test_an_average_that_is_asked_for_later_begins_at_the_weights_of_then(begun: Callable[..., Path]) -> None:
    run = begun()
    assert going_on(run, "ema.decay=0.5", "steps=5", override=True) == DONE
    ours, before = state(run, 5), state(run, 4)
    share = 1 - min(0.5, 6 / 15)
    for name in (name for name in ours if name.startswith("ema/")):
        weights = name.replace("ema/", "weights/")
        wanted = before[weights] + share * (ours[weights] - before[weights])
        assert float((ours[name] - wanted).abs().max()) < 1e-6
    assert going_on(run, "ema.decay=null", "steps=6", override=True) == DONE
    assert not any(name.startswith("ema/") for name in state(run, 6))


def test_more_steps_under_a_falling_rate_need_the_word(begun: Callable[..., Path]) -> None:
    run = begun("learning_rate_scheduler=COSINE")
    words = r"steps: 4 -> 8 \(the rate of a COSINE schedule depends on the number of steps\)\n.*add --override"
    with pytest.raises(VideotuneError, match=words):
        going_on(run, "steps=8")
    assert going_on(run, "steps=8", override=True) == DONE
    assert rates(run)[4] == pytest.approx(0.005), "half way of eight"
    assert rates(run)[:2] == pytest.approx([0.01, 0.01 * 0.8535534])


def test_epochs_may_be_given_instead_of_steps(begun: Callable[..., Path]) -> None:
    run = begun()
    assert going_on(run, "epochs=1") == DONE
    assert len(steps_of(run)) == 6, "six windows, one a step"
    assert of_kind(run, "resume")[0]["changes"] == ["epochs: None -> 1.0 (the rate is constant)"]
    assert read_run_config(run)["settings"]["steps"] == 6


def test_fewer_steps_than_are_done_are_refused(begun: Callable[..., Path]) -> None:
    """An export of them would hold weights of later ones."""
    run = begun()
    before = files(run)
    with pytest.raises(VideotuneError, match=r"goes on from step 4 and cannot end at step 3; .* --from: .* steps 2, 4"):
        going_on(run, "steps=3")
    assert files(run) == before
    assert train(Overrides(sets=("steps=3",)), run, resume=Resume(step=2)) == DONE
    assert complete(run) == [2, 3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("lora.rank=4", "lora.rank: 2 -> 4"),
        ("lora.alpha=1.0", "lora.alpha: None -> 1.0"),
        ("optimizer=ADAMW_8BIT", "optimizer.name: 'ADAMW' -> 'ADAMW_8BIT'"),
        ("seed=1", "seed: 0 -> 1"),
        ("shuffle=false", "shuffle: True -> False"),
        ("training_method=FINE_TUNE", "training_method: 'LORA' -> 'FINE_TUNE'"),
        ("batch_size=2", "a step would have 2 samples instead of 1: which windows it shows follows from that"),
        ("train_dtype=BFLOAT_16", "train_dtype: 'FLOAT_32' -> 'BFLOAT_16'"),
    ],
)
def test_what_the_saved_state_does_not_fit_is_refused_with_the_reason(
    change: str, why: str, begun: Callable[..., Path]
) -> None:
    run = begun()
    before = files(run)
    with pytest.raises(VideotuneError) as caught:
        going_on(run, change, "steps=6", override=True, data_change=True)
    assert why in str(caught.value)
    assert "Leave it as it was, or start a new run; --init-from takes weights over" in str(caught.value)
    assert files(run) == before


def test_another_split_of_a_step_goes_on_and_agrees_to_rounding(said: Say, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = said("steps=3", "save_every=3", "batch_size=4")
    assert train(words, run) == DONE
    shutil.copytree(run, straight)
    assert going_on(straight, "steps=6") == DONE
    assert going_on(run, "steps=6", "batch_size=2", "gradient_accumulation_steps=2") == DONE
    assert 0 <= furthest(state(run, 6), state(straight, 6)) < 1e-3
    assert [line["window_ids"] for line in steps_of(run)] == [line["window_ids"] for line in steps_of(straight)]


def test_a_key_that_the_run_did_not_know_yet_is_no_change(begun: Callable[..., Path]) -> None:
    """A run that an older version began goes on with the default that holds today."""
    run = begun()
    kept = read_json(run / "config.json")
    for name in ("backup_every", "save_keep", "max_grad_norm"):
        del kept["settings"][name], kept["origins"][name]
    del kept["digest"]
    write_json(run / "config.json", kept | {"digest": digest(kept)})
    assert going_on(run, "steps=5") == DONE
    assert of_kind(run, "resume")[0]["changes"] == ["steps: 4 -> 5 (the rate is constant)"]


def test_a_ruler_that_is_another_one_is_told_and_read_at_once(begun: Callable[..., Path]) -> None:
    run = begun("validate_every=2")
    names = [line["ruler"] for line in of_kind(run, "ruler")]
    assert len(set(names)) == 1
    assert going_on(run, "timestep_shift=1.5", "steps=6", override=True) == DONE
    readings = of_kind(run, "ruler")
    assert [line["step"] for line in readings] == [0, 2, 4, 4, 6], (
        "again at 4: there is what the next one compares with"
    )
    assert readings[-1]["ruler"] == readings[-2]["ruler"] != names[0]
    assert readings[3]["train"]["normalised"] == 1.0
    told = [text for text in warnings_of(run) if "the validation set changed" in text]
    assert told == [
        "the validation set changed (its noise levels differ): validation losses from step 4 on compare with each "
        "other alone"
    ]
    assert going_on(run, "steps=8") == DONE
    assert len([text for text in warnings_of(run) if "the validation set changed" in text]) == 1, "said once"


def test_other_held_out_clips_are_another_ruler_in_the_journal_and_on_the_screen(
    small_clips: Path, said: Say, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A clip is held out from now on: nothing read of it compares with what was read before."""
    run, library = tmp_path / "run", shutil.copytree(small_clips, tmp_path / "data")
    assert train(said("steps=2", "validate_every=2", data=library), run) == DONE
    held, clip = tmp_path / "held", stems(library)[0]
    for folder, ending in (("videos", ".mp4"), ("captions", ".txt")):
        (held / folder).mkdir(parents=True)
        (library / folder / f"{clip}{ending}").rename(held / folder / f"{clip}{ending}")
    rows = json.dumps([{"path": str(library)}, {"path": str(held), "kind": "validation"}])
    assert "the validation set changed" not in capfd.readouterr().err
    assert going_on(run, f"datasets={rows}", "steps=4", data_change=True) == DONE
    ((step, told),) = [(line["step"], line["text"]) for line in of_kind(run, "warning")]
    assert step == 2
    assert told.startswith("the validation set changed (")
    assert told.endswith("validation losses from step 2 on compare with each other alone")
    assert f"warning: {told}" in " ".join(capfd.readouterr().err.split())
    readings = of_kind(run, "ruler")
    assert [(line["step"], line["held_out"] is None) for line in readings] == [
        (0, True),
        (2, True),
        (2, False),
        (4, False),
    ]
    assert readings[1]["ruler"] != readings[2]["ruler"] == readings[3]["ruler"]


def test_a_ruler_that_is_the_same_is_not_told(begun: Callable[..., Path]) -> None:
    run = begun("validate_every=2")
    assert going_on(run, "learning_rate=0.02", "steps=6", override=True) == DONE
    assert warnings_of(run) == []
    assert [line["step"] for line in of_kind(run, "ruler")] == [0, 2, 4, 6]


# ---- the base model


def test_a_base_model_that_has_moved_is_named_and_goes_on(said: Say, tmp_path: Path) -> None:
    words = said("steps=4", "save_every=2")
    place = next(text.partition("=")[2] for text in words.sets if text.startswith("base_model_name="))
    here, there, straight, run = tmp_path / "here", tmp_path / "there", tmp_path / "straight", tmp_path / "run"
    shutil.copytree(place, here)
    assert train(Overrides(data=words.data, sets=(*words.sets, f"base_model_name={here}")), straight) == DONE
    assert train(Overrides(data=words.data, sets=(*words.sets, f"base_model_name={here}", "steps=2")), run) == DONE
    here.rename(there)
    with pytest.raises(VideotuneError, match="here"):
        going_on(run, "steps=4")
    assert going_on(run, f"base_model_name={there}", "steps=4") == DONE
    assert facts_of(run) == facts_of(straight)
    assert read_run_config(run)["base"]["name"] == str(there)
    weights = there / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(VideotuneError, match=r"the base model of .* has changed since it started"):
        going_on(run, "steps=5")


# ---- the clips


@pytest.fixture
def library(small_clips: Path, tmp_path: Path) -> Path:
    """Clips of this test's own."""
    return shutil.copytree(small_clips, tmp_path / "data", ignore=shutil.ignore_patterns(".videotune-cache"))


def stems(data: Path) -> list[str]:
    return sorted(path.stem for path in (data / "videos").iterdir())


def edit(data: Path, what: str) -> str:
    """Change the clips; what the refusal must say of it."""
    clip, other = stems(data)[1], stems(data)[2]
    video, caption = data / "videos" / f"{clip}.mp4", data / "captions" / f"{clip}.txt"
    match what:
        case "added":
            film = (data / "videos" / f"{other}.mp4").read_bytes()
            (data / "videos" / "zz-new.mp4").write_bytes(film + b"\0")  # other bytes, the same pictures
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
        case "renamed":
            video.rename(video.with_stem("zz-last"))
            caption.rename(caption.with_stem("zz-last"))
            return "1 clip renamed (zz-last.mp4)"
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["added", "removed", "caption", "bytes", "renamed"])
def test_clips_that_have_changed_are_told_refused_and_allowed_by_name(
    what: str, library: Path, said: Say, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(said("steps=9", "save_every=3", "caption_dropout=0", data=library), run) == DONE
    saved, facts, words = state(run, 9), facts_of(run), edit(library, what)
    before = files(run)
    with pytest.raises(VideotuneError) as caught:
        going_on(run, "steps=21", override=True)
    assert words in str(caught.value)
    assert "go on with it by name: --allow-data-change" in str(caught.value)
    assert files(run) == before
    assert going_on(run, "steps=21", data_change=True) == DONE
    assert facts_of(run, 9) == facts
    assert equal(state(run, 9), saved)
    assert any(words in text for text in of_kind(run, "resume")[0]["changes"])
    counts_agree(run, 21)
    if what == "added":
        new = next(clip for clip in read_json(run / "check.json")["clips"] if clip["path"].endswith("zz-new.mp4"))
        assert new["views"] > 0
    for name in ("config", "check", "plan"):
        assert (run / "before" / f"{name}-until-step-9.json").is_file()
    was = [Path(clip["path"]).stem for clip in read_json(run / "before" / "check-until-step-9.json")["clips"]]
    assert len(was) == 6
    assert going_on(run, "steps=24") == DONE, "what was allowed is what the run is now"
    counts_agree(run, 24)


def counts_agree(run: Path, steps: int) -> None:
    """Views that the account promised are those that the journal counts: what had been, and the new stream."""
    shown = Counter(name for line in steps_of(run) for name in line["window_ids"])
    assert sum(shown.values()) == steps
    job = open_run(Overrides(), run, Resume()).job
    promised = job.exposure(steps)
    now = {window.id for window in job.library.windows}
    assert {name: count for name, count in shown.items() if name in now} == {
        name: count for name, count in promised.windows.items() if count
    }
    by_clip = {clip["id"]: clip["views"] for clip in read_json(run / "check.json")["clips"] if clip["used"]}
    assert by_clip == dict(promised.clips)
    planned = read_json(run / "plan.json")["views"]
    assert planned["per_window"]["max"] == max(promised.windows.values())
    assert min(planned["steps_for"].values()) >= job.past.step, "no step of which nothing is known any more"
    kept = sum(count for name, count in shown.items() if name in now)
    assert job.views_at(steps) == pytest.approx(kept / len(now), abs=1)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert all(Path(clip["path"]).name in page for clip in read_json(run / "check.json")["clips"])


def test_a_folder_of_clips_that_has_moved_is_no_change_of_the_data(library: Path, said: Say, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert train(said("steps=8", "save_every=4", data=library), straight) == DONE
    assert train(said("steps=4", "save_every=4", data=library), run) == DONE
    library.rename(tmp_path / "moved")
    with pytest.raises(VideotuneError, match="data"):
        going_on(run, "steps=8")
    words = Overrides(data=str(tmp_path / "moved"), sets=("steps=8",))
    assert train(words, run, resume=Resume()) == DONE
    assert facts_of(run) == facts_of(straight)
    assert equal(state(run, 8), state(straight, 8))
    assert read_run_config(run)["data"] == read_run_config(straight)["data"]


def test_moved_and_edited_is_told_as_what_was_edited(library: Path, said: Say, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(said("steps=2", data=library), run) == DONE
    words = edit(library, "caption")
    library.rename(tmp_path / "moved")
    with pytest.raises(VideotuneError) as caught:
        train(Overrides(data=str(tmp_path / "moved")), run, resume=Resume())
    assert f"since it started: {words}. Put it back" in str(caught.value)


def test_a_key_that_decides_what_is_trained_on_is_judged_by_what_it_does(
    library: Path, said: Say, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(said("steps=2", data=library), run) == DONE
    with pytest.raises(VideotuneError, match="clips, their windows or how they are shown differ"):
        going_on(run, "steps=3", "video_config.windows=head", "video_config.frames=9", override=True)
    assert going_on(run, "steps=3", "missing_caption=skip") == DONE, "every clip has a caption: nothing differs"
    assert going_on(run, "steps=12", "video_config.windows=head", "video_config.frames=9", data_change=True) == DONE
    assert "+9x32x32" in steps_of(run)[-1]["window_ids"][0]
    counts_agree(run, 12)


def test_data_that_changes_twice_and_going_back_between(library: Path, said: Say, tmp_path: Path) -> None:
    """What was shown before each change is counted from the journal; going back forgets the later change."""
    run = tmp_path / "run"
    assert train(said("steps=6", "save_every=3", "caption_dropout=0", data=library), run) == DONE
    edit(library, "removed")
    assert going_on(run, "steps=12", data_change=True) == DONE
    counts_agree(run, 12)
    edit(library, "added")
    assert going_on(run, "steps=18", data_change=True) == DONE
    counts_agree(run, 18)
    assert read_run_config(run)["past"]["step"] == 12
    with pytest.raises(VideotuneError, match="1 clip added"):
        train(Overrides(sets=("steps=18",)), run, resume=Resume(step=9))
    assert train(Overrides(sets=("steps=15",)), run, resume=Resume(step=9, data_change=True)) == DONE
    assert read_run_config(run)["past"]["step"] == 9
    counts_agree(run, 15)


def test_a_clip_that_was_trained_on_and_is_now_held_out_is_told(library: Path, said: Say, tmp_path: Path) -> None:
    run, words = tmp_path / "run", said("steps=2")
    assert train(Overrides(data=str(library), sets=words.sets), run) == DONE
    held, clip = tmp_path / "held", stems(library)[0]
    for folder, ending in (("videos", ".mp4"), ("captions", ".txt")):
        (held / folder).mkdir(parents=True)
        (library / folder / f"{clip}{ending}").rename(held / folder / f"{clip}{ending}")
    rows = [{"path": str(library)}, {"path": str(held), "kind": "validation"}]
    with pytest.raises(VideotuneError, match="1 clip trained on before, now held out: the ruler is no longer blind"):
        going_on(run, f"datasets={json.dumps(rows)}", "steps=3")


def test_the_first_command_goes_on_with_resume_added(
    said: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset, clips and settings that are the run's own are no change, also where they were left open and then frozen."""
    run, plain = tmp_path / "run", said("steps=2")
    sets = (*(text for text in plain.sets if not text.startswith("base_model_name")), "epochs=2", "steps=null")
    words = Overrides(preset="toy", data=plain.data, sets=(*sets, "save_every=2", "sample.steps=1", "batch_size=2"))
    assert train(words, run) == DONE
    before = (run / "config.json").read_bytes()
    capsys.readouterr()
    assert train(words, run, resume=Resume()) == DONE
    assert "changed" not in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before
    with pytest.raises(VideotuneError, match="cannot be resumed with another"):
        train(Overrides(preset="toy"), run, resume=Resume())


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("there", [True, False])
def test_the_first_command_goes_on_although_it_began_with_a_file(there: bool, said: Say, tmp_path: Path) -> None:
    """The file is not read again, so it need not be there; another one is refused."""
    assert train(said("steps=1"), tmp_path / "first") == DONE
    file = next((tmp_path / "first" / "export").glob("*.safetensors"))
    words = ("--init-from", str(file))
    assert start(said("steps=2"), tmp_path / "run", *words).ended() == DONE
    before = state(tmp_path / "run", 2)
    if not there:
        file.unlink()
    running = start(said("steps=2"), tmp_path / "run", *words, "--resume")
    assert running.ended() == DONE, running.said
    assert "init_from is not read again" in running.said
    assert "changed:" not in running.said
    assert equal(state(tmp_path / "run", 2), before)
    other = start(said("steps=2"), tmp_path / "run", "--init-from", str(tmp_path / "other.safetensors"), "--resume")
    assert other.ended() == FAILED
