"""What comes out of a family, for each kind of its checkpoints: noise, precision, targets, files, and that it learns.

The rest of what a family owes stands in tests/test_family_contract.py.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.models.models_kit import KINDS, Open, batch_of, clip_of, denoisers, first_of, shapes_of, small_shape
from tests.models.oracles import unpacked
from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.diffusion.loss import Objective, denoising_loss, objective
from videotune.diffusion.timesteps import Timesteps
from videotune.rng import draws
from videotune.types import Batch, ModelSpec, SampleRequest, Window
from videotune.validation.validation_loss import ValidationLoss, read_validation, related


def objective_of(spec: ModelSpec, low: float = 0.0, high: float = 1.0) -> Objective:
    """What the family is trained with, between two noise levels."""
    levels = Timesteps(spec.timestep_distribution, spec.timestep_shift, low, high)
    return objective(spec.path, spec.path_constants, levels)


@KINDS
def test_the_network_is_fed_in_training_what_the_pipeline_feeds(name: str, variant: str, tiny_family: Open) -> None:
    """Each call of a draw, replayed by ``predict`` on the same latents: every word the network hears is the same."""
    family, heard = tiny_family(name, variant=variant), []
    nets = denoisers(family)
    for expert, net in nets.items():
        net.register_forward_pre_hook(
            lambda _, words, named, expert=expert: heard.append((expert, dict(named))), with_kwargs=True
        )
    for shape in shapes_of(family):
        batch = batch_of(family, ["a red circle"], shape=shape)
        heard.clear()
        with torch.no_grad():
            family.sample(nets, batch.cond, None, SampleRequest(shape, 4, 1.0, (3,)))
        drawn = list(heard)
        assert {expert for expert, _ in drawn} == set(nets)
        for expert, theirs in drawn[:: len(drawn) - 1]:
            assert same_words(family, nets[expert], batch, theirs, heard) == [], (shape, expert)


def same_words(family: Any, net: nn.Module, batch: Batch, theirs: dict[str, Any], heard: list[Any]) -> list[str]:
    """The words that ``predict`` tells otherwise than the pipeline did."""
    spec, flow = family.spec, family.spec.path == "flow"
    video = unpacked(spec, theirs["hidden_states"], batch.x0.shape[2:])
    x_t = video[:, : spec.latent_channels, video.shape[2] - batch.x0.shape[2] :]
    times = theirs["timestep" if "timestep" in theirs else "timesteps"]
    told = times.float().max().view(1)
    t = told / (1000 if flow else spec.path_constants["num_train_timesteps"] - 1)
    heard.clear()
    a_token = times.numel() > len(batch)  # a pipeline may tell one timestep, where no frame is given
    with torch.no_grad():
        family.predict(net, x_t, t, replace(batch, any_given=a_token))
    ((_, ours),) = heard
    odd = []
    for word in sorted(set(theirs) | set(ours)):
        one, other = theirs.get(word), ours.get(word)
        if word == "hidden_states" and spec.patch[0] > 1:  # the frame in front has noise of its own
            one, other = (value[:, -batch.x0.shape[2] :] for value in (one, other))
        if isinstance(one, bool) or one is None or isinstance(one, dict):
            odd += [word] if one != other and not (one is None and word not in theirs) else []
            continue
        if other is None:
            odd.append(word)
            continue
        for mine, given in zip(
            *(map(as_tensor, x if isinstance(x, tuple) else (x,)) for x in (other, one)), strict=True
        ):
            same = mine.shape == given.shape and torch.allclose(mine.float(), given.float(), rtol=1e-6, atol=1e-3)
            odd += [] if same else [word]
    return odd


def as_tensor(word: Any) -> torch.Tensor:
    """A tensor as it is, a number as the tensor of one that a family may tell in its place."""
    return word if isinstance(word, torch.Tensor) and word.numel() > 1 else torch.as_tensor(word).flatten()


@KINDS
def test_bfloat16_is_close_to_float32(name: str, variant: str, tiny_family: Open) -> None:
    """In the dtype that a GPU trains in: near, not the same, and told the same noise level."""
    said = {}
    for dtype in (torch.float32, torch.bfloat16):
        family = tiny_family(name, dtype, variant)
        assert family.dtype == dtype
        batch, net = batch_of(tiny_family(name, variant=variant), ["a"]), first_of(family)
        x_t = torch.randn(batch.x0.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            said[dtype] = family.predict(net, x_t, torch.tensor([731 / 999]), batch)
        assert said[dtype].dtype == torch.float32, "losses are taken in float32"
    exact, near = said.values()
    error = (exact - near).norm() / exact.norm()
    assert 0 < error < 0.03


@KINDS
def test_the_plan_counts_what_the_cache_keeps(name: str, variant: str, tiny_family: Open) -> None:
    family = tiny_family(name, variant=variant)
    for shape in shapes_of(family):
        moments = family.encode_video(clip_of(family, shape, 0))
        kept = [moments.mean, *([] if moments.logvar is None else [moments.logvar]), *moments.extras.values()]
        assert family.spec.cached_numbers(shape) == sum(tensor.numel() for tensor in kept), shape


@KINDS
def test_a_clip_that_is_shown_again_and_again_is_learnt(name: str, variant: str, tiny_family: Open) -> None:
    """Forty steps on one clip lower the validation loss on it, for each expert at its own noise levels."""
    family = tiny_family(name, variant=variant)
    batch = batch_of(family, ["a red circle"], given=True)
    window = Window("a", 0.0, 1.0, small_shape(family))
    nets, readings = denoisers(family), []
    trained = {
        expert: list(add_lora(net, family.spec, Lora(rank=8, targets="linear"), seed=0).values())
        for expert, net in nets.items()
    }
    whole = objective_of(family.spec)

    def read() -> dict[str, Any]:
        with_answers: dict[str, Any] = read_validation(
            ValidationLoss((), (window,), 0), family, nets, whole, lambda _: batch
        )
        return with_answers["train"]

    readings.append(read())
    for expert in family.spec.experts:
        own = objective_of(family.spec, expert.t_lo, expert.t_hi)
        optimizer = torch.optim.Adam(trained[expert.name], lr=0.02)
        for step in range(40):
            t = own.timesteps.draw(torch.from_numpy(draws(0, "t", expert.name, step).random(1)))
            noise = torch.from_numpy(draws(0, "n", expert.name, step).standard_normal(batch.x0.shape, "float32"))
            denoising_loss(family, nets[expert.name], own, batch, t.float(), noise).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    readings.append(read())
    told = related(readings[1], readings[0])
    assert told is not None
    ratio = told["normalised"]
    print(name, variant, ratio)
    assert ratio < 0.9, json.dumps(readings)


@KINDS
def test_blank_states_are_those_of_a_real_clip_and_caption(name: str, variant: str, tiny_family: Open) -> None:
    """What a plan is made with has the form of what a training is told."""
    family = tiny_family(name, variant=variant)
    shape = small_shape(family)
    real = family.encode_text(["word " * 600])[0]
    real |= family.encode_video(clip_of(family, shape, 0), draws(0, "image noise")).extras
    blank = family.blank_states(shape)
    assert {k: (v.shape, v.dtype) for k, v in blank.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
