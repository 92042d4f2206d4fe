"""What a file of a run says of itself: where it comes from, and the code that loads it."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.trainers import Lab, trainer_of
from videotune._version import __version__
from videotune.config.resolve import Resolved, parse
from videotune.config.sections import BaseLora
from videotune.files import hash_path
from videotune.runs.run_dir import read_run_config
from videotune.trainer.export import (
    COMFYUI_MODEL_USE,
    _has_merged_file,
    _use,
    export_run,
    shared_name,
)
from videotune.trainer.trainer import Trainer

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def trainer(
    tmp_path_factory: pytest.TempPathFactory, small_clips: Path, tiny_bases: Open
) -> Iterator[Trainer]:
    """A run of a model with two experts, before its first step."""
    tmp = tmp_path_factory.mktemp("facts")
    lab = Lab(tiny_bases("wan", "t2v-a14b"), small_clips, tmp / "cache", tmp)
    trainer = trainer_of(lab, {"steps": 6, "lora.targets": "attention"})
    yield trainer
    trainer.journal.close()


@pytest.fixture(scope="module")
def state(trainer: Trainer) -> dict[str, Tensor]:
    """Weights that have learnt something."""
    return {
        name: torch.full_like(value, 0.01) for name, value in trainer.result.items()
    }


def changed(trainer: Trainer, **settings: Any) -> Resolved:
    """The run's config with other settings."""
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(update=settings)
    return replace(resolved, config=config)


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["videotune"])
    return facts


def listed(trainer: Trainer) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(
        (trainer.run / "exports.json").read_text()
    )
    return entries


