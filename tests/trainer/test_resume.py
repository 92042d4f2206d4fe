"""Which checkpoint a resume takes, which settings may differ, and what it reports."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.run_results import of_kind, steps_of
from tests.support.trainers import Lab, overrides_of, trainer_of
from videotune.config.config_changes import Change
from videotune.config.resolve import family_defaults
from videotune.errors import VideotuneError
from videotune.files import digest, hash_file, read_json
from videotune.job.job import Job, ViewHistory
from videotune.job.overrides import Overrides
from videotune.planner.plan import make_plan
from videotune.runs.journal import History
from videotune.runs.rollback import RUN_RECORDS, kept_before, record_paths_at
from videotune.runs.run_dir import SCHEDULER, read_run_config, versions
from videotune.trainer.loop import train_loop
from videotune.trainer.progress import announce
from videotune.trainer.restoring import restore
from videotune.trainer.resume import (
    OpenedRun,
    Resume,
    changed_around,
    check_changes,
    checkpoint_of,
    count_views,
    open_run,
    read_run_records,
    with_overrides,
)
from videotune.trainer.setup import build_trainer
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import callbacks_of

STEPS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> Lab:
    """A lab with a copy of the clips and a finished run that saved every two steps."""
    tmp = tmp_path_factory.mktemp("resume")
    clips = shutil.copytree(small_clips, tmp / "clips")
    lab = Lab(Path("asset:toy"), clips, tmp / "cache", tmp)
    trainer = trainer_of(lab, {"steps": STEPS, "save_every": 2})
    announce(trainer, None)
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    return lab


@pytest.fixture
def run(trained: Lab, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(trained.open[0].run, tmp_path / "run")


class Fit:
    """Chooses no memory settings, and notes whether it was to choose again."""

    def __init__(self, *changes: str) -> None:
        self.changes = changes
        self.again: list[bool] = []

    def __call__(self, job: Job, again: bool) -> tuple[Job, Sequence[str]]:
        self.again.append(again)
        return job, self.changes


def resumed(run: Path, *sets: str, fit: Fit | None = None, **resume: Any) -> OpenedRun:
    return open_run(Overrides(sets=sets), run, Resume(**resume), fit or Fit())


def test_a_run_goes_on_after_the_checkpoint_that_is_named(run: Path) -> None:
    newest = resumed(run)
    assert newest.checkpoint is not None
    assert (newest.checkpoint.step, newest.first_step) == (4, 5)
    assert newest.changes == ()
    assert newest.history is not None
    assert newest.history.last_step == STEPS
    assert newest.job.view_history.step == 0
    second = resumed(run, step=2)
    assert second.checkpoint is not None
    assert (second.checkpoint.step, second.first_step) == (2, 3)
    assert (resumed(run, step=0).checkpoint, resumed(run, step=0).first_step) == (
        None,
        1,
    )
    shutil.rmtree(run / "checkpoints" / "step-4")
    with pytest.raises(VideotuneError, match=r"step 4, is not complete.*--from 2"):
        resumed(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(VideotuneError, match="step 4, is not complete"):
        resumed(run)


def test_a_new_run_has_one_process_and_a_folder_of_its_own(
    trained: Lab, tmp_path: Path, run: Path
) -> None:
    overrides = overrides_of(trained, {"steps": STEPS})
    fit = Fit("chosen")
    opened = open_run(overrides, tmp_path / "new", None, fit)
    assert opened == OpenedRun(opened.job)
    assert opened.job.processes == 1
    assert fit.again == [False]
    with pytest.raises(VideotuneError, match=str(run)):
        open_run(overrides, run, None, fit)
    with pytest.raises(VideotuneError, match=r"clips"):
        open_run(overrides, trained.clips / "run", None, fit)


def test_a_run_that_began_in_several_processes_keeps_their_number(run: Path) -> None:
    content = read_run_config(run) | {"processes": 2}
    write_config(run, content)
    assert resumed(run).job.processes == 2
    del content["processes"]  # as earlier versions wrote it
    write_config(run, content)
    assert resumed(run).job.processes == 1


def test_what_was_shown_before_the_data_changed_is_in_the_config(run: Path) -> None:
    past = {"step": 2, "views": {"a window": 3}}
    write_config(run, read_run_config(run) | {"past": past})
    assert resumed(run).job.view_history == ViewHistory(2, {"a window": 3})


def write_config(run: Path, content: dict[str, Any]) -> None:
    """Write config.json as a run does: with its digest."""
    content = {name: value for name, value in content.items() if name != "digest"}
    whole = content | {"digest": digest(content)}
    (run / "config.json").write_text(json.dumps(whole))


def test_memory_settings_are_chosen_again_where_it_is_asked_for(run: Path) -> None:
    fit = Fit("memory: less")
    assert resumed(run, fit=fit).changes == ("memory: less",)
    assert resumed(run, fit=fit, replan=True).changes == ("memory: less",)
    assert fit.again == [False, True]


def test_a_run_cannot_end_before_its_checkpoint(run: Path) -> None:
    allowed = {"override": True}
    assert resumed(run, "steps=4", **allowed).changes == ()
    (change,) = resumed(run, "steps=2", step=2, **allowed).changes
    assert change.startswith("steps")
    with pytest.raises(VideotuneError, match=r"^steps: .* from step 4 .* at step 3"):
        resumed(run, "steps=3", **allowed)


def test_a_change_of_what_is_learnt_must_be_allowed(run: Path) -> None:
    with pytest.raises(VideotuneError, match="--override"):
        resumed(run, "learning_rate=0.5")
    (change,) = resumed(run, "learning_rate=0.5", override=True).changes
    assert change.startswith("learning_rate: ")


def test_changes_are_told_and_the_weights_are_the_checkpoint_s(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that began with the weights of another one is resumed with the same words."""
    config = read_run_config(run)
    config["settings"]["init_from"] = "/elsewhere"
    write_config(run, config)
    opened = resumed(run, "save_every=3", "init_from=/elsewhere", step=2)
    lines = "".join(capsys.readouterr()).splitlines()
    (change,) = opened.changes
    assert change.startswith("save_every: 2 -> 3")
    assert lines[0] == f"changed: {change}"
    assert "init_from is not read again" in lines[1]
    assert lines[1].endswith("step 2")


