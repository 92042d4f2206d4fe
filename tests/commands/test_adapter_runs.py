"""Runs of each kind: optimizers, adapters, layers, rounded weights; resumed to the bit,
begun from another run's weights under a fresh optimizer (--init-from), drawn from,
merged.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import read_back
from tests.support.command_line import (
    Bases,
    Patch,
    Printed,
    export,
    plan,
    sample,
    train,
)
from tests.support.run_parts import build_trainer, open_run
from tests.support.run_processes import Finished, Make, Work, resume
from tests.support.run_results import (
    assert_same_run,
    complete,
    largest_difference,
    of_kind,
    same_tensors,
    state,
    steps_of,
    updates,
)
from videotune.adapters.adapter_types import PARTS, by_module
from videotune.commands.export import export as export_command
from videotune.commands.sample import open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.config.optimizers import OPTIMIZERS
from videotune.config.resolve import parse
from videotune.distributed import DistributedContext
from videotune.errors import DONE, VideotuneError
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import convert
from videotune.files import read_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.planner import read_step
from videotune.planner.plan import bytes_a_parameter
from videotune.runs.checkpoint import last_checkpoint
from videotune.runs.checkpoint_writer import entry_of
from videotune.runs.run_dir import read_run_config
from videotune.trainer.build import open_models

FULL = ("training_method=FINE_TUNE", "train_dtype=BFLOAT_16", "learning_rate=0.001")

ADAPTER = ("lora.rank=4", "lora.targets=linear")
SCALED = (*ADAPTER, "lora.alpha=6", "lora.dropout=0.2")
ROUNDED = (*FULL, "optimizer.masters=STOCHASTIC_ROUNDING")
KINDS = {
    "PRODIGY": ("optimizer=PRODIGY", "learning_rate=1"),
    "MUON": ("optimizer=MUON", "timestep_stratified=true", "batch_size=2", "ema=0.5"),
    "LION_8BIT": ("optimizer=LION_8BIT", "lora.rank=64", "timestep_distribution=BETA"),
    "rounded by chance": (*ROUNDED, "ema=0.5"),
    "rounded by chance within backward": (*ROUNDED, "optimizer.step_in_backward=true"),
    **{kind: (f"lora.variant={kind}", *SCALED) for kind in ("DORA", "LOHA", "LOKR")},
    "OFT": ("lora.variant=OFT", *ADAPTER),
    "class": ("optimizer=AggMo", 'optimizer.args={"betas":[0.0,0.9]}', *ADAPTER),
    "class within backward": (
        "optimizer=StableAdamW",
        "optimizer.step_in_backward=true",
        *FULL,
    ),
    "layers": (*FULL, 'transformer.layers=["blocks.1.attn1", "norm2"]'),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_never_stopped(kind: str, work: Work) -> None:
    straight = work.finished(*KINDS[kind], "steps=4", "save_every=2")
    run = shutil.copytree(straight, work.run)
    assert resume(run, step=2) == DONE
    assert_same_run(run, straight, 2, 4)


def test_several_processes_cannot_update_within_backward(work: Work) -> None:

    job = open_run(
        work.overrides("optimizer.step_in_backward=true"), work.run, None
    ).job
    with pytest.raises(VideotuneError, match="2 processes must sum their gradients"):
        build_trainer(job, work.run, dist=DistributedContext(0, 2))


@pytest.mark.parametrize("kind", ["ADAMW", "LION_8BIT", "MUON", "SCHEDULE_FREE"])
def test_the_plan_knows_how_large_a_checkpoint_gets(
    kind: str, finished: Finished
) -> None:
    """To a tenth of what lies there, and never much less; small matrices are kept in
    float32 whatever their optimizer.
    """
    averaged = () if kind == "SCHEDULE_FREE" else ("ema=0.9",)
    run = finished(f"optimizer={kind}", "lora.rank=256", "steps=1", *averaged)
    there = sum(
        value.numel() * value.element_size() for value in state(run, 1).values()
    )
    plan, config = (
        read_json(run / "plan.json"),
        parse(read_json(run / "config.json")["settings"]),
    )
    planned = plan["disk"]["checkpoint_bytes"]
    each = OPTIMIZERS[config.optimizer.name].state_bytes
    assert planned == bytes_a_parameter(config, each) * plan["adapter"]["parameters"]
    assert 0.9 * there <= planned <= 1.25 * there


def test_the_plan_knows_the_preconditioners_of_a_class(finished: Finished) -> None:
    """SOAP keeps the squares of both sides of each matrix."""
    run = finished("optimizer=SOAP", "lora.rank=4", "steps=2")
    there = sum(value.nbytes for value in state(run, 2).values())
    plan = read_json(run / "plan.json")
    weights = 4 * plan["adapter"]["parameters"]
    assert there > 6 * weights
    planned = plan["disk"]["checkpoint_bytes"]
    assert planned == pytest.approx(there, rel=0.1)


SETS = (
    "save_every=2",
    "samples=1",
    "sample_after=4",
    "sample.steps=2",
    "sample.guidance=1",
    "validate_every=4",
)
QUANTIZED = (*SETS, "weight_dtype=NFLOAT_4")


@pytest.fixture
def straight(finished: Finished) -> Path:
    """A run of four steps over a tiny base in NFLOAT_4."""
    return finished("steps=4", *QUANTIZED)


def test_resumed_is_never_stopped_and_streamed_from_there(
    straight: Path, work: Work
) -> None:
    """Quantizing anew gives the same bits; another place for the weights too; another
    dtype is refused.
    """
    run = work.train("steps=2", *QUANTIZED)
    assert resume(run, "steps=4", "layer_offload_fraction=1") == DONE
    assert_same_run(run, straight, 4)
    for key in ("weight_dtype", "text_encoder.weight_dtype"):
        with pytest.raises(VideotuneError, match=f"{key}: '.*' -> 'FLOAT_8'"):
            resume(run, f"{key}=FLOAT_8", "steps=5")


def test_validation_and_samples_are_of_the_quantized_base(
    straight: Path, finished: Finished
) -> None:
    from videotune.memory.quantization import QuantizedLinear

    plain = finished("steps=1", "validate_every=4")
    one, other = (
        of_kind(run, "validation")[0]["train"]["mean"] for run in (straight, plain)
    )
    assert one != other
    assert one == pytest.approx(other, rel=0.05)
    sampler = open_sampler(SampleOptions(("a red circle",), run=straight))
    (net,) = sampler.nets.values()
    assert any(isinstance(layer, QuantizedLinear) for layer in net.modules())
    assert list(straight.glob("samples/**/*.mp4")), "and previews were drawn"


def test_a_merged_model_is_the_base_s_own_numbers_and_the_adapter(
    straight: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    """Not the rounded ones: what the adapter does not change is the base's to the bit,
    and what it does is near it.
    """
    assert export(straight, out=tmp_path / "whole", merge=True) == DONE
    (folder,) = filter(Path.is_dir, (tmp_path / "whole").iterdir())
    name = "transformer/diffusion_pytorch_model.safetensors"
    ours, base = load_file(folder / name), load_file(tiny_bases("wan") / name)
    assert ours.keys() == base.keys()
    weights = last_checkpoint(straight).load("weights")
    changed = {key for key in base if not torch.equal(ours[key], base[key])}
    assert changed == {
        f"{key.removesuffix('.lora_A.weight')}.weight"
        for key in weights
        if "lora_A" in key
    }
    for key in changed:
        path = key.removesuffix(".weight")
        update = (
            weights[f"{path}.lora_B.weight"].double()
            @ weights[f"{path}.lora_A.weight"].double()
        )
        torch.testing.assert_close(
            ours[key], (base[key].double() + update).float(), rtol=0, atol=1e-6
        )


KIN = ("DORA", "LOHA", "LOKR", "OFT")
LAYERS = ("training_method=FINE_TUNE", 'transformer.layers=["blocks.1.attn1", "norm2"]')


def settings_of(kind: str) -> tuple[str, ...]:
    more = () if kind == "OFT" else ("lora.alpha=6", "lora.dropout=0.2")
    return (f"lora.variant={kind}", "lora.rank=4", "lora.targets=linear", *more)


@pytest.fixture
def of_variant(finished: Finished) -> Bases:
    """A run of four steps of a variant, exported in each format that it has."""

    def get(variant: str) -> Path:
        named = {"LORA": '["diffusers"]', "DORA": '["diffusers"]', "OFT": '["peft"]'}
        forms = named.get(variant, '["peft", "comfyui"]')
        return finished(
            "steps=4",
            "save_every=2",
            f"output_model_format={forms}",
            *settings_of(variant),
        )

    return get


@pytest.mark.parametrize("kind", KIN)
def test_a_run_begins_from_a_checkpoint_and_from_each_file_of_its_kind(
    kind: str, of_variant: Bases, work: Work
) -> None:
    """Exactly: ΔW in float64, also under another alpha; DoRA's magnitudes too."""
    run = of_variant(kind)
    checkpoint = run / "checkpoints" / "step-4"
    wanted = updates(
        load_file(checkpoint / "weights.safetensors"), 1.0 if kind == "OFT" else 1.5
    )
    more = settings_of(kind) if kind == "OFT" else (*settings_of(kind), "lora.alpha=2")
    # Other tests merge the model of this run.
    files = [
        run / line["path"]
        for line in read_json(run / "exports.json")
        if "merged" not in line["format"]
    ]
    sources = [checkpoint, *files]
    for index, source in enumerate(sources):
        ours = begun(
            work.overrides("steps=2", *more, f"init_from={source}"),
            work.tmp / str(index),
        ).parameters
        assert (
            largest_difference(updates(ours, 1.0 if kind == "OFT" else 0.5), wanted)
            < 1e-6
        ), source


