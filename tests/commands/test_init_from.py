"""--init-from: another run's weights under a fresh optimizer; what the file does is what the run begins with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands.safety_kit import Finished, Work, resume
from tests.exporter.export_kit import read_back
from tests.read_runs import assert_same_run, complete, equal, largest_difference, of_kind, steps_of
from tests.runs import open_run, prepare
from tests.shell import Printed, export, train
from videotune.adapters.lora import updates
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.trainer.checkpoint_writer import entry_of
from videotune.trainer.components import open_models
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.run_dir import read_run_config

ALPHA = 3.0


LORA = ("lora.rank=4", f"lora.alpha={ALPHA}", 'output_model_format=["diffusers", "comfyui"]')
FULL = ("training_method=FINE_TUNE", "learning_rate=0.001")


@pytest.fixture
def adapter(finished: Finished) -> Path:
    """A run of three steps with an alpha of its own, exported in both forms."""
    return finished("steps=3", *LORA)


def begun(overrides: Overrides, run: Path) -> Any:
    """A run before its first step."""
    trainer = prepare(open_run(overrides, run, None).job, run, False)
    trainer.journal.close()
    return trainer


FILES = ["run-step-3.safetensors", "run-step-3-comfyui.safetensors", "checkpoint"]


def place(run: Path, name: str) -> Path:
    return run / "checkpoints" / "step-3" if name == "checkpoint" else run / "export" / name


def delta_of(run: Path, name: str, overrides: Overrides, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What the file does to each weight, by diffusers' own loader; of a checkpoint by its run's rank and alpha."""
    if name != "checkpoint":
        job = open_run(overrides, tmp_path / "none", None).job
        return read_back(open_models(job.spec, job.base, job.config), place(run, name))
    return updates(load_file(place(run, name) / "weights.safetensors"), ALPHA / 4)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("rank", "alpha"), [(4, 1.5), (8, None)])
def test_the_run_begins_with_what_the_file_does(
    name: str, rank: int, alpha: float | None, adapter: Path, work: Work
) -> None:
    """Exactly: ΔW in float64, whatever the rank and alpha of the new run are. Rows of A that the file does not fill keep
    their draw, so that they can learn."""
    more = ("steps=2", f"lora.rank={rank}", *([f"lora.alpha={alpha}"] if alpha else []), "ema.decay=0.9")
    wanted = delta_of(adapter, name, work.overrides(*more), work.tmp)
    plain = begun(work.overrides(*more), work.tmp / "plain").parameters
    trainer = begun(work.overrides(*more, f"init_from={place(adapter, name)}"), work.run)
    assert largest_difference(updates(trainer.parameters, (alpha or rank) / rank), wanted) < 1e-6
    assert equal(dict(trainer.result), dict(trainer.parameters)), "the average begins at the same weights"
    assert not any(trainer.pool.trainable.optimizer.state.values()), "a fresh optimizer"
    for key, value in trainer.parameters.items():
        assert not bool(value[:, 4:].any()) if ".lora_B." in key else torch.equal(value[4:], plain[key][4:])
        assert rank == 4 or ".lora_B." in key or bool(value[4:].any())


def test_the_file_is_reported_and_kept_in_the_config(adapter: Path, work: Work, capsys: Printed) -> None:
    file, settings = place(adapter, FILES[0]), ("steps=2", "lora.rank=4", "validate_every=2")
    work.train(*settings, f"init_from={file}")
    printed = capsys.readouterr().err
    assert f"beginning with the weights of {file} (" in printed
    assert "fresh optimizer, step 0" in printed
    assert read_run_config(work.run)["settings"]["init_from"] == str(file)
    first, other = (of_kind(run, "validation")[0]["train"]["mean"] for run in (work.run, work.finished(*settings)))
    assert first != other, "the first validation is of the weights it began with"
    assert [line["step"] for line in steps_of(work.run)] == [1, 2]


