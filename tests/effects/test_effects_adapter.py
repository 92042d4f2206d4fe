"""What the keys about the model and the adapter do to weights, to the network's answers and to the exported file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, job_of, run_steps, trainer_of, watched, written
from tests.exporter.export_kit import read_back
from tests.runs import measure
from videotune.errors import VideotuneError
from videotune.models.registry import names
from videotune.models.wan import Wan
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import open_job
from videotune.trainer.trainer import Trainer


def exported(trainer: Trainer, steps: int = 1) -> Path:
    """The LoRA file of a trainer that has taken so many steps."""
    run_steps(trainer, steps)
    return written(trainer, steps)


def modules(path: Path) -> set[str]:
    """The modules that a LoRA file changes, in the names of the model."""
    return {key.removeprefix("transformer.").rsplit(".lora_", 1)[0] for key in load_file(path)}


@pytest.mark.effect("base_model_name")
def test_the_model_that_is_named_is_trained(lab: Lab) -> None:
    other = Wan.tiny(lab.tmp / "other", seed=1)
    answers = []
    for folder in (lab.model, other):
        trainer = trainer_of(lab, {"base_model_name": str(folder)})
        on_disk = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        assert torch.equal(trainer.net.blocks[0].attn1.to_q.base_layer.weight, on_disk["blocks.0.attn1.to_q.weight"])
        with watched(trainer.net) as calls:
            run_steps(trainer, 1)
        answers.append(calls[0]["answer"])
    assert not torch.allclose(*answers)


@pytest.mark.effect("transformer.file")
def test_the_file_s_weights_stand_for_the_base_s(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own weights train, under its own fingerprint, with the base's text encoder and VAE; a LoRA of it loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.tmp / "cache"))
    other = Wan.tiny(lab.tmp / "other", seed=1) / "transformer" / "diffusion_pytorch_model.safetensors"
    file = lab.tmp / "own.safetensors"
    file.write_bytes(other.read_bytes())
    answers, prints = [], []
    for value in (None, str(file), [str(file)]):
        trainer = trainer_of(lab, {"transformer.file": value})
        prints.append(trainer.family.fingerprints())
        with watched(trainer.net) as calls:
            run_steps(trainer, 1)
        answers.append(calls[0]["answer"])
    assert torch.equal(
        trainer.net.blocks[0].attn1.to_q.base_layer.weight, load_file(file)["blocks.0.attn1.to_q.weight"]
    )
    assert not torch.allclose(answers[0], answers[1])
    assert torch.equal(answers[1], answers[2])
    assert {part for part in prints[0] if prints[0][part] != prints[1][part]} == {"transformer"}
    job = job_of(lab, {"transformer.file": os.path.relpath(file)})
    assert Path(job.config.transformer.file).is_absolute(), "a resume from another folder would not find it"
    assert Path(job.config.transformer.file).samefile(file)
    with pytest.raises(VideotuneError, match=r"transformer.file: 2 given; .* takes 1"):
        job_of(lab, {"transformer.file": [str(file)] * 2})


@pytest.mark.effect("family")
def test_a_family_stands_in_for_a_base_model_and_must_not_contradict_one(lab: Lab) -> None:
    """Without a base model each family lays the same clips out by its own rules; with one the name is checked."""

    def shapes(family: str | None, base: Path | None = None) -> tuple[Any, list[str]]:
        sets = [f"cache_dir={lab.cache}", "video_config.max_frames=16", "video_config.target_fps=16"]
        sets += [f"base_model_name={base}"] if base else []
        words = Overrides(family=family, data=str(lab.clips), sets=tuple(sets))
        job = open_job(*resolve_config(words))
        return job.spec, [str(shape) for shape in job.shapes]

    for name in names():
        spec, laid = shapes(name)
        assert spec.name == name
        side = spec.default_resolution // spec.rules.side_multiple * spec.rules.side_multiple
        assert laid
        for shape in laid:
            frames, height, width = (int(part) for part in shape.split("x"))
            assert (frames - spec.rules.frame_rest) % max(1, spec.rules.frame_step) == 0
            assert height == width
            assert abs(height - side) <= spec.rules.side_multiple
    with pytest.raises(VideotuneError, match="which model"):
        shapes(None)
    assert shapes("wan2.1", lab.model) == shapes(None, lab.model)
    with pytest.raises(VideotuneError, match="no family 'wam'; did you mean 'wan'"):
        shapes("wam", lab.model)


@pytest.mark.effect("lora.rank")
def test_the_update_has_the_rank(lab: Lab) -> None:
    for rank in (1, 3):
        path = exported(trainer_of(lab, {"lora.rank": rank}))
        tensors = load_file(path)
        assert {value.shape[0] for key, value in tensors.items() if ".lora_A." in key} == {rank}
        assert {value.shape[1] for key, value in tensors.items() if ".lora_B." in key} == {rank}
        for name in modules(path):
            a, b = (tensors[f"transformer.{name}.lora_{part}.weight"].double() for part in "AB")
            assert torch.linalg.matrix_rank(b @ a) == rank


@pytest.mark.effect("lora.alpha")
def test_the_update_is_scaled_by_alpha_over_rank(lab: Lab) -> None:
    """With the same A and B: in the network that trains, and in the file as diffusers reads it."""
    inside: dict[Any, torch.Tensor] = {}
    outside: dict[Any, Mapping[str, torch.Tensor]] = {}
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    for alpha in (None, 2, 4, 8):
        trainer = trainer_of(lab, {"lora.rank": 2, "lora.alpha": alpha})
        for index, parameter in enumerate(trainer.parameters.values()):
            parameter.data.normal_(generator=torch.Generator().manual_seed(index))
        layer = trainer.net.blocks[0].attn1.to_q
        with torch.no_grad():
            inside[alpha] = layer(x) - layer.base_layer(x)
        outside[alpha] = read_back(trainer.family, written(trainer))
    a, b = (trainer.parameters[f"blocks.0.attn1.to_q.lora_{part}.weight"].detach() for part in "AB")
    for alpha, scale in ((None, 1), (2, 1), (4, 2), (8, 4)):
        torch.testing.assert_close(inside[alpha], scale * x @ a.T @ b.T, rtol=1e-4, atol=1e-4)
        update = outside[alpha]["blocks.0.attn1.to_q"].detach()
        torch.testing.assert_close(update, scale * b.double() @ a.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.effect("lora.dropout")
def test_the_adapter_s_input_is_dropped_while_training_and_only_then(lab: Lab) -> None:
    def inputs(dropout: float, training: bool) -> tuple[float, float, float]:
        """The share of zeros in what A sees, and the mean size of the rest over that of the layer's own input."""
        trainer = trainer_of(lab, {"lora.dropout": dropout})
        layer, seen = trainer.net.blocks[0].attn1.to_q, []
        layer.lora_A["default"].register_forward_pre_hook(lambda _, words: seen.append(words[0].detach()))
        layer.base_layer.register_forward_pre_hook(lambda _, words: seen.append(words[0].detach()))
        if training:
            (line,) = run_steps(trainer, 1)
        else:
            measure(trainer, 0)
            line = {"loss": 0.0}
        whole, part = seen[0], seen[1]
        left = part != 0
        return (~left).float().mean().item(), (part[left] / whole[left]).mean().item(), line["loss"]

    assert inputs(0.0, True)[:2] == (0, 1)
    share, scale, loss = inputs(0.5, True)
    assert 0.4 < share < 0.6
    assert scale == pytest.approx(2)
    assert inputs(0.5, True) == (share, scale, loss), "the draws are not those of the seed"
    assert inputs(0.5, False)[:2] == (0, 1)


@pytest.mark.effect("lora.targets")
def test_the_modules_that_are_named_train(lab: Lab) -> None:
    attention = {
        f"blocks.{block}.attn{kind}.{name}"
        for block in range(2)
        for kind in (1, 2)
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    }
    forward = {f"blocks.{block}.ffn.{name}" for block in range(2) for name in ("net.0.proj", "net.2")}
    queries_and_keys = {"blocks.1.attn1.to_q", "blocks.1.attn1.to_k"}
    for targets, wanted in (
        ("attention", attention),
        ("linear", attention | forward),
        ([r"blocks\.1\.attn1\.to_[qk]"], queries_and_keys),
        (["ffn.net.2"], {"blocks.0.ffn.net.2", "blocks.1.ffn.net.2"}),
    ):
        assert modules(exported(trainer_of(lab, {"lora.targets": targets}), 2)) == wanted