def test_a_file_says_which_run_made_it_and_on_which_base(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """It is made to be shared, so it names no folder of this machine."""
    config = trainer.job.config
    (dataset,) = config.datasets
    loras = [
        BaseLora(file="/me/turbo.safetensors", strength=0.5, training_only=True),
        BaseLora(file="style.safetensors"),
    ]
    resolved = changed(
        trainer,
        base_parts="/me/parts",
        base_loras=loras,
        transformer=config.transformer.model_copy(
            update={"file": ["/me/high.safetensors", "", "low.safetensors"]}
        ),
        datasets=[dataset.model_copy(update={"trigger": "sks"}), dataset],
        ema=config.ema.model_copy(update={"decay": 0.9}),
    )
    high, low = export_run(
        trainer.run, trainer.family, state, 3, resolved, ["comfyui"], tmp_path
    )
    facts = header_of(high.path)
    run_config = read_run_config(trainer.run)
    name = Path(run_config["base"]["name"]).name
    expected = {
        "videotune": __version__,
        "base": {**run_config["base"], "name": name, "parts": "parts"},
        "transformer_file": ["high.safetensors", "low.safetensors"],
        "base_loras": [
            {"file": "turbo.safetensors", "strength": 0.5, "training_only": True},
            {"file": "style.safetensors", "strength": 1.0, "training_only": False},
        ],
        "data": run_config["data"],
        "step": 3,
        "steps": 6,
        "effective_batch": trainer.job.effective_batch,
        "views_by_the_end": trainer.plan["views"]["per_window"],
        "triggers": ["sks"],
        "fps": config.video_config.target_fps,
        "buckets": [str(shape) for shape in trainer.job.shapes],
        "ema": 0.9,
        "expert": "high",
        "variant": "LORA",
        "rank": 2,
        "alpha": "baked into lora_B",
    }
    assert facts.pop("use") == high.use
    assert len(facts.pop("digest")) == 16
    assert facts == expected
    assert header_of(low.path)["expert"] == "low"
    file, *_ = export_run(
        trainer.run, trainer.family, state, 3, resolved, ["diffusers"], tmp_path
    )
    assert "from_pretrained('parts')" in file.use.replace('"', "'")
    file, *_ = export_run(
        trainer.run, trainer.family, state, 3, changed(trainer), ["diffusers"], tmp_path
    )
    assert f"from_pretrained('{name}')" in file.use.replace('"', "'")

    one_file = config.transformer.model_copy(update={"file": "/me/one.safetensors"})
    resolved = changed(trainer, transformer=one_file)
    high, _ = export_run(
        trainer.run, trainer.family, state, 3, resolved, ["comfyui"], tmp_path
    )
    assert header_of(high.path)["transformer_file"] == ["one.safetensors"]
    (plain, _) = export_run(
        trainer.run, trainer.family, state, 3, changed(trainer), ["comfyui"], tmp_path
    )
    assert {"base_loras", "transformer_file"}.isdisjoint(header_of(plain.path))
    assert "parts" not in header_of(plain.path)["base"]


def test_files_are_named_by_run_step_format_and_expert_and_listed_once(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    run, family = trainer.run, trainer.family
    resolved = changed(trainer, output_model_destination=str(tmp_path))
    names = [f"{run.name}-step-2_{expert}_noise" for expert in ("high", "low")]
    comfyui = [name.replace("-step-2", "-step-2-comfyui") for name in names]
    exported = export_run(run, family, state, 2, resolved, ["diffusers", "comfyui"])
    assert [file.path for file in exported] == [
        tmp_path / f"{name}.safetensors" for name in (*names, *comfyui)
    ]
    before = [entry for entry in listed(trainer) if "-step-2" in entry["path"]]
    assert [entry["hash"] for entry in before] == [
        hash_path(file.path) for file in exported
    ]

    # Written again they are still listed once, with the new content.
    doubled = {name: 2 * value for name, value in state.items()}
    export_run(run, family, doubled, 2, resolved, ["diffusers"])
    after = [entry for entry in listed(trainer) if "-step-2" in entry["path"]]
    assert [entry["path"] for entry in after] == [
        entry["path"] for entry in (*before[2:], *before[:2])
    ]
    assert after[:2] == before[2:]
    assert after[2]["hash"] != before[0]["hash"]


def test_a_merged_model_is_a_folder_and_a_file_for_each_expert(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    run, family, resolved = trainer.run, trainer.family, trainer.job.resolved
    folder, *files = export_run(
        run, family, state, 4, resolved, out=tmp_path, merge=True
    )
    name = f"{run.name}-step-4-merged"
    assert folder.path == tmp_path / name
    facts = json.loads((folder.path / "videotune.json").read_text())
    assert (facts["merged"], facts["step"]) == ("LORA", 4)
    assert facts["expert"] == ["high", "low"]
    assert (
        facts["use"] == folder.use == "pipe = WanPipeline.from_pretrained(THIS_FOLDER)"
    )

    assert [file.path.name for file in files] == [
        f"{name}-comfyui_{expert}_noise.safetensors" for expert in ("high", "low")
    ]
    for file, expert in zip(files, ("high", "low"), strict=True):
        facts = header_of(file.path)
        assert (facts["merged"], facts["expert"]) == ("LORA", expert)
        assert facts["use"] == file.use == COMFYUI_MODEL_USE

    # Those of one expert that trains: the other one's weights are the base's.
    of_low = {key: value for key, value in state.items() if key.startswith("low")}
    alone = changed(trainer, experts="low")
    folder, *files = export_run(run, family, of_low, 5, alone, out=tmp_path, merge=True)
    facts = json.loads((folder.path / "videotune.json").read_text())
    assert facts["expert"] == ["low"]
    assert [header_of(file.path)["expert"] for file in files] == ["low"]
    chosen = export_run(
        run, family, of_low, 6, alone, ["diffusers"], tmp_path, merge=True
    )
    assert [file.path for file in chosen] == [tmp_path / f"{run.name}-step-6-merged"]


PATCH = "patch_embedding.weight"
"""A weight that has one name in diffusers and in the authors' files."""


def test_all_weights_of_an_expert_are_a_file_or_a_folder(
    trainer: Trainer, tmp_path: Path
) -> None:
    """With those of text encoders in the folder, in the dtype that the config says."""
    run, family = trainer.run, trainer.family
    low = dict(family.denoiser("low").named_parameters())[PATCH].detach()
    text = dict(family.text_parts()["text_encoder"].encoder.named_parameters())
    name, value = next(iter(text.items()))
    state = {f"low.{PATCH}": low + 1, f"low.text_encoder.{name}": value.detach() + 1}
    settings = {"training_method": "FINE_TUNE", "experts": "low"}
    half = changed(trainer, output_dtype="FLOAT_16", **settings)
    base = Path(trainer.job.config.base_model_name)
    notes: list[str] = []

    weights = {f"low.{PATCH}": low + 1}
    (file,) = export_run(
        run, family, weights, 7, half, ["comfyui"], tmp_path, notes.append
    )
    assert file.path == tmp_path / f"{run.name}-step-7-comfyui_low_noise.safetensors"
    facts = header_of(file.path)
    assert (facts["expert"], facts["step"], facts["use"]) == (
        "low",
        7,
        COMFYUI_MODEL_USE,
    )
    assert torch.equal(load_file(file.path)[PATCH], (low + 1).half())

    plain = changed(trainer, **settings)
    for resolved, dtype in ((half, torch.float16), (plain, torch.float32)):
        (folder,) = export_run(run, family, state, 8, resolved, ["diffusers"], tmp_path)
        assert folder.path == tmp_path / f"{run.name}-step-8_low_noise"
        facts = json.loads((folder.path / "videotune.json").read_text())
        assert facts["expert"] == "low"
        assert facts["use"] == "pipe = WanPipeline.from_pretrained(THIS_FOLDER)"
        (own,) = (folder.path / "transformer_2").glob("*.safetensors")
        (encoder,) = (folder.path / "text_encoder").glob("*.safetensors")
        assert torch.equal(load_file(own)[PATCH], (low + 1).to(dtype))
        written = load_file(encoder)[name]
        assert torch.equal(written, (value.detach() + 1).to(written.dtype))
        (high,) = (folder.path / "transformer").glob("*.safetensors")
        (of_base,) = (base / "transformer").glob("*.safetensors")
        assert hash_path(high) == hash_path(of_base)
    assert notes == []


def test_an_adapter_is_written_with_its_strength_and_dtype(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Each expert's own tensors: B has the scale, and alpha is the rank."""
    lora = trainer.job.config.lora.model_copy(update={"alpha": 6})
    resolved = changed(trainer, lora=lora, output_dtype="FLOAT_16")
    own = {
        name: value * (2 if name.startswith("low.") else 1)
        for name, value in state.items()
    }
    files = export_run(
        trainer.run, trainer.family, own, 9, resolved, ["diffusers"], tmp_path
    )
    for file, factor in zip(files, (1, 2), strict=True):
        tensors = load_file(file.path)
        assert len(tensors) == len(state) / 2
        for name, tensor in tensors.items():
            scale = 3.0 if "lora_B" in name else 1.0
            expected = torch.full_like(tensor, 0.01 * factor * scale)
            assert tensor.dtype == torch.float16
            torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=0)


def test_a_run_s_name_is_made_fit_for_files(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Without a folder they are in the run's own."""
    run = tmp_path / "a run, nr. 3_b-c"
    run.mkdir()
    for name in ("run.json", "plan.json", "config.json"):
        if (trainer.run / name).exists():
            shutil.copy(trainer.run / name, run)
    exported = export_run(
        run, trainer.family, state, 2, trainer.job.resolved, ["diffusers"]
    )
    folder = run / "export"
    assert [file.path for file in exported] == [
        folder / f"a_run__nr__3_b-c-step-2_{expert}_noise.safetensors"
        for expert in ("high", "low")
    ]
    entries = json.loads((run / "exports.json").read_text())
    assert [entry["path"] for entry in entries] == [
        str(file.path.relative_to(run)) for file in exported
    ]


def test_modules_with_scales_of_their_own_are_written_with_one(
    trainer: Trainer, state: dict[str, Tensor], tmp_path: Path
) -> None:
    config = trainer.job.config
    rules = parse({"lora": {"modules": [{"pattern": ".*attn1.*", "alpha": 8}]}}).lora
    lora = config.lora.model_copy(update={"modules": rules.modules})
    plain, scaled = (
        export_run(
            trainer.run,
            trainer.family,
            state,
            9,
            resolved,
            ["diffusers"],
            tmp_path / at,
        )
        for at, resolved in (
            ("plain", changed(trainer)),
            ("scaled", changed(trainer, lora=lora)),
        )
    )
    for one, other in zip(plain, scaled, strict=True):
        first, second = load_file(one.path), load_file(other.path)
        assert first.keys() == second.keys()
        for name, value in first.items():
            is_scaled = ".attn1." in name and "lora_B" in name
            factor = 8 / lora.rank if is_scaled else 1
            torch.testing.assert_close(second[name], value * factor)


def test_a_file_of_weights_alone_is_not_written_where_connectors_are_merged(
    tiny_family: Open,
) -> None:
    notes: list[str] = []
    assert _has_merged_file(tiny_family("wan"), notes.append)
    assert notes == []
    family = tiny_family("ltx2")
    family.spec = family.spec.with_connectors()
    assert not _has_merged_file(family, notes.append)
    (note,) = notes
    assert "text connectors" in note


def test_of_a_local_base_only_the_last_part_is_named() -> None:
    assert shared_name("/me/models/wan") == "wan"
    assert shared_name("Wan-AI/Wan2.1-T2V") == "Wan-AI/Wan2.1-T2V"


LOAD = "pipe = WanPipeline.from_pretrained('base'); "
LORA = "pipe.load_lora_weights(THIS_FILE)"
SECOND = "pipe.load_lora_weights(THIS_FILE, load_into_transformer_2=True)"
BELOW = {
    "base_loras": [
        {"file": "/me/a.safetensors", "strength": 0.5},
        {"file": "hidden.safetensors", "training_only": True},
        {"file": "b.safetensors"},
    ]
}
ON_TOP = (
    "pipe.load_lora_weights('a.safetensors', adapter_name='base_0'); "
    "pipe.load_lora_weights('b.safetensors', adapter_name='base_1'); "
    "pipe.load_lora_weights(THIS_FILE, adapter_name='new'); "
    "pipe.set_adapters(['base_0', 'base_1', 'new'], [0.5, 1.0, 1.0])"
)


@pytest.mark.parametrize(
    ("settings", "expert", "use"),
    [
        ({}, "high", LOAD + LORA),
        ({}, "low", LOAD + SECOND),
        ({"lora": {"variant": "DORA"}}, "high", LOAD + LORA),
        (BELOW, "high", LOAD + ON_TOP),
    ],
)
def test_a_lora_comes_with_the_code_that_loads_it(
    settings: dict[str, Any],
    expert: str,
    use: str,
    tiny_family: Open,
) -> None:
    """On top of those that it was trained on, but for what helped training only."""
    family = tiny_family("wan", variant="t2v-a14b")
    facts = _use(family, parse(settings), expert, "diffusers", "base")
    compile(use, "use", "exec")
    variant = settings.get("lora", {}).get("variant", "LORA")
    assert facts == {
        "variant": variant,
        "rank": parse(settings).lora.rank,
        "alpha": "baked into lora_B",
        "use": use,
    }


@pytest.mark.parametrize(
    ("variant", "alpha"),
    [
        ("LOHA", "baked into the weights"),
        ("LOKR", "baked into the weights"),
        ("OFT", "none"),
    ],
)
def test_what_diffusers_does_not_read_comes_with_code_for_peft(
    variant: str, alpha: str, tiny_family: Open
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    config = parse({"lora": {"variant": variant, "rank": 4}})
    facts = _use(family, config, "low", "peft", "base")
    compile(facts["use"], "use", "exec")
    assert (facts["variant"], facts["rank"], facts["alpha"]) == (variant, 4, alpha)
    for part in (
        LOAD,
        "adapter_config",
        "pipe.transformer_2.add_adapter(",
        "peft.set_peft_model_state_dict(pipe.transformer_2, ",
    ):
        assert part in facts["use"]
    lora = parse({"lora": {"rank": 4}})
    assert _use(family, lora, "low", "peft", "base")["use"] == LOAD + SECOND


@pytest.mark.parametrize("reads_them", [True, False])
def test_a_comfyui_file_is_for_diffusers_where_it_reads_such_names(
    reads_them: bool, tiny_family: Open
) -> None:
    family = tiny_family("wan")
    family.loads_comfyui_names = reads_them
    facts = _use(family, parse({}), "transformer", "comfyui", "base")
    assert facts["alpha"] == "baked into lora_B"
    if reads_them:
        assert facts["use"] == LOAD + LORA
    else:
        assert "ComfyUI" in facts["use"]


def test_other_files_name_their_loader(tiny_family: Open) -> None:
    family = tiny_family("wan")
    config = parse({"lora": {"variant": "LOHA"}})
    alone = _use(family, config, "transformer", "comfyui", "base")["use"]
    pair = tiny_family("wan", variant="t2v-a14b")
    of_pair = _use(pair, config, "low", "comfyui", "base")["use"]
    assert "ComfyUI" in alone
    assert "expert" not in alone
    assert of_pair.startswith(alone.removesuffix(" alone").rpartition(",")[0])
    assert "expert" in of_pair

    whole = _use(pair, parse({"training_method": "FINE_TUNE"}), "low", "diffusers", "b")
    assert whole == {"use": "pipe = WanPipeline.from_pretrained(THIS_FOLDER)"}
    embedding = {"training_method": "EMBEDDING", "embedding": {"vectors": 3}}
    facts = _use(family, parse(embedding), None, "diffusers", "base")
    assert facts.keys() == {"vectors", "use"}
    assert facts["vectors"] == 3
    compile(facts["use"], "use", "exec")
    assert "Pipeline.from_pretrained('base')" in facts["use"]
