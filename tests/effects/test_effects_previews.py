"""What LoRA files under the training do, and the keys about what previews are drawn
with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.lora_files import deltas_of, peft_file
from tests.support.oracles import oracle
from tests.support.run_parts import preview
from tests.support.run_results import film, of_kind
from tests.support.trainers import (
    Lab,
    job_of,
    run_steps,
    take_steps,
    trainer_of,
    written,
)
from videotune.commands.export import export as export_command
from videotune.commands.sample import open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.errors import VideotuneError
from videotune.trainer.build import open_models
from videotune.trainer.loop import train_loop
from videotune.trainer.trainer import Trainer
from videotune.types import ClipShape, SampleRequest

WEIGHTS = "blocks.0.attn1.to_q.weight"


@pytest.fixture
def lora(lab: Lab) -> Path:
    """A LoRA that changes what the tiny model draws."""
    job = job_of(lab)
    path = lab.tmp / "below.safetensors"
    peft_file(open_models(job.spec, job.base, job.config), path, alpha=1.0)
    return path


def preview_of(lab: Lab, **knobs: Any) -> np.ndarray:
    """The first preview before the first step."""
    films = previews_of(lab, **{"samples": ["a cat"], **knobs})
    return films[0]


def previews_of(lab: Lab, **knobs: Any) -> list[np.ndarray]:
    settings = {key.replace("__", "."): value for key, value in knobs.items()}
    usual = {"sample_after": 1000, "sample.steps": 2}
    trainer = trainer_of(lab, usual | settings)
    return films_of(trainer, 0)


def films_of(trainer: Trainer, step: int) -> list[np.ndarray]:
    preview(trainer, step)
    assert of_kind(trainer.run, "warning") == []
    lines = [line for line in of_kind(trainer.run, "sample") if line["step"] == step]
    return [film(trainer.run / line["path"]) for line in lines]


def difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first.astype(float) - second.astype(float)).mean())


@pytest.mark.effect("base_loras")
def test_the_run_trains_on_the_sum_and_exports_only_what_it_learnt(
    lab: Lab, lora: Path
) -> None:
    on_disk = load_file(
        lab.model / "transformer" / "diffusion_pytorch_model.safetensors"
    )[WEIGHTS]
    answers = []
    for value in ([], [str(lora)], [{"file": str(lora), "strength": 0.5}]):
        trainer = trainer_of(lab, {"base_loras": value})
        weight = trainer.net.blocks[0].attn1.to_q.base_layer.weight
        family = trainer.family
        added = 0.0
        if value:
            strength = 1.0 if isinstance(value[0], str) else 0.5
            added = strength * deltas_of(family, lora)["blocks.0.attn1.to_q"]
        assert torch.allclose(weight.double(), on_disk.double() + added, atol=1e-5)
        answers.append(take_steps(trainer, 1).calls[0]["answer"])
    assert not torch.allclose(answers[0], answers[1])
    assert not torch.allclose(answers[1], answers[2])

    trained = trainer_of(lab, {"base_loras": [str(lora)], "learning_rate": 1e-2})
    run_steps(trained, 2)
    exported = deltas_of(trained.family, written(trained, 2))
    scale = trained.job.config.lora.scale
    for path, delta in exported.items():
        layer: Any = trained.net.get_submodule(path)
        factors = [layer.lora_B["default"].weight, layer.lora_A["default"].weight]
        own = scale * factors[0].double() @ factors[1].double()
        assert torch.allclose(delta, own.detach(), atol=1e-6), path


@pytest.mark.effect("base_loras")
def test_another_file_cannot_take_its_place_when_a_run_is_resumed(
    lab: Lab, lora: Path, tiny_family: Callable[..., Any]
) -> None:
    trainer = trainer_of(lab, {"base_loras": [str(lora)]})
    prints = trainer.family.fingerprints()
    peft_file(tiny_family("wan"), lora, alpha=3.0)
    job = job_of(lab, {"base_loras": [str(lora)]})
    assert open_models(job.spec, job.base, job.config).fingerprints() != prints


@pytest.mark.effect("base_loras")
def test_an_adapter_of_the_training_alone_is_in_no_preview_sample_or_merged_model(
    lab: Lab, lora: Path
) -> None:
    plain = preview_of(lab)
    entry = {"file": str(lora)}
    with_it = preview_of(lab, base_loras=[entry])
    without = preview_of(lab, base_loras=[entry | {"training_only": True}])
    assert difference(with_it, plain) > 1
    assert difference(without, plain) < 0.1

    outputs = []
    for training_only in (False, True):
        knobs = {
            "base_loras": [entry | {"training_only": training_only}],
            "learning_rate": 1e-2,
            "steps": 1,
            "save_every": 1,
        }
        trainer = trainer_of(lab, knobs)
        assert train_loop(trainer) == "done"
        options = SampleOptions(("a cat",), 1, trainer.run)
        sampler = open_sampler(options)
        render(sampler, ["a cat"], [1])
        merged = sampler.nets["transformer"].blocks[0].attn1.to_q
        below = merged.base_layer.weight.detach()
        outputs.append(below)
        files = export_command(
            trainer.run, merge=True, out=lab.tmp / str(training_only)
        )
        folder = files[0].path / "transformer"
        weight = load_file(folder / "diffusion_pytorch_model.safetensors")[WEIGHTS]
        update = merged.get_delta_weight("default").detach()
        assert torch.allclose(weight, below + update, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


@pytest.mark.effect("sample.base_loras")
def test_previews_without_the_files_under_the_training(lab: Lab, lora: Path) -> None:
    plain = preview_of(lab)
    prompts = ["a cat", {"prompt": "a cat", "seed": 42, "base_loras": False}]
    with pytest.raises(VideotuneError, match="occurs twice"):
        previews_of(lab, samples=prompts, base_loras=[str(lora)])
    assert difference(preview_of(lab, base_loras=[str(lora)]), plain) > 1
    without = preview_of(lab, base_loras=[str(lora)], sample__base_loras=False)
    assert difference(without, plain) < 0.1
    with pytest.raises(VideotuneError, match="no base_loras to leave out"):
        preview_of(lab, sample__base_loras=False)


@pytest.mark.effect("sample.loras")
def test_a_lora_that_only_previews_have(lab: Lab, lora: Path) -> None:
    """A preview is that of a run on the sum; the training is the run's without it."""
    wanted = preview_of(lab, base_loras=[str(lora)])
    trainer = trainer_of(
        lab, {"sample_after": 1000, "sample.steps": 2, "samples": ["a cat"], "sample.loras": [str(lora)]}
    )  # fmt: skip
    answer = take_steps(trainer, 1).calls[0]["answer"]
    assert torch.equal(answer, take_steps(trainer_of(lab), 1).calls[0]["answer"])
    added = preview_of(lab, sample__loras=[str(lora)])
    assert difference(added, wanted) < 0.1
    assert difference(added, preview_of(lab)) > 1
    halved = {"prompt": "a cat", "loras": [{"file": str(lora), "strength": 0.5}]}
    assert difference(preview_of(lab, samples=[halved]), added) > 0.1
    with pytest.raises(VideotuneError, match=r"sample\.loras: no such file"):
        preview_of(lab, sample__loras=[str(lab.tmp / "none.safetensors")])


