"""Runs with an adapter on text connectors: their samples, their files under other runs,
and the files that they begin with.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.command_line import Bases, export
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_processes import Finished, Make
from tests.support.run_results import of_kind
from videotune.adapters.adapter_types import by_module
from videotune.commands.sample import open_sampler
from videotune.commands.sample_options import SampleOptions
from videotune.config.sections import CONNECTORS
from videotune.errors import DONE, VideotuneError
from videotune.exporter.adapter_export import export_lora
from videotune.files import read_json
from videotune.models.registry import find
from videotune.runs.checkpoint import last_checkpoint
from videotune.sampling.pipeline import draw_samples
from videotune.trainer.loop import train_loop
from videotune.trainer.trainer import Trainer

SIZE = (
    "sample.frames=9",
    "sample.resolution=64x64",
    "sample.steps=2",
    "sample.guidance=1",
)
PROMPT = "a red circle"


@pytest.fixture
def a_run(finished: Finished) -> Path:
    """Only the connectors train."""
    sets = ("resolution=64x64", "lora.targets=connectors", "steps=6", *SIZE)
    return finished(*sets, "learning_rate=0.1", base=("ltx2",))


@pytest.fixture
def file(a_run: Path, tiny_bases: Bases, tmp_path: Path) -> Path:
    """Its adapter, five times as strong."""
    family = find("ltx2")(tiny_bases("ltx2"), torch.device("cpu"), torch.float32)
    family.spec = family.spec.with_connectors()
    state = last_checkpoint(a_run).load("weights")
    path = tmp_path / "lora.safetensors"
    return export_lora(family, "diffusers", state, 5.0, path, {}).path


def drawn(**options: Any) -> Tensor:
    """The latents of a sample."""
    sampler = open_sampler(SampleOptions((PROMPT,), 3, **options))
    (states,) = sampler.family.encode_text([PROMPT])
    (sample,) = draw_samples(
        sampler.family,
        sampler.nets,
        sampler.settings,
        lambda prompt: states,
        [(PROMPT, 3)],
    )
    return sample.video


def test_a_run_and_its_file_sample_the_same_and_strength_0_is_the_base(
    a_run: Path, tiny_bases: Bases
) -> None:
    base = str(tiny_bases("ltx2"))
    lora = next((a_run / "export").glob("*6.safetensors"))
    comfyui = next((a_run / "export").glob("*6-comfyui.safetensors"))
    from_run = drawn(run=a_run)
    for path in (lora, comfyui):
        from_file = drawn(base=base, loras=(path,), sets=SIZE)
        torch.testing.assert_close(from_file, from_run, rtol=1e-4, atol=1e-5)
    alone = drawn(base=base, sets=SIZE)
    off = drawn(run=a_run, strength=0.0)
    half = drawn(run=a_run, strength=0.5)
    torch.testing.assert_close(off, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(from_run, alone, atol=1e-3)
    assert (half - alone).norm() < (from_run - alone).norm()


def test_merged_it_is_the_folder_alone_and_the_command_says_why(
    a_run: Path, tiny_bases: Bases, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(a_run, merge=True) == DONE
    assert "ComfyUI" in capsys.readouterr().err
    folder = next((a_run / "export").glob("*-merged"))
    assert not list((a_run / "export").glob("*-merged-comfyui*"))
    from_merged = drawn(base=str(folder), sets=SIZE)
    torch.testing.assert_close(from_merged, drawn(run=a_run), rtol=1e-4, atol=1e-4)


def test_it_is_added_to_samples_of_a_run_without_connectors(
    finished: Finished, file: Path
) -> None:
    """As ``sample RUN --lora`` and as ``sample.loras``; either way the same."""
    run = finished("resolution=64x64", "steps=1", *SIZE, base=("ltx2",))
    plain = drawn(run=run)
    added = drawn(run=run, loras=(file,))
    configured = drawn(run=run, sets=(f'sample.loras=["{file}"]',))
    assert not torch.allclose(added, plain, atol=1e-3)
    torch.testing.assert_close(added, configured, rtol=1e-4, atol=1e-5)


def trainer_of(overrides: Make, run: Path, *sets: str) -> Trainer:
    words = overrides("resolution=64x64", "steps=2", *sets, base=("ltx2",))
    return build_trainer(open_run(words, run, None).job, run)


def test_a_run_on_top_of_it_runs_the_connectors_and_trains_other_modules(
    overrides: Make, file: Path, tmp_path: Path
) -> None:
    """``base_loras``: merged into the connectors, which stay as they then are."""
    trainers = {}
    for name, sets in {
        "plain": (),
        "on top": (f'base_loras=["{file}"]',),
        "shown": (f'sample.loras=["{file}"]',),
    }.items():
        trainers[name] = trainer_of(overrides, tmp_path / name, *sets)
    specs = {name: each.job.spec for name, each in trainers.items()}
    assert {name: spec.connectors_in_step for name, spec in specs.items()} == {
        "plain": False,
        "on top": True,
        "shown": True,
    }
    losses = {}
    for name, trainer in trainers.items():
        train_loop(trainer)
        trainer.journal.close()
        losses[name] = [line["loss"] for line in of_kind(tmp_path / name, "step")]
        modules = by_module(trainer.parameters)
        assert modules
        assert not any(path.startswith(CONNECTORS) for path in modules)
    assert losses["shown"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["on top"] != pytest.approx(losses["plain"], rel=1e-3)


def test_a_run_begins_with_it_if_it_trains_the_connectors(
    overrides: Make, file: Path, tmp_path: Path
) -> None:
    both = 'lora.targets=["attention", "connectors"]'
    trainer = trainer_of(overrides, tmp_path / "a", f"init_from={file}", both)
    begun = {
        path.partition(".")[0]
        for path, parts in by_module(trainer.parameters).items()
        if bool(parts["lora_B"].any())
    }
    trainer.journal.close()
    assert begun == {CONNECTORS}
    with pytest.raises(VideotuneError, match=r"init_from.*lora\.targets"):
        trainer_of(overrides, tmp_path / "b", f"init_from={file}")


def test_the_exports_list_says_who_read_them(a_run: Path) -> None:
    entries = read_json(a_run / "exports.json")
    readers = {entry["format"]: entry["verified"]["reader"] for entry in entries}
    assert readers["diffusers"] == "diffusers load_lora_weights"
    assert readers["comfyui"] == "videotune sample --lora"
