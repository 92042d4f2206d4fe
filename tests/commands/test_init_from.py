"""--init-from: another run's weights under a fresh optimizer; what the file does is what the run begins with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import moments
from tests.commands.safety_kit import equal, facts_of, of_kind, start, state, steps_of
from tests.runs import open_run, prepare
from tests.shell import export, train
from videotune.adapters.lora import updates
from videotune.errors import DONE, VideotuneError
from videotune.exporter.lora import read_back
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.checkpoint_writer import entry_of
from videotune.trainer.components import open_models
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import read_run_config

Say = Callable[..., Overrides]
ALPHA = 3.0


@pytest.fixture(scope="session")
def kept() -> dict[str, Path]:
    """Runs that tests begin from, made once."""
    return {}


@pytest.fixture
def source(kept: dict[str, Path], said: Say, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of three steps with an alpha of its own, exported in both forms."""

    def make(*sets: str) -> Path:
        name = " ".join(sets)
        if name not in kept:
            kept[name] = tmp_path_factory.mktemp("source") / "source"
            assert train(said("steps=3", "lora.rank=4", *sets), kept[name]) == DONE
        return kept[name]

    return make


def lora(source: Callable[..., Path]) -> Path:
    return source(f"lora.alpha={ALPHA}", 'output_model_format=["diffusers", "comfyui"]')


def begun(words: Overrides, run: Path) -> Any:
    """A run before its first step."""
    return prepare(open_run(words, run, None).job, run, False)


