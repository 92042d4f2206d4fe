"""Runs of each kind of adapter, and of chosen layers: resumed to the bit, begun from, drawn from, merged, planned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.commands.safety_kit import Finished, Make, largest_difference, resume
from tests.runs import open_run, prepare
from tests.shell import export, plan, sample, train
from videotune.adapters.effect import updates
from videotune.adapters.kinds import PARTS, by_module
from videotune.commands.sample import SampleOptions, open_sampler, render
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.trainer.resolve_config import Overrides

KIN = ("DORA", "LOHA", "LOKR", "OFT")
LAYERS = ("training_method=FINE_TUNE", 'transformer.layers=["blocks.1.attn1", "norm2"]')


def settings_of(kind: str) -> tuple[str, ...]:
    more = () if kind == "OFT" else ("lora.alpha=6", "lora.dropout=0.2")
    return (f"lora.variant={kind}", "lora.rank=4", "lora.targets=linear", *more)


@pytest.fixture
def of_variant(finished: Finished) -> Callable[[str], Path]:
    """A run of four steps of a variant, exported in each format that it has."""

    def get(variant: str) -> Path:
        forms = {"LORA": '["diffusers"]', "DORA": '["diffusers"]', "OFT": '["peft"]'}.get(
            variant, '["peft", "comfyui"]'
        )
        return finished("steps=4", "save_every=2", f"output_model_format={forms}", *settings_of(variant))

    return get


def begun(overrides: Overrides, run: Path) -> dict[str, torch.Tensor]:
    """What a run's weights are before its first step."""
    trainer = prepare(open_run(overrides, run, None).job, run, False)
    trainer.journal.close()
    return {name: value.detach().clone() for name, value in trainer.parameters.items()}


@pytest.mark.parametrize("kind", KIN)
def test_a_run_begins_from_a_checkpoint_and_from_each_file_of_its_kind(
    kind: str, of_variant: Callable[[str], Path], overrides: Make, tmp_path: Path
) -> None:
    """Exactly: ΔW in float64, also under another alpha; DoRA's magnitudes too."""
    run = of_variant(kind)
    checkpoint = run / "checkpoints" / "step-4"
    wanted = updates(load_file(checkpoint / "weights.safetensors"), 1.0 if kind == "OFT" else 1.5)
    more = settings_of(kind) if kind == "OFT" else (*settings_of(kind), "lora.alpha=2")
    sources = [checkpoint, *(run / line["path"] for line in read_json(run / "exports.json"))]
    for index, source in enumerate(sources):
        ours = begun(overrides("steps=2", *more, f"init_from={source}"), tmp_path / str(index))
        assert largest_difference(updates(ours, 1.0 if kind == "OFT" else 0.5), wanted) < 1e-6, source


def test_kinds_are_not_mixed_and_shapes_must_fit(
    of_variant: Callable[[str], Path], overrides: Make, tmp_path: Path
) -> None:
    loha, lora = (of_variant(kind) / "checkpoints" / "step-4" for kind in ("LOHA", "LORA"))
    for source, sets, words in (
        (loha, ("lora.rank=4", "lora.targets=linear"), "is LOHA, and lora.variant is LORA"),
        (lora, settings_of("DORA"), "is LORA, and lora.variant is DORA"),
        (loha, (*settings_of("LOHA"), "lora.rank=2"), "set lora.rank as it was there"),
        (loha, (*settings_of("LOHA"), "lora.targets=attention"), "4 modules that do not train here"),
    ):
        with pytest.raises(VideotuneError, match=words):
            train(overrides("steps=2", *sets, f"init_from={source}"), tmp_path / "run")


SIZE = ("sample.frames=5", "sample.resolution=32x32", "sample.steps=2", "sample.guidance=1")


def rendered(**words: Any) -> np.ndarray:
    """The frames before they are compressed."""
    (frames,) = render(open_sampler(SampleOptions(("a red circle",), 3, sets=SIZE, **words)), ["a red circle"], [3])
    return frames.astype(int)