def test_the_user_s_changes_have_the_user_s_name_and_all_others_keep_theirs(
    run: Path,
) -> None:
    config = read_run_config(run)
    config["preset"] = "a-preset"
    config["origins"]["lora.rank"] = "plan"
    del config["origins"]["seed"]
    resolved, spec, base, changes = with_overrides(
        Overrides(sets=("save_every=3", "lora.rank=2")), config
    )
    (change,) = changes
    assert (change.key, change.before, change.after) == ("save_every", 2, 3)
    expected = config["origins"] | {"save_every": "user", "seed": "default"}
    assert resolved.origins == expected
    assert resolved.preset == "a-preset"
    assert base.name == config["settings"]["base_model_name"]
    assert spec.name == config["settings"]["family"]
    del config["preset"]
    assert with_overrides(Overrides(), config)[0].preset is None


def test_a_choice_stays_while_the_user_asks_for_the_same(run: Path) -> None:
    """The run was asked to choose its rate, and has chosen 0.5."""
    config = read_run_config(run)
    config["settings"]["save_every"] = 7
    config["asked"] = {"save_every": 2}
    for sets, value in (((), 7), (("save_every=2",), 7), (("save_every=3",), 3)):
        resolved, *_ = with_overrides(Overrides(sets=sets), config)
        assert resolved.config.save_every == value
    del config["asked"]  # as earlier versions wrote it
    for sets, value in (((), 7), (("save_every=2",), 2)):
        resolved, *_ = with_overrides(Overrides(sets=sets), config)
        assert resolved.config.save_every == value


def test_a_key_that_the_run_did_not_know_has_the_family_s_default(run: Path) -> None:
    """Before and now, so that it is no change."""
    config = read_run_config(run)
    _, spec, *_ = with_overrides(Overrides(), config)
    defaults = family_defaults(spec)
    key = "timestep_distribution"
    del config["settings"][key]
    resolved, _, _, changes = with_overrides(Overrides(), config)
    assert changes == []
    assert resolved.config.timestep_distribution == defaults[key] is not None


def change_of(kind: str) -> Change:
    return Change("key", 1, 2, kind, "")


@pytest.mark.parametrize(
    ("kinds", "override", "refused"),
    [
        (("safe", "data"), False, None),
        (("override",), False, "add --override"),
        (("safe", "override"), True, None),
        (("override", "fatal"), True, "cannot be resumed"),
    ],
)
def test_changes_are_refused_by_their_class(
    kinds: tuple[str, ...], override: bool, refused: str | None
) -> None:
    changes = [change_of(kind) for kind in kinds]
    if refused is None:
        check_changes(changes, Path("run"), override)
        return
    with pytest.raises(VideotuneError, match=refused):
        check_changes(changes, Path("run"), override)


def around(run: Path, config: dict[str, Any], *, override: bool = False) -> list[str]:
    *_, base, _ = with_overrides(Overrides(), config)
    return changed_around(run, config, base, override)


