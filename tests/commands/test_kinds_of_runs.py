"""Runs of each kind of adapter, and of chosen layers: resumed to the bit, begun from, drawn from, merged, planned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.commands.safety_kit import equal, facts_of, state
from tests.runs import open_run, prepare
from tests.shell import export, plan, sample, train
from videotune.adapters.effect import updates
from videotune.adapters.kinds import PARTS, by_module
from videotune.commands.sample import SampleOptions, open_sampler, render
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume

Say = Callable[..., Overrides]
KIN = ("DORA", "LOHA", "LOKR", "OFT")
LAYERS = ("training_method=FINE_TUNE", 'transformer.layers=["blocks.1.attn1", "norm2"]')


def of_kind(kind: str) -> tuple[str, ...]:
    more = () if kind == "OFT" else ("lora.alpha=6", "lora.dropout=0.2")
    return (f"lora.variant={kind}", "lora.rank=4", "lora.targets=linear", *more)


@pytest.fixture(scope="session")
def kept() -> dict[str, Path]:
    return {}


@pytest.fixture
def finished(kept: dict[str, Path], said: Say, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of four steps of a kind, with an average, exported in each format that it has."""

    def get(kind: str) -> Path:
        if kind not in kept:
            kept[kind] = tmp_path_factory.mktemp("finished") / "run"
            forms = {"LORA": '["diffusers"]', "DORA": '["diffusers"]', "OFT": '["peft"]'}.get(
                kind, '["peft", "comfyui"]'
            )
            words = said("steps=4", "save_every=2", f"output_model_format={forms}", *of_kind(kind))
            assert train(words, kept[kind]) == DONE
        return kept[kind]

    return get