FULL_RUN = ("steps=3", *FULL, "train_dtype=FLOAT_32")
REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    **{f"rank of {name}": (name, ("lora.rank=2",), r"rank 4 in .*: set lora\.rank") for name in FILES},
    "modules": (
        "checkpoint",
        ("lora.rank=4", 'lora.targets=["attn1.to_q"]'),
        r"changes \d+ modules that do not train here",
    ),
    "wide file": ("wide.safetensors", ("lora.rank=4",), r"wide\.safetensors"),
    "wide checkpoint": ("step-3", ("lora.rank=4",), "was made for another base: .* differs in size"),
    "missing": ("nothing", (), "no such file or folder"),
    "text": ("text.safetensors", (), "is no LoRA"),
    "folder": ("empty", (), "is no complete checkpoint: its name is no step's"),
    "incomplete": ("step-9", (), "is no complete checkpoint: it has no COMPLETE"),
    "full for adapter": ("full", (), "holds no LoRA: it is of a run that trained every weight"),
    "adapter for full": ("checkpoint", FULL, "does not fit what trains"),
    "file for full": (FILES[0], FULL, "is a file; FINE_TUNE begins from a checkpoint's folder"),
}
"""For each case what the run begins from, its settings, and what the error names."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, adapter: Path, work: Work) -> None:
    name, sets, named = REFUSED[case]
    (work.tmp / "text.safetensors").write_text("hello")
    for folder in ("empty", "step-9"):
        (work.tmp / folder).mkdir()
    checkpoint = shutil.copytree(place(adapter, "checkpoint"), work.tmp / "step-3")
    for source, wide in (
        (place(adapter, FILES[0]), work.tmp / "wide.safetensors"),
        (checkpoint / "weights.safetensors", checkpoint / "weights.safetensors"),
    ):
        tensors = load_file(source).items()
        save_file({key: torch.cat([value, value], 1 if ".lora_A." in key else 0) for key, value in tensors}, wide)
    marker = read_json(checkpoint / "COMPLETE")
    marker["files"]["weights.safetensors"] = entry_of(checkpoint / "weights.safetensors")
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))
    if name == "full":
        source = place(work.finished(*FULL_RUN), "checkpoint")
    else:
        source = place(adapter, name) if name in FILES else work.tmp / name
    with pytest.raises(VideotuneError, match=named):
        train(work.overrides("steps=2", *sets, f"init_from={source}"), work.run)
    assert not (work.run / "config.json").exists()


# ---- every weight


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_fine_tuning_begins_from_a_checkpoint_s_folder(dtype: str, work: Work) -> None:
    folder = place(work.finished("steps=3", *FULL, f"train_dtype={dtype}"), "checkpoint")
    trainer = begun(work.overrides("steps=2", *FULL, f"train_dtype={dtype}", f"init_from={folder}"), work.tmp / dtype)
    saved = load_file(folder / "weights.safetensors")
    assert equal({name: value.detach() for name, value in trainer.parameters.items()}, saved)
    held = dict(trainer.net.named_parameters())
    assert all(torch.equal(held[name], value.to(held[name].dtype)) for name, value in saved.items())


# ---- and a resume


def test_a_resume_from_a_checkpoint_does_not_need_the_file_and_one_from_0_does(adapter: Path, work: Work) -> None:
    """A rollback to the beginning begins with the file, not with the base."""
    file, run = work.tmp / "file.safetensors", work.run
    shutil.copy(place(adapter, FILES[0]), file)
    assert train(work.overrides("steps=4", "save_every=2", "lora.rank=4", f"init_from={file}"), run) == DONE
    straight = shutil.copytree(run, work.tmp / "straight")
    file.rename(work.tmp / "away.safetensors")
    assert resume(run, step=2) == DONE
    with pytest.raises(VideotuneError, match="init_from: no such file or folder"):
        resume(run, step=0)
    assert complete(run) == [2, 4], "nothing was set aside yet"
    (work.tmp / "away.safetensors").rename(file)
    assert resume(run, step=0) == DONE
    assert_same_run(run, straight, 4)
    assert export(run, ["comfyui"]) == DONE