def test_what_changed_around_the_settings_is_told_or_refused(run: Path) -> None:
    config = read_run_config(run)
    assert around(run, config) == []

    edited = config | {"steps": 9}
    with pytest.raises(VideotuneError, match=r"config\.json was edited.*--override"):
        around(run, edited)
    (change,) = around(run, edited, override=True)
    assert change.startswith("config.json was edited")

    other = config | {"base": config["base"] | {"scheduler": "another"}}
    other["digest"] = digest({k: v for k, v in other.items() if k != "digest"})
    with pytest.raises(VideotuneError, match=SCHEDULER):
        around(run, other)
    (change,) = around(run, other, override=True)
    assert SCHEDULER in change


def test_another_version_of_a_library_is_told(run: Path) -> None:
    """One that the run did not name is none."""
    config = read_run_config(run)
    first, *_ = names = list(versions())
    config["versions"] = {first: "0.1"}
    config["digest"] = digest({k: v for k, v in config.items() if k != "digest"})
    assert len(names) > 1
    assert around(run, config) == [f"versions.{first}: 0.1 -> {versions()[first]}"]
    del config["versions"]
    config["digest"] = digest({k: v for k, v in config.items() if k != "digest"})
    assert around(run, config) == []


@pytest.mark.parametrize("name", RUN_RECORDS)
def test_a_damaged_record_of_an_earlier_step_is_named_at_once(
    name: str, run: Path
) -> None:
    """A resume has changed the run at step 2; going back needs the records of before."""
    (run / "before").mkdir()
    for record in RUN_RECORDS:
        shutil.copy(run / f"{record}.json", kept_before(run, record, 2))
    paths = record_paths_at(run, 1)
    config = read_run_records(run, paths)
    assert config == read_run_config(run)

    paths[name].write_text('{"steps": "x"}')
    with pytest.raises(VideotuneError, match=f"{name}-until-step-2.json"):
        read_run_records(run, paths)
    read_run_records(run, record_paths_at(run, 2))


def test_a_damaged_list_of_exports_is_named_at_once(run: Path) -> None:
    paths = record_paths_at(run, None)
    (run / "exports.json").unlink(missing_ok=True)
    read_run_records(run, paths)
    (run / "exports.json").write_text("{}")
    with pytest.raises(VideotuneError, match=r"exports\.json"):
        read_run_records(run, paths)


def test_views_are_those_of_the_steps_that_stay(run: Path) -> None:
    history = History(run)
    lines = steps_of(run)
    for step in (0, 2, 4):
        shown: Counter[str] = Counter()
        for line in lines[:step]:
            shown.update(line["window_ids"])
        assert count_views(history, step) == shown


def cut_journal(run: Path, step: int) -> None:
    """Leave out the lines of later steps."""
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) <= step]
    (run / "journal.jsonl").write_text("".join(kept))


def test_a_journal_must_reach_the_checkpoint(run: Path) -> None:
    cut_journal(run, 3)
    history = History(run)
    for step in (None, 4):
        with pytest.raises(VideotuneError, match="lacks the steps from 4 to 4"):
            checkpoint_of(run, step, history)
    second = checkpoint_of(run, 2, history)
    assert second is not None
    assert second.step == 2
    cut_journal(run, 2)
    assert checkpoint_of(run, 2, History(run)) is not None