def test_kinds_are_not_mixed_and_shapes_must_fit(of_variant: Bases, work: Work) -> None:
    loha, lora = (
        of_variant(kind) / "checkpoints" / "step-4" for kind in ("LOHA", "LORA")
    )
    for source, sets, words in (
        (
            loha,
            ("lora.rank=4", "lora.targets=linear"),
            "is LOHA, and lora.variant is LORA",
        ),
        (lora, settings_of("DORA"), "is LORA, and lora.variant is DORA"),
        (loha, (*settings_of("LOHA"), "lora.rank=2"), "Set lora.rank as it was there"),
        (
            loha,
            (*settings_of("LOHA"), "lora.targets=attention"),
            "4 modules that do not train here",
        ),
    ):
        with pytest.raises(VideotuneError, match=words):
            train(work.overrides("steps=2", *sets, f"init_from={source}"), work.run)


SIZE = (
    "sample.frames=5",
    "sample.resolution=32x32",
    "sample.steps=2",
    "sample.guidance=1",
)


def rendered(**words: Any) -> np.ndarray:
    """The frames before they are compressed."""
    (frames,) = render(
        open_sampler(SampleOptions(("a red circle",), 3, sets=SIZE, **words)),
        ["a red circle"],
        [3],
    )
    return frames.astype(int)