@pytest.mark.parametrize("kind", KIN)
def test_a_resume_is_the_same_run_to_the_bit(
    kind: str, finished: Callable[[str], Path], said: Say, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = said("steps=2", "save_every=2", *of_kind(kind))
    assert train(first, run) == DONE
    assert train(Overrides(sets=("steps=4",)), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(finished(kind), 4))
    assert facts_of(run) == facts_of(finished(kind))
    moved = [name for name, value in state(run, 2).items() if not torch.equal(value, state(run, 4)[name])]
    assert any(name.startswith("weights/") for name in moved)


def test_another_kind_cannot_be_resumed(finished: Callable[[str], Path]) -> None:
    with pytest.raises(VideotuneError, match=r"lora\.variant: 'LOKR' -> 'LOHA'"):
        train(Overrides(sets=("lora.variant=LOHA",)), finished("LOKR"), resume=Resume())


def begun(words: Overrides, run: Path) -> dict[str, torch.Tensor]:
    """What a run's weights are before its first step."""
    trainer = prepare(open_run(words, run, None).job, run, False)
    trainer.journal.close()
    return {name: value.detach().clone() for name, value in trainer.parameters.items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs)
    assert any(bool(value.any()) for value in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


@pytest.mark.parametrize("kind", KIN)
def test_a_run_begins_from_a_checkpoint_and_from_each_file_of_its_kind(
    kind: str, finished: Callable[[str], Path], said: Say, tmp_path: Path
) -> None:
    """Exactly: ΔW in float64, also under another alpha; DoRA's magnitudes too."""
    run = finished(kind)
    checkpoint = run / "checkpoints" / "step-4"
    wanted = updates(load_file(checkpoint / "weights.safetensors"), 1.0 if kind == "OFT" else 1.5)
    more = of_kind(kind) if kind == "OFT" else (*of_kind(kind), "lora.alpha=2")
    sources = [checkpoint, *(run / line["path"] for line in read_json(run / "exports.json"))]
    for index, source in enumerate(sources):
        ours = begun(said("steps=2", *more, f"init_from={source}"), tmp_path / str(index))
        assert same(updates(ours, 1.0 if kind == "OFT" else 0.5), wanted) < 1e-6, source


def test_kinds_are_not_mixed_and_shapes_must_fit(finished: Callable[[str], Path], said: Say, tmp_path: Path) -> None:
    loha, lora = (finished(kind) / "checkpoints" / "step-4" for kind in ("LOHA", "LORA"))
    for source, sets, words in (
        (loha, ("lora.rank=4", "lora.targets=linear"), "is LOHA, and lora.variant is LORA"),
        (lora, of_kind("DORA"), "is LORA, and lora.variant is DORA"),
        (loha, (*of_kind("LOHA"), "lora.rank=2"), "set lora.rank as it was there"),
        (loha, (*of_kind("LOHA"), "lora.targets=attention"), "4 modules that do not train here"),
    ):
        with pytest.raises(VideotuneError, match=words):
            train(said("steps=2", *sets, f"init_from={source}"), tmp_path / "run")


SIZE = ("sample.frames=5", "sample.resolution=32x32", "sample.steps=2", "sample.guidance=1")


def drawn(**words: Any) -> np.ndarray:
    """The frames before they are compressed."""
    (frames,) = render(open_sampler(SampleOptions(("a red circle",), 3, sets=SIZE, **words)), ["a red circle"], [3])
    return frames.astype(int)


@pytest.mark.parametrize(
    "kind", ["DORA", "LOKR", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("LOHA", "OFT"))]
)
def test_a_run_its_files_and_its_merged_model_draw_the_same(
    kind: str, finished: Callable[[str], Path], tiny_bases: Callable[[str], Path]
) -> None:
    run, base = finished(kind), str(tiny_bases("wan"))
    wanted = drawn(run=run)
    files = [line for line in read_json(run / "exports.json") if line["format"] != "merged"]
    for line in files:
        assert np.abs(drawn(base=base, loras=(run / line["path"],)) - wanted).max() <= 1
    assert export(run, merge=True) == DONE
    merged = run / "export" / "run-step-4-merged"
    assert [line["path"] for line in read_json(run / "exports.json")][-1] == "export/run-step-4-merged"
    assert np.abs(drawn(base=str(merged)) - wanted).max() <= 1
    assert np.abs(drawn(base=base) - wanted).max() > 1
    facts = read_json(merged / "videotune.json")
    assert (facts["merged"], facts["step"], facts["use"]) == (
        kind,
        4,
        "pipe = WanPipeline.from_pretrained(THIS_FOLDER)",
    )


def test_kinds_without_degrees_have_no_strength(
    finished: Callable[[str], Path], tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    for kind in ("OFT", "DORA"):
        with pytest.raises(VideotuneError, match=f"--strength: {kind} acts wholly or not at all"):
            sample(SampleOptions(("a",), run=finished(kind), strength=0.5, sets=SIZE), tmp_path)
    off, on = (drawn(run=finished("LOKR"), strength=strength) for strength in (0.0, 1.0))
    assert np.abs(off - on).max() > 1
    assert np.abs(off - drawn(base=str(tiny_bases("wan")))).max() <= 1


@pytest.mark.parametrize("kind", ["DORA", "LOHA", "OFT"])
def test_the_line_of_python_in_a_file_loads_it(
    kind: str, finished: Callable[[str], Path], tiny_bases: Callable[[str], Path]
) -> None:
    run = finished(kind)
    line = next(line for line in read_json(run / "exports.json") if line["format"] in ("diffusers", "peft"))
    path = run / line["path"]
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["videotune"])
    use = facts["use"].replace("THIS_FILE", repr(str(path))).replace(repr(facts["base"]["name"]), "BASE")
    names: dict[str, Any] = {"BASE": str(tiny_bases("wan"))}
    exec(f"from diffusers import WanPipeline\n{use}", names)
    layer = names["pipe"].transformer.blocks[0].attn1.to_q
    assert facts["variant"] == kind
    assert type(layer).__module__.startswith(f"peft.tuners.{'lora' if kind == 'DORA' else kind.lower()}")
    trained = by_module(load_file(run / "checkpoints" / "step-4" / "weights.safetensors"))["blocks.0.attn1.to_q"]
    part = {"DORA": "lora_A", "LOHA": "hada_w1_a", "OFT": "oft_R"}[kind]
    (held,) = [p for _, p in getattr(layer, part).named_parameters()]
    assert torch.equal(held.float(), trained[part])


def test_merging_what_has_no_adapter_is_refused(finished: Callable[[str], Path], said: Say, tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="--merge writes a folder in diffusers layout: it goes without --format"):
        export(finished("LORA"), ["comfyui"], merge=True)
    assert train(said("steps=1", *LAYERS), tmp_path / "run") == DONE
    with pytest.raises(VideotuneError, match="--merge: a fine-tuned model has no adapter"):
        export(tmp_path / "run", merge=True)


def test_both_experts_merge_into_one_folder(said: Say, tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_bases("wan", "t2v-a14b")
    words = said(f"base_model_name={base}", "steps=2", "expert_share=0.5", "expert_period=1", "lora.variant=LOKR")
    assert train(words, tmp_path / "run") == DONE
    names = sorted(line["path"] for line in read_json(tmp_path / "run" / "exports.json"))
    assert [name.rsplit("_", 2)[1] for name in names] == ["high", "low"]
    assert export(tmp_path / "run", merge=True) == DONE
    merged = tmp_path / "run" / "export" / "run-step-2-merged"
    for part in ("transformer", "transformer_2"):
        old, new = (load_file(folder / part / "diffusion_pytorch_model.safetensors") for folder in (base, merged))
        changed = {name for name in old if not torch.equal(old[name], new[name])}
        assert len(changed) == 16
    assert read_json(merged / "videotune.json")["expert"] == ["high", "low"]


# ---- plan


@pytest.mark.parametrize("kind", PARTS)
def test_the_plan_counts_what_trains(
    kind: str, finished: Callable[[str], Path], said: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert plan(said("steps=4", *of_kind(kind)), as_json=True) == DONE
    facts = json.loads(capsys.readouterr().out)["adapter"]
    weights = load_file(finished(kind) / "checkpoints" / "step-4" / "weights.safetensors")
    assert facts["parameters"] == sum(value.numel() for value in weights.values())
    assert facts["modules"] == len(by_module(weights)) == sum(facts["groups"].values()) == 20
    assert facts["groups"]["blocks.*.attn1.to_out.0"] == 2


def test_the_plan_lists_every_module_by_its_kind(said: Say, capsys: pytest.CaptureFixture[str]) -> None:
    for targets, words in (
        ("feed_forward", "  2 × blocks.*.ffn.net.0.proj, 2 × blocks.*.ffn.net.2\n"),
        ('["blocks.1.attn2.to_q"]', "  1 × blocks.*.attn2.to_q\n"),
        ("cross_attention", "2 × blocks.*.attn2.to_q, 2 × blocks.*.attn2.to_k, 2 × blocks.*.attn2.to_v"),
    ):
        assert plan(said(f"lora.targets={targets}")) == DONE
        told = capsys.readouterr().out
        assert words in told
        assert "adapter: " in told
    assert plan(said(*LAYERS)) == DONE
    assert "1 × blocks.*.attn1.norm_q, " in capsys.readouterr().out


# ---- layers of a fine-tuning


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_chosen_layers_resume_to_the_bit_and_the_rest_stays(
    dtype: str, said: Say, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    words = (*LAYERS, f"train_dtype={dtype}", "learning_rate=0.01", "save_every=2")
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert train(said("steps=4", *words), straight) == DONE
    assert train(said("steps=2", *words), run) == DONE
    assert train(Overrides(sets=("steps=4",)), run, resume=Resume()) == DONE
    assert equal(state(run, 4), state(straight, 4))
    saved = load_file(run / "checkpoints" / "step-4" / "weights.safetensors")
    assert {name.split(".")[2] for name in saved} == {"attn1", "norm2"}
    base = load_file(tiny_bases("wan") / "transformer" / "diffusion_pytorch_model.safetensors")
    (line,) = [line for line in read_json(run / "exports.json") if line["path"].endswith("step-4")]
    written = load_file(run / line["path"] / "transformer" / "diffusion_pytorch_model.safetensors")
    assert set(written) == set(base)
    for name, value in written.items():
        rest = base[name].to(value.dtype)
        assert torch.equal(value, saved[name].to(value.dtype) if name in saved else rest), name
    with pytest.raises(VideotuneError, match=r"transformer\.layers"):
        train(Overrides(sets=('transformer.layers=["blocks.0"]',)), run, resume=Resume())