def family_of(words: Overrides, run: Path) -> Any:
    job = open_run(words, run, None).job
    return open_models(job.spec, job.base, job.config)


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of ΔW, relative to its largest entry."""
    assert set(ours) >= set(theirs)
    assert any(bool(value.any()) for value in theirs.values())
    none = [bool(ours[name].any()) for name in set(ours) - set(theirs)]
    assert none == [False] * len(none), "modules that the file does not change begin at zero"
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


FILES = ["source-step-3.safetensors", "source-step-3-comfyui.safetensors", "checkpoint"]


def place(run: Path, name: str) -> Path:
    return run / "checkpoints" / "step-3" if name == "checkpoint" else run / "export" / name


def delta_of(run: Path, name: str, words: Overrides, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What the file does to each weight, by diffusers' own loader; of a checkpoint by its run's rank and alpha."""
    if name != "checkpoint":
        return read_back(family_of(words, tmp_path / "none"), place(run, name))
    lora = read_run_config(run)["settings"]["lora"]
    return updates(load_file(place(run, name) / "weights.safetensors"), lora["alpha"] / lora["rank"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("rank", "alpha"), [(4, None), (4, 1.5), (8, None), (8, 2.0)])
def test_the_run_begins_with_what_the_file_does(
    name: str, rank: int, alpha: float | None, source: Callable[..., Path], said: Say, tmp_path: Path
) -> None:
    """Exactly: ΔW in float64, whatever the rank and alpha of the new run are."""
    run = lora(source)
    more = [f"lora.rank={rank}", *([f"lora.alpha={alpha}"] if alpha else []), "ema.decay=0.9"]
    words = said("steps=2", *more)
    wanted = delta_of(run, name, words, tmp_path)
    trainer = begun(Overrides(data=words.data, sets=(*words.sets, f"init_from={place(run, name)}")), tmp_path / "run")
    ours = updates(trainer.parameters, (alpha or rank) / rank)
    assert furthest(ours, wanted) < 1e-6
    assert equal(dict(trainer.result), dict(trainer.parameters)), "the average begins at the same weights"
    assert not any(trainer.pool.trainable.optimizer.state.values()), "a fresh optimizer"
    trainer.journal.close()


def test_what_a_lower_rank_leaves_free_can_learn(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    """The rows of A that the file does not fill keep their draw; were both factors zero they would stay so for ever."""
    run, plain = lora(source), begun(said("steps=2", "lora.rank=8"), tmp_path / "plain")
    words = said("steps=2", "lora.rank=8", f"init_from={place(run, 'checkpoint')}")
    trainer = begun(words, tmp_path / "run")
    for name, value in trainer.parameters.items():
        if ".lora_A." in name:
            assert torch.equal(value[4:], plain.parameters[name][4:])
            assert bool(value[4:].any())
        else:
            assert not bool(value[:, 4:].any())
    trainer.journal.close()
    plain.journal.close()
    assert train(words, tmp_path / "trained") == DONE
    after = load_file(tmp_path / "trained" / "checkpoints" / "step-2" / "weights.safetensors")
    assert all(bool(value[:, 4:].any()) for name, value in after.items() if ".lora_B." in name)


def test_it_says_what_it_took_and_config_json_keeps_it(
    source: Callable[..., Path], said: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place(lora(source), FILES[0])
    assert train(said("steps=2", "lora.rank=4", "validate_every=2", f"init_from={file}"), tmp_path / "run") == DONE
    told = capsys.readouterr().err
    assert f"beginning with the weights of {file} (" in told
    assert "fresh optimizer, step 0" in told
    assert read_run_config(tmp_path / "run")["settings"]["init_from"] == str(file)
    assert train(said("steps=2", "lora.rank=4", "validate_every=2"), tmp_path / "other") == DONE
    first, other = (of_kind(folder, "ruler")[0]["train"]["mean"] for folder in (tmp_path / "run", tmp_path / "other"))
    assert first != other, "the first reading is of the weights it began with"
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2]


def test_a_rank_that_is_too_high_is_refused_and_named(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    for name in FILES:
        with pytest.raises(VideotuneError, match=r"init_from: .* has rank 4 in .*: set lora\.rank to it, or higher"):
            train(said("steps=2", "lora.rank=2", f"init_from={place(lora(source), name)}"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_file_for_another_base_is_refused(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    file = load_file(place(lora(source), FILES[0]))
    wide = {name: torch.cat([value, value], 1 if ".lora_A." in name else 0) for name, value in file.items()}
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(VideotuneError, match=r"init_from: .*wide\.safetensors"):
        train(said("steps=2", "lora.rank=4", f"init_from={tmp_path / 'wide.safetensors'}"), tmp_path / "run")
    checkpoint = shutil.copytree(place(lora(source), "checkpoint"), tmp_path / "step-3")
    weights = load_file(checkpoint / "weights.safetensors")
    save_file(
        {n: torch.cat([v, v], 1 if ".lora_A." in n else 0) for n, v in weights.items()},
        checkpoint / "weights.safetensors",
    )
    marker = json.loads((checkpoint / "COMPLETE").read_text())
    marker["files"]["weights.safetensors"] = entry_of(checkpoint / "weights.safetensors")
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(VideotuneError, match=r"was made for another base: .* differs in size"):
        train(said("steps=2", "lora.rank=4", f"init_from={checkpoint}"), tmp_path / "run")


def test_modules_that_do_not_train_here_are_named(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    words = said(
        "steps=2", "lora.rank=4", 'lora.targets=["attn1.to_q"]', f"init_from={place(lora(source), 'checkpoint')}"
    )
    with pytest.raises(
        VideotuneError, match=r"changes \d+ modules that do not train here, such as .*: set lora.targets"
    ):
        train(words, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "no such file or folder"),
        ("text.safetensors", "is no LoRA"),
        ("empty", "is no complete checkpoint: its name is no step's"),
        ("step-9", "is no complete checkpoint: it has no COMPLETE"),
    ],
)
def test_what_is_no_file_of_weights_is_told(name: str, why: str, said: Say, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "step-9").mkdir()
    with pytest.raises(VideotuneError, match=why):
        train(said("steps=2", f"init_from={tmp_path / name}"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


# ---- every weight


def test_fine_tuning_begins_from_a_checkpoint_s_folder(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    for dtype in ("FLOAT_32", "BFLOAT_16"):
        run = source("training_method=FINE_TUNE", f"train_dtype={dtype}", "learning_rate=0.001")
        folder = run / "checkpoints" / "step-3"
        words = said("steps=2", "training_method=FINE_TUNE", f"train_dtype={dtype}", f"init_from={folder}")
        trainer = begun(words, tmp_path / dtype)
        saved = load_file(folder / "weights.safetensors")
        assert equal({name: value.detach() for name, value in trainer.parameters.items()}, saved)
        held = dict(trainer.net.named_parameters())
        assert all(torch.equal(held[name], value.to(held[name].dtype)) for name, value in saved.items())
        trainer.journal.close()


def test_the_methods_do_not_take_each_other_s_checkpoints(
    source: Callable[..., Path], said: Say, tmp_path: Path
) -> None:
    full = source("training_method=FINE_TUNE", "train_dtype=FLOAT_32", "learning_rate=0.001") / "checkpoints" / "step-3"
    with pytest.raises(VideotuneError, match="holds no LoRA: it is of a run that trained every weight"):
        train(said("steps=2", f"init_from={full}"), tmp_path / "run")
    adapter, file = place(lora(source), "checkpoint"), place(lora(source), FILES[0])
    with pytest.raises(VideotuneError, match="does not fit this model"):
        train(said("steps=2", "training_method=FINE_TUNE", f"init_from={adapter}"), tmp_path / "run")
    with pytest.raises(VideotuneError, match="is a file; FINE_TUNE begins from a checkpoint's folder"):
        train(said("steps=2", "training_method=FINE_TUNE", f"init_from={file}"), tmp_path / "run")


# ---- and a resume


def test_killed_before_its_first_save_it_begins_with_the_same_file_again(
    server: None, source: Callable[..., Path], said: Say, tmp_path: Path
) -> None:
    file, run, straight = place(lora(source), FILES[0]), tmp_path / "run", tmp_path / "straight"
    words = said("steps=4", "save_every=0", "lora.rank=4", f"init_from={file}")
    assert train(words, straight) == DONE
    running = start(words, run, first=moments.in_step, given=(3,))
    running.until_said("at: step")
    running.send(9)
    running.ended()
    assert complete_checkpoints(run) == []
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert facts_of(run) == facts_of(straight)
    assert equal(state(run, 4), state(straight, 4))


def test_a_resume_from_a_checkpoint_does_not_need_the_file_any_more_and_one_from_0_does(
    source: Callable[..., Path], said: Say, tmp_path: Path
) -> None:
    """Going back to the beginning begins with the file, not with the base: the checkpoints that are there are of later."""
    file, run = tmp_path / "file.safetensors", tmp_path / "run"
    shutil.copy(place(lora(source), FILES[0]), file)
    assert train(said("steps=4", "save_every=2", "lora.rank=4", f"init_from={file}"), run) == DONE
    first, facts = state(run, 4), facts_of(run)
    file.rename(tmp_path / "away.safetensors")
    assert train(Overrides(), run, resume=Resume(step=2)) == DONE
    with pytest.raises(VideotuneError, match="init_from: no such file or folder"):
        train(Overrides(), run, resume=Resume(step=0))
    assert [one.step for one in complete_checkpoints(run)] == [2, 4], "nothing was set aside yet"
    (tmp_path / "away.safetensors").rename(file)
    assert train(Overrides(), run, resume=Resume(step=0)) == DONE
    assert equal(state(run, 4), first)
    assert facts_of(run) == facts


def test_an_export_of_it_is_read_back_as_usual(source: Callable[..., Path], said: Say, tmp_path: Path) -> None:
    words = said("steps=2", "lora.rank=8", "lora.alpha=2.0", f"init_from={place(lora(source), 'checkpoint')}")
    assert train(words, tmp_path / "run") == DONE
    assert export(tmp_path / "run", ["comfyui"]) == DONE