@pytest.mark.parametrize(
    "kind",
    [
        "DORA",
        "LOKR",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("LOHA", "OFT")),
    ],
)
def test_a_run_its_files_and_its_merged_model_draw_the_same(
    kind: str, of_variant: Bases, tiny_bases: Bases, tmp_path: Path
) -> None:
    run, base = of_variant(kind), str(tiny_bases("wan"))
    wanted = rendered(run=run)
    files = [
        line
        for line in read_json(run / "exports.json")
        if "merged" not in line["format"]
    ]
    for line in files:
        assert (
            np.abs(rendered(base=base, loras=(run / line["path"],)) - wanted).max() <= 1
        )
    assert export(run, merge=True) == DONE
    merged = run / "export" / "run-step-4-merged"
    of_merged = [line["path"] for line in read_json(run / "exports.json")][-2:]
    file = f"{merged.name}-comfyui.safetensors"
    assert of_merged == [f"export/{merged.name}", f"export/{file}"]
    assert np.abs(rendered(base=str(merged)) - wanted).max() <= 1
    assert np.abs(rendered(base=base) - wanted).max() > 1
    facts = read_json(merged / "videotune.json")
    assert (facts["merged"], facts["step"]) == (kind, 4)
    assert facts["use"] == "pipe = WanPipeline.from_pretrained(THIS_FOLDER)"
    weights = load_file(merged / "transformer" / "diffusion_pytorch_model.safetensors")
    joined = load_file(merged.with_name(file))
    query = joined["blocks.0.self_attn.q.weight"]
    assert torch.equal(query, weights["blocks.0.attn1.to_q.weight"])

    with pytest.raises(VideotuneError, match="--format diffusers for the folder"):
        export_command(run, ("comfyui",), merge=True)
    export_command(run, ("diffusers",), merge=True, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [merged.name]


@pytest.mark.parametrize("kind", ["LORA", "DORA"])
def test_modules_with_scales_of_their_own_are_drawn_and_merged_as_trained(
    kind: str, finished: Finished, tiny_bases: Bases, tmp_path: Path
) -> None:
    rules = 'lora.modules=[{"pattern": "to_q", "rank": 2, "alpha": 20}]'
    run, base = (
        finished("steps=4", "save_every=2", *settings_of(kind), rules),
        str(tiny_bases("wan")),
    )
    wanted = rendered(run=run)
    line, *_ = read_json(run / "exports.json")
    assert np.abs(rendered(base=base, loras=(run / line["path"],)) - wanted).max() <= 1
    half, *_ = export_command(run, dtype="bfloat_16", out=tmp_path)
    assert {value.dtype for value in load_file(half.path).values()} == {torch.bfloat16}
    assert export(run, merge=True) == DONE
    assert (
        np.abs(rendered(base=str(run / "export" / "run-step-4-merged")) - wanted).max()
        <= 1
    )
    assert np.abs(rendered(base=base) - wanted).max() > 1
    for words in ({"merge": True, "dtype": "FLOAT_16"}, {"dtype": "FLOAT_8"}):
        with pytest.raises(VideotuneError, match="dtype"):
            export_command(run, **words)


def test_kinds_without_degrees_have_no_strength(
    of_variant: Bases, tiny_bases: Bases, tmp_path: Path
) -> None:
    for kind in ("OFT", "DORA"):
        with pytest.raises(
            VideotuneError, match=f"sample.strength: {kind} cannot be scaled"
        ):
            sample(
                SampleOptions(("a",), run=of_variant(kind), strength=0.5, sets=SIZE),
                tmp_path,
            )
    off, on = (
        rendered(run=of_variant("LOKR"), strength=strength) for strength in (0.0, 1.0)
    )
    assert np.abs(off - on).max() > 1
    assert np.abs(off - rendered(base=str(tiny_bases("wan")))).max() <= 1


def test_merging_what_has_no_adapter_is_refused(of_variant: Bases, work: Work) -> None:
    with pytest.raises(
        VideotuneError,
        match="--merge: it writes a folder in diffusers layout",
    ):
        export(of_variant("LORA"), ["comfyui"], merge=True)
    with pytest.raises(
        VideotuneError, match="--merge: a fine-tuned model has no adapter"
    ):
        export(
            work.finished("steps=4", "save_every=2", *LAYERS, "train_dtype=FLOAT_32"),
            merge=True,
        )


# ---- plan


@pytest.fixture
def _plain_step(overrides: Make, monkeypatch: Patch) -> None:
    """The memory of a step, which takes seconds to read, is that of the plain adapter."""
    job = open_job(*resolve_config(overrides("steps=4")))
    step = read_step.step_spec(job, "FLOAT_32")
    monkeypatch.setattr(read_step, "_read_cached", lambda file: step)


@pytest.mark.usefixtures("_plain_step")
@pytest.mark.parametrize("kind", PARTS)
def test_the_plan_counts_what_trains(
    kind: str, of_variant: Bases, overrides: Make, capsys: Printed
) -> None:
    weights = load_file(
        of_variant(kind) / "checkpoints" / "step-4" / "weights.safetensors"
    )
    capsys.readouterr()
    assert plan(overrides("steps=4", *settings_of(kind)), as_json=True) == DONE
    facts = json.loads(capsys.readouterr().out)["adapter"]
    assert facts["parameters"] == sum(value.numel() for value in weights.values())
    assert (
        facts["modules"]
        == len(by_module(weights))
        == sum(facts["groups"].values())
        == 20
    )
    assert facts["groups"]["blocks.*.attn1.to_out.0"] == 2


@pytest.mark.usefixtures("_plain_step")
@pytest.mark.parametrize(
    ("sets", "listed"),
    [
        (
            ("lora.targets=feed_forward",),
            "  2 × blocks.*.ffn.net.0.proj, 2 × blocks.*.ffn.net.2\n",
        ),
        (('lora.targets=["blocks.1.attn2.to_q"]',), "  1 × blocks.*.attn2.to_q\n"),
        (
            ("lora.targets=cross_attention",),
            "2 × blocks.*.attn2.to_q, 2 × blocks.*.attn2.to_k",
        ),
        (LAYERS, "1 × blocks.*.attn1.norm_q, "),
    ],
)
def test_the_plan_lists_modules_by_pattern(
    sets: tuple[str, ...], listed: str, overrides: Make, capsys: Printed
) -> None:
    assert plan(overrides(*sets), verbose=True) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(listed.split()) in printed


# ---- layers of a fine-tuning


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_chosen_layers_are_exported_in_the_whole_model(
    dtype: str, finished: Finished, tiny_bases: Bases
) -> None:
    run = finished("steps=4", "save_every=2", *LAYERS, f"train_dtype={dtype}")
    saved = load_file(run / "checkpoints" / "step-4" / "weights.safetensors")
    assert {name.split(".")[2] for name in saved} == {"attn1", "norm2"}
    base = load_file(
        tiny_bases("wan") / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    (line,) = [
        line
        for line in read_json(run / "exports.json")
        if line["path"].endswith("step-4")
    ]
    written = load_file(
        run / line["path"] / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    assert set(written) == set(base)
    for name, value in written.items():
        assert torch.equal(value, saved.get(name, base[name]).to(value.dtype)), name
    with pytest.raises(VideotuneError, match=r"transformer\.layers"):
        resume(run, 'transformer.layers=["blocks.0"]')


# ---- --init-from


ALPHA = 3.0


LORA = (
    "lora.rank=4",
    f"lora.alpha={ALPHA}",
    'output_model_format=["diffusers", "comfyui"]',
)
WHOLE = ("training_method=FINE_TUNE", "learning_rate=0.001")


@pytest.fixture
def adapter(finished: Finished) -> Path:
    """A run of three steps with an alpha of its own, exported in both forms."""
    return finished("steps=3", *LORA)


def begun(overrides: Overrides, run: Path) -> Any:
    """A run before its first step."""
    trainer = build_trainer(open_run(overrides, run, None).job, run, False)
    trainer.journal.close()
    return trainer


FILES = ["run-step-3.safetensors", "run-step-3-comfyui.safetensors", "checkpoint"]


def place(run: Path, name: str) -> Path:
    return (
        run / "checkpoints" / "step-3"
        if name == "checkpoint"
        else run / "export" / name
    )


def delta_of(
    run: Path, name: str, overrides: Overrides, tmp_path: Path
) -> dict[str, torch.Tensor]:
    """What the file does to each weight, by diffusers' own loader; of a checkpoint by
    its run's rank and alpha.
    """
    if name != "checkpoint":
        job = open_run(overrides, tmp_path / "none", None).job
        return read_back(open_models(job.spec, job.base, job.config), place(run, name))
    return updates(load_file(place(run, name) / "weights.safetensors"), ALPHA / 4)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("rank", "alpha"), [(4, 1.5), (8, None)])
def test_the_run_begins_with_what_the_file_does(
    name: str, rank: int, alpha: float | None, adapter: Path, work: Work
) -> None:
    """Exactly: ΔW in float64, whatever the rank and alpha of the new run are.

    Rows of A that the file does not fill keep their draw, so that they can learn.
    """
    more = (
        "steps=2",
        f"lora.rank={rank}",
        *([f"lora.alpha={alpha}"] if alpha else []),
        "ema.decay=0.9",
    )
    wanted = delta_of(adapter, name, work.overrides(*more), work.tmp)
    plain = begun(work.overrides(*more), work.tmp / "plain").parameters
    trainer = begun(
        work.overrides(*more, f"init_from={place(adapter, name)}"), work.run
    )
    assert (
        largest_difference(updates(trainer.parameters, (alpha or rank) / rank), wanted)
        < 1e-6
    )
    assert same_tensors(dict(trainer.result), dict(trainer.parameters)), (
        "the average begins at the same weights"
    )
    assert not any(trainer.pool.trainable.optimizer.state.values()), "a fresh optimizer"
    for key, value in trainer.parameters.items():
        assert (
            not bool(value[:, 4:].any())
            if ".lora_B." in key
            else torch.equal(value[4:], plain[key][4:])
        )
        assert rank == 4 or ".lora_B." in key or bool(value[4:].any())


def test_a_run_begins_with_the_form_of_any_program(
    tiny_bases: Bases, adapter: Path, work: Work
) -> None:
    """A folder of PEFT's, one of diffusers', musubi's names: each is the same LoRA."""
    more, base = ("steps=2", "lora.rank=4"), str(tiny_bases("wan"))
    wanted = delta_of(adapter, FILES[0], work.overrides(*more), work.tmp)
    (work.tmp / "folder").mkdir()
    forms = {"peft": work.tmp / "peft", "kohya": work.tmp / "k.safetensors"}
    forms["diffusers"] = work.tmp / "folder" / "pytorch_lora_weights.safetensors"
    for form, out in forms.items():
        convert(place(adapter, FILES[0]), Target(out, form, base))
    for source in (*list(forms.values())[:2], work.tmp / "folder"):
        trainer = begun(
            work.overrides(*more, f"init_from={source}"),
            work.tmp / f"run of {source.name}",
        )
        assert largest_difference(updates(trainer.parameters, 1.0), wanted) < 1e-6


@pytest.mark.parametrize("kind", ["LOHA", "LOKR"])
def test_a_run_begins_with_a_file_of_lycoris(kind: str, work: Work) -> None:
    """Its flat names and its alpha, half the rank; the shapes are those that the
    variant has here.
    """
    plain = begun(
        work.overrides("steps=2", "lora.rank=2", f"lora.variant={kind}"),
        work.tmp / "plain",
    ).parameters
    tensors = {}
    for seed, (path, parts) in enumerate(by_module(plain).items()):
        flat = f"lycoris_{path.replace('.', '_')}"
        random = torch.Generator().manual_seed(seed)
        tensors |= {
            f"{flat}.{part}": torch.randn(value.shape, generator=random)
            for part, value in parts.items()
        }
        tensors[f"{flat}.alpha"] = torch.tensor(1.0)
    save_file(tensors, work.tmp / "a.safetensors")
    halved = any("w2_b" in key for key in tensors)
    more = (
        "steps=2",
        "lora.rank=2",
        "lora.alpha=4",
        f"lora.variant={kind}",
        f"init_from={work.tmp / 'a.safetensors'}",
    )
    found = updates(begun(work.overrides(*more), work.run).parameters, 2.0)
    theirs = {
        name: tensors[
            f"lycoris_{name.rpartition('.')[0].replace('.', '_')}.{name.rpartition('.')[2]}"
        ]
        for name in plain
    }
    for path, parts in by_module(theirs).items():
        scale = 0.5 if halved and any(part.endswith("_b") for part in parts) else 1.0
        torch.testing.assert_close(
            found[path],
            updates(by_path(path, parts), scale)[path],
            rtol=1e-5,
            atol=1e-6,
        )


def by_path(path: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{path}.{part}": value for part, value in parts.items()}


def test_the_file_is_reported_and_kept_in_the_config(
    adapter: Path, work: Work, capsys: Printed
) -> None:
    file, settings = (
        place(adapter, FILES[0]),
        ("steps=2", "lora.rank=4", "validate_every=2"),
    )
    work.train(*settings, f"init_from={file}")
    printed = capsys.readouterr().err
    assert f"starting from the weights of {file} (" in printed
    assert "new optimizer state, step 0" in printed
    assert read_run_config(work.run)["settings"]["init_from"] == str(file)
    first, other = (
        of_kind(run, "validation")[0]["train"]["mean"]
        for run in (work.run, work.finished(*settings))
    )
    assert first != other, "the first validation is of the weights it began with"
    assert [line["step"] for line in steps_of(work.run)] == [1, 2]


WHOLE_RUN = ("steps=3", *WHOLE, "train_dtype=FLOAT_32")
REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    **{
        f"rank of {name}": (name, ("lora.rank=2",), r"rank 4 in .*. Set lora\.rank")
        for name in FILES
    },
    "modules": (
        "checkpoint",
        ("lora.rank=4", 'lora.targets=["to_q"]'),
        r"changes \d+ modules that do not train here",
    ),
    "wide file": ("wide.safetensors", ("lora.rank=4",), r"wide\.safetensors"),
    "wide checkpoint": (
        "step-3",
        ("lora.rank=4",),
        "was made for another base: .* differs in size",
    ),
    "missing": ("nothing", (), "no such file or folder"),
    "text": ("text.safetensors", (), "not a LoRA"),
    "folder": (
        "empty",
        (),
        "is not a complete checkpoint: its name is not that of a step",
    ),
    "incomplete": ("step-9", (), "is not a complete checkpoint: it has no COMPLETE"),
    "full for adapter": ("full", (), "holds no LoRA: its run trained every weight"),
    "adapter for full": ("checkpoint", WHOLE, "does not fit what trains"),
    "file for full": (
        FILES[0],
        WHOLE,
        "is a file, and FINE_TUNE starts from the folder of a checkpoint",
    ),
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
        save_file(
            {
                key: torch.cat([value, value], 1 if ".lora_A." in key else 0)
                for key, value in tensors
            },
            wide,
        )
    marker = read_json(checkpoint / "COMPLETE")
    marker["files"]["weights.safetensors"] = entry_of(
        checkpoint / "weights.safetensors"
    )
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))
    if name == "full":
        source = place(work.finished(*WHOLE_RUN), "checkpoint")
    else:
        source = place(adapter, name) if name in FILES else work.tmp / name
    with pytest.raises(VideotuneError, match=named):
        train(work.overrides("steps=2", *sets, f"init_from={source}"), work.run)
    assert not (work.run / "config.json").exists()


@pytest.mark.parametrize(
    "sets", [(), ("training_method=EMBEDDING",), ("lora.variant=DORA",)]
)
def test_a_file_that_cannot_begin_a_run_is_refused_before_anything_is_encoded(
    sets: tuple[str, ...], work: Work
) -> None:
    file, cache = work.tmp / "other.safetensors", work.tmp / "own cache"
    save_file({"x": torch.zeros(1), "y": torch.zeros(2)}, file)
    with pytest.raises(VideotuneError, match=r"init_from|other"):
        train(
            work.overrides("steps=2", f"init_from={file}", f"cache_dir={cache}", *sets),
            work.run,
        )
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_fine_tuning_begins_from_a_checkpoint_s_folder(dtype: str, work: Work) -> None:
    folder = place(
        work.finished("steps=3", *WHOLE, f"train_dtype={dtype}"), "checkpoint"
    )
    trainer = begun(
        work.overrides(
            "steps=2", *WHOLE, f"train_dtype={dtype}", f"init_from={folder}"
        ),
        work.tmp / dtype,
    )
    saved = load_file(folder / "weights.safetensors")
    assert same_tensors(
        {name: value.detach() for name, value in trainer.parameters.items()}, saved
    )
    held = dict(trainer.net.named_parameters())
    assert all(
        torch.equal(held[name], value.to(held[name].dtype))
        for name, value in saved.items()
    )


def test_a_resume_from_a_checkpoint_does_not_need_the_file_and_one_from_0_does(
    adapter: Path, work: Work
) -> None:
    """A rollback to the beginning begins with the file, not with the base."""
    file, run = work.tmp / "file.safetensors", work.run
    shutil.copy(place(adapter, FILES[0]), file)
    assert (
        train(
            work.overrides(
                "steps=4", "save_every=2", "lora.rank=4", f"init_from={file}"
            ),
            run,
        )
        == DONE
    )
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