def test_changed_data_is_refused_or_its_views_are_counted_from_there(
    trained: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caption = min(trained.clips.rglob("*.txt"))
    before = caption.read_text()
    caption.write_text("something else")
    try:
        with pytest.raises(VideotuneError, match="--allow-data-change"):
            resumed(run, step=2)
        capsys.readouterr()
        opened = resumed(run, step=2, data_change=True)
    finally:
        caption.write_text(before)
    (change,) = opened.changes
    assert change == f"data: 1 clip with another caption ({caption.stem}.mp4)"
    past = opened.job.view_history
    assert past.step == 2
    assert past.views == count_views(History(run), 2)
    assert "From step 3 on" in "".join(capsys.readouterr())


def restored(run: Path, opened: OpenedRun, *, branch: bool = False) -> Trainer:
    """The trainer of a resume before its first step."""
    plan = make_plan(opened.job)
    trainer = build_trainer(opened, run, plan, callbacks_of(opened.job), resume=True)
    restore(trainer, opened, branch=branch)
    trainer.journal.close()
    return trainer


@pytest.mark.parametrize(
    ("reach", "step", "branch", "message"),
    [
        (4, 4, False, "resuming from step 4"),
        (4, 2, False, "resuming from step 2; 2 steps after it, not saved, will be trained again"),
        (3, 2, False, "resuming from step 2; 1 step after it, not saved, will be trained again"),
        (4, 2, True, "resuming from step 2"),
        (4, 0, True, "nothing was saved yet: starting from step 0"),
    ],
)  # fmt: skip
def test_a_resume_cuts_the_journal_and_says_what_is_trained_again(
    reach: int,
    step: int,
    branch: bool,
    message: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut_journal(run, reach)
    opened = resumed(run, step=step)
    trainer = restored(run, opened, branch=branch)
    lines = "".join(capsys.readouterr()).splitlines()
    assert lines[-1] == message
    assert any("is kept in" in line for line in lines) is branch
    assert [line["step"] for line in steps_of(run)] == list(range(1, step + 1))
    assert (trainer.first_step, trainer.last_step) == (step + 1, step)
    assert not (run / "before").exists()


def test_a_trainer_is_built_for_the_step_after_the_checkpoint(run: Path) -> None:
    opened = resumed(run, step=2)
    trainer = build_trainer(opened, run, make_plan(opened.job), resume=True)
    trainer.journal.close()
    assert (trainer.first_step, trainer.last_step) == (3, 2)


def test_a_save_without_its_line_gets_one(run: Path) -> None:
    """A kill has come between the two."""
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] != "save"]
    (run / "journal.jsonl").write_text("".join(kept))
    restored(run, resumed(run, step=2))
    (line,) = of_kind(run, "save")
    assert (line["step"], line["path"]) == (2, "checkpoints/step-2")
    assert (line["seconds"], line["waited"]) == (None, None)
    restored(run, resumed(run, step=2))
    assert len(of_kind(run, "save")) == 1


def test_a_changed_run_keeps_the_records_of_before(run: Path) -> None:
    """A value that was chosen is still said to be, unless it was changed."""
    config = read_run_config(run)
    config["asked"] = {"save_every": 7, "warmup_steps": 9}
    config["command"] = "videotune train"
    write_config(run, config)
    before = {name: (run / f"{name}.json").read_bytes() for name in RUN_RECORDS}
    trainer = restored(run, resumed(run, "save_every=3", step=2))
    assert read_json(run / "plan.json") == json.loads(json.dumps(trainer.plan))
    assert read_json(run / "plan.json") != json.loads(before["plan"])
    for name in RUN_RECORDS:
        assert kept_before(run, name, 2).read_bytes() == before[name]
    now = read_run_config(run)
    assert now["settings"]["save_every"] == 3
    assert now["settings"]["train_dtype"] == config["settings"]["train_dtype"]
    assert now["asked"] == {"save_every": 3, "warmup_steps": 9}
    assert now["command"] == "videotune train"
    assert now["base"]["fingerprints"] == config["base"]["fingerprints"]
    check = json.loads((run / "check.json").read_text())
    assert check["clips"] == json.loads(before["check"])["clips"]

    # Changed again at the same step, the records of before are still the first ones.
    restored(run, resumed(run, "save_every=1", step=2))
    for name in RUN_RECORDS:
        assert kept_before(run, name, 2).read_bytes() == before[name]


def replace_tensors(
    checkpoint: Path, part: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Change the tensors of a checkpoint's part, with what its marker says of them."""
    path = checkpoint / f"{part}.safetensors"
    save_file(change(load_file(path)), path)
    marker = json.loads((checkpoint / "COMPLETE").read_text())
    entry = {"bytes": path.stat().st_size, "hash": hash_file(path)}
    marker["files"][path.name] = entry
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))


def without_last(tensors: dict[str, Any]) -> dict[str, Any]:
    last = max(tensors).rpartition(".")[0]
    return {name: value for name, value in tensors.items() if not name.startswith(last)}


def of_another_rank(tensors: dict[str, Any]) -> dict[str, Any]:
    name = max(tensors)
    return tensors | {name: tensors[name][:1, :1].clone()}


@pytest.mark.parametrize(
    ("part", "change", "text"),
    [
        ("optimizer", without_last, "no optimizer state for"),
        ("weights", without_last, "1 tensors differ"),
        ("weights", of_another_rank, "1 tensors differ"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    part: str, change: Callable[..., Any], text: str, run: Path
) -> None:
    """Of a part that has no state it also says where the run can be resumed."""
    checkpoint = run / "checkpoints" / "step-4"
    replace_tensors(checkpoint, part, change)
    opened = resumed(run)
    with pytest.raises(VideotuneError, match=text) as caught:
        restored(run, opened)
    assert str(checkpoint) in str(caught.value)
    if part == "optimizer":
        assert "steps 2, 4" in str(caught.value)