@pytest.mark.effect("sample.strength")
def test_the_strength_of_the_run_s_own_lora(lab: Lab) -> None:
    def after_steps(strength: float, **knobs: Any) -> np.ndarray:
        trainer = trainer_of(
            lab,
            {
                "sample_after": 1000,
                "samples": ["a cat"],
                "sample.steps": 2,
                "sample.strength": strength,
                "learning_rate": 3e-2,
            }
            | knobs,
        )
        run_steps(trainer, 3)
        return films_of(trainer, 3)[0]

    base = preview_of(lab)
    assert difference(after_steps(0.0), base) < 0.1
    full = after_steps(1.0)
    assert difference(full, base) > 0.1
    assert difference(after_steps(2.0), base) > difference(full, base)
    for knobs in ({"training_method": "FINE_TUNE"}, {"lora.variant": "DORA"}):
        with pytest.raises(VideotuneError, match=r"sample\.strength"):
            preview_of(lab, sample__strength=0.5, **knobs)


@pytest.mark.effect("sample.scheduler")
def test_the_scheduler_that_is_named_samples(lab: Lab) -> None:
    names = (None, "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler")
    films = [preview_of(lab, sample__scheduler=name, sample__steps=4) for name in names]
    assert difference(films[0], films[1]) > 0.01
    assert difference(films[1], films[2]) > 0.01
    with pytest.raises(VideotuneError, match=r"Choose one of .*UniPC"):
        preview_of(lab, sample__scheduler="DDIMScheduler")