@pytest.mark.parametrize(
    "kind", ["DORA", "LOKR", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("LOHA", "OFT"))]
)
def test_a_run_its_files_and_its_merged_model_draw_the_same(
    kind: str, of_variant: Callable[[str], Path], tiny_bases: Callable[[str], Path]
) -> None:
    run, base = of_variant(kind), str(tiny_bases("wan"))
    wanted = rendered(run=run)
    files = [line for line in read_json(run / "exports.json") if line["format"] != "merged"]
    for line in files:
        assert np.abs(rendered(base=base, loras=(run / line["path"],)) - wanted).max() <= 1
    assert export(run, merge=True) == DONE
    merged = run / "export" / "run-step-4-merged"
    assert [line["path"] for line in read_json(run / "exports.json")][-1] == "export/run-step-4-merged"
    assert np.abs(rendered(base=str(merged)) - wanted).max() <= 1
    assert np.abs(rendered(base=base) - wanted).max() > 1
    facts = read_json(merged / "videotune.json")
    assert (facts["merged"], facts["step"], facts["use"]) == (
        kind,
        4,
        "pipe = WanPipeline.from_pretrained(THIS_FOLDER)",
    )


def test_kinds_without_degrees_have_no_strength(
    of_variant: Callable[[str], Path], tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    for kind in ("OFT", "DORA"):
        with pytest.raises(VideotuneError, match=f"--strength: {kind} acts wholly or not at all"):
            sample(SampleOptions(("a",), run=of_variant(kind), strength=0.5, sets=SIZE), tmp_path)
    off, on = (rendered(run=of_variant("LOKR"), strength=strength) for strength in (0.0, 1.0))
    assert np.abs(off - on).max() > 1
    assert np.abs(off - rendered(base=str(tiny_bases("wan")))).max() <= 1


def test_merging_what_has_no_adapter_is_refused(
    of_variant: Callable[[str], Path], finished: Finished, overrides: Make
) -> None:
    with pytest.raises(VideotuneError, match="--merge writes a folder in diffusers layout: it goes without --format"):
        export(of_variant("LORA"), ["comfyui"], merge=True)
    with pytest.raises(VideotuneError, match="--merge: a fine-tuned model has no adapter"):
        export(finished("steps=4", "save_every=2", *LAYERS, "train_dtype=FLOAT_32"), merge=True)


# ---- plan


@pytest.mark.parametrize("kind", PARTS)
def test_the_plan_counts_what_trains(
    kind: str, of_variant: Callable[[str], Path], overrides: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(of_variant(kind) / "checkpoints" / "step-4" / "weights.safetensors")
    capsys.readouterr()
    assert plan(overrides("steps=4", *settings_of(kind)), as_json=True) == DONE
    facts = json.loads(capsys.readouterr().out)["adapter"]
    assert facts["parameters"] == sum(value.numel() for value in weights.values())
    assert facts["modules"] == len(by_module(weights)) == sum(facts["groups"].values()) == 20
    assert facts["groups"]["blocks.*.attn1.to_out.0"] == 2


@pytest.mark.parametrize(
    ("sets", "listed"),
    [
        (("lora.targets=feed_forward",), "  2 × blocks.*.ffn.net.0.proj, 2 × blocks.*.ffn.net.2\n"),
        (('lora.targets=["blocks.1.attn2.to_q"]',), "  1 × blocks.*.attn2.to_q\n"),
        (("lora.targets=cross_attention",), "2 × blocks.*.attn2.to_q, 2 × blocks.*.attn2.to_k"),
        (LAYERS, "1 × blocks.*.attn1.norm_q, "),
    ],
)
def test_the_plan_lists_modules_by_pattern(
    sets: tuple[str, ...], listed: str, overrides: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(overrides(*sets)) == DONE
    assert listed in capsys.readouterr().out


# ---- layers of a fine-tuning


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_chosen_layers_are_exported_in_the_whole_model(
    dtype: str, finished: Finished, tiny_bases: Callable[[str], Path]
) -> None:
    run = finished("steps=4", "save_every=2", *LAYERS, f"train_dtype={dtype}")
    saved = load_file(run / "checkpoints" / "step-4" / "weights.safetensors")
    assert {name.split(".")[2] for name in saved} == {"attn1", "norm2"}
    base = load_file(tiny_bases("wan") / "transformer" / "diffusion_pytorch_model.safetensors")
    (line,) = [line for line in read_json(run / "exports.json") if line["path"].endswith("step-4")]
    written = load_file(run / line["path"] / "transformer" / "diffusion_pytorch_model.safetensors")
    assert set(written) == set(base)
    for name, value in written.items():
        assert torch.equal(value, saved.get(name, base[name]).to(value.dtype)), name
    with pytest.raises(VideotuneError, match=r"transformer\.layers"):
        resume(run, 'transformer.layers=["blocks.0"]')