@pytest.mark.parametrize(
    "name",
    [
        "cogvideox",
        "hidream",
        "hunyuan_video",
        "hunyuan_video15",
        "kandinsky5",
        "ltx_video",
        "wan",
    ],
)
def test_every_scheduler_of_a_family_ends_at_what_a_perfect_network_knows(
    name: str, tiny_family: Callable[..., Any]
) -> None:
    for variant in {"ltx_video": ("0.9.0", "0.9.7")}.get(name, (None,)):
        family = tiny_family(name, variant=variant)
        rules = family.spec.rules
        side = 2 * rules.side_multiple
        shape = ClipShape(rules.frame_step + rules.frame_rest, side, side, rules.fps)
        size = rules.latent_size(shape)
        random = torch.Generator().manual_seed(3)
        clean = torch.randn(1, family.spec.latent_channels, *size, generator=random)
        conditioning = family.collate_states(family.encode_text(["a"]))

        class Perfect(torch.nn.Module):
            def __init__(self, answer: Callable[..., Any]) -> None:
                super().__init__()
                self.answer = answer

            def forward(self, *args: Any, **named: Any) -> Any:
                answer = self.answer(*args, **named)
                return (answer,) if isinstance(answer, torch.Tensor) else answer

        own = type(family.scheduler(None)).__name__
        assert own in family.spec.schedulers
        for scheduler in family.spec.schedulers:
            network = Perfect(oracle(clean, family.spec))
            network.cache_context = lambda *_, **__: torch.no_grad()  # type: ignore[assignment]
            nets = {expert.name: network for expert in family.spec.experts}
            request = SampleRequest(shape, 12, 1.0, (1,), scheduler=scheduler)
            ends = [family.sample(nets, conditioning, None, request) for _ in range(2)]
            assert torch.allclose(ends[0], clean, atol=5e-3), scheduler
            assert torch.equal(*ends), f"{scheduler} draws noise of its own"


@pytest.mark.effect("sample.guidance_rescale")
def test_guidance_scaled_back_has_the_deviation_of_the_prompt_s_prediction(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    films = []
    for rescale in (0.0, 1.0):
        films.append(
            preview_of(
                lab,
                base_model_name=str(tiny_bases("ltx_video", "0.9.0")),
                cache_dir=str(lab.tmp / "cache"),
                resolution="64x64",
                sample__guidance=8.0,
                sample__guidance_rescale=rescale,
            )
        )
    assert difference(*films) > 0.1
    assert films[1].std() < films[0].std()
    with pytest.raises(VideotuneError, match="has none"):
        preview_of(lab, sample__guidance_rescale=0.5)


@pytest.mark.effect("sample.cache_threshold")
def test_a_preview_skips_blocks_whose_input_hardly_changes(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    films = []
    for threshold in (0.0, 1e-9, 1.0):
        films.append(
            preview_of(lab, sample__steps=6, sample__cache_threshold=threshold)
        )
    assert np.array_equal(films[0], films[1])
    assert difference(films[0], films[2]) > 0
    with pytest.raises(VideotuneError, match="first-block cache"):
        preview_of(
            lab,
            base_model_name=str(tiny_bases("wan_vace")),
            sample__cache_threshold=0.1,
        )


@pytest.mark.effect("samples")
@pytest.mark.parametrize("variant", ["ti2v", "i2v"])
def test_a_preview_begins_with_the_image_that_its_prompt_names(
    variant: str, lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    paths = []
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        path = lab.tmp / f"{name}.png"
        Image.new("RGB", (80, 40), colour).save(path)
        paths.append(str(path))
    knobs = {
        "base_model_name": str(tiny_bases("wan", variant)),
        "cache_dir": str(lab.tmp / "cache"),
        "resolution": "64x64",
        "sample_after": 1000,
    }
    samples = [
        {"prompt": "a cat", "seed": 1, "image": paths[0]},
        {"prompt": "a cat", "seed": 2, "image": paths[1]},
        "a dog",
    ]
    trainer = trainer_of(lab, knobs | {"samples": samples})
    (callback,) = [each for each in trainer.callbacks if each.control_key == "sample"]
    given = callback._given  # type: ignore[attr-defined]
    latents = {files.image: encoded for (files, _), encoded in given.items()}
    red, blue = (latents[path] for path in paths)
    assert not torch.allclose(red.mean, blue.mean)
    preview(trainer, 0)
    assert of_kind(trainer.run, "warning") == []
    assert len(of_kind(trainer.run, "sample")) == 3

    for value, reason in (
        (str(lab.tmp / "none.png"), "none.png"),
        (str(lab.clips), ""),
    ):
        job = {"samples": [{"prompt": "a cat", "image": value}]}
        with pytest.raises(VideotuneError, match=f"samples: image.*{reason}"):
            trainer_of(lab, knobs | job)


def test_a_model_that_takes_no_image_refuses_one(lab: Lab) -> None:
    path = lab.tmp / "x.png"
    Image.new("RGB", (32, 32)).save(path)
    with pytest.raises(VideotuneError, match="in a run that learns it"):
        preview_of(lab, samples=[{"prompt": "a cat", "image": str(path)}])
