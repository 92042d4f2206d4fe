"""Kandinsky 5: captions without a mask, first frames that are encoded on their own, and
what its pipeline does after it sampled from one.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from tests.support import families
from tests.support.families import edit_json, open_family
from tests.support.oracles import oracle
from videotune.adapters.lora import add_lora
from videotune.config.resolve import resolve
from videotune.config.sections import Lora
from videotune.diffusion.base_targets import prior_target
from videotune.diffusion.loss import denoising_loss, objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.latent_cache.conditioning_cells import put_conditions
from videotune.latent_cache.conditions import KNOWN, LATENTS
from videotune.models.kandinsky5 import CROP, REPAINTED, TEMPLATE
from videotune.types import ClipShape, SampleRequest

Open = Callable[..., Any]
NAME = "kandinsky5"
CAPTIONS = ["a", "a much longer caption than the others", "b", "some words"]
FLOW = objective_for_prediction("flow", {}, TimestepSampler())


@pytest.fixture
def family(tiny_family: Open) -> Any:
    return tiny_family(NAME, variant="i2v")


def trained_net(family: Any) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A network with a LoRA whose every part has an effect."""
    net = family.denoiser()
    state = add_lora(net, family.spec, Lora(rank=2, targets="linear"), seed=0)
    random = torch.Generator().manual_seed(1)
    for parameter in state.values():
        parameter.data.normal_(std=0.1, generator=random)
    return net, state


def test_loss_and_gradient_of_a_sample_are_those_that_it_has_alone(family: Any) -> None:
    """Of captions of three lengths, with a first frame given and not."""
    batch = families.batch_of(family, CAPTIONS, given=True)
    assert len(set(batch.conditioning.text_lengths)) == 3
    net, state = trained_net(family)
    t = torch.tensor([0.2, 0.5, 0.7, 0.9])
    noise = torch.randn(batch.x0.shape, generator=torch.Generator().manual_seed(2))

    output = denoising_loss(family, net, FLOW, batch, t, noise)
    output.loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in state.items()}
    net.zero_grad()

    losses = []
    for row in range(len(batch)):
        one = denoising_loss(
            family, net, FLOW, batch.take([row]), t[[row]], noise[[row]]
        )
        (one.loss / len(batch)).backward()
        losses.append(one.loss.detach())
    torch.testing.assert_close(output.per_sample_loss, torch.stack(losses))
    for name, parameter in state.items():
        torch.testing.assert_close(
            parameter.grad, together[name], rtol=1e-3, atol=1e-6, msg=name
        )


def test_padding_would_be_read_as_text(family: Any) -> None:
    batch = families.batch_of(family, ["a red circle"])
    net = family.denoiser()
    t = torch.tensor([0.5])
    text = nn.functional.pad(batch.conditioning.text, (0, 0, 0, 3))
    length = text.shape[1]
    padded = replace(batch.conditioning, text=text, text_lengths=(length,))
    with torch.no_grad():
        usual = family.predict(net, batch.x0, t, batch)
        other = family.predict(net, batch.x0, t, replace(batch, conditioning=padded))
    assert (usual - other).abs().max() > 1e-4


def test_samples_are_chosen_with_their_captions(family: Any) -> None:
    batch = families.batch_of(family, CAPTIONS)
    parts = batch.split(3)
    assert [part.captions for part in parts] == [tuple(CAPTIONS[:3]), ("some words",)]
    lengths = batch.conditioning.text_lengths
    assert parts[1].conditioning.text_lengths == lengths[3:]
    assert parts[1].conditioning.text.shape[1] == lengths[3]
    taken = batch.take([2, 0])
    assert taken.captions == ("b", "a")
    assert torch.equal(taken.x0, batch.x0[[2, 0]])
    assert taken.conditioning.text.shape[1] == lengths[0]
    assert parts[0].x0.data_ptr() == batch.x0.data_ptr(), "no copy of what follows"


def test_the_base_model_s_target_is_of_the_samples_that_are_asked_for(
    family: Any,
) -> None:
    batch = families.batch_of(family, CAPTIONS)
    net = family.denoiser()
    t = torch.tensor([0.2, 0.5, 0.7, 0.9])
    noise = torch.randn_like(batch.x0)
    target = prior_target(family, net, FLOW, batch, t, noise, [1, 3]).video
    path = FLOW.noise_path(t)
    x_t = path.alpha * batch.x0 + path.sigma * noise
    with torch.no_grad():
        wanted = family.predict(net, x_t, t, batch)
    torch.testing.assert_close(target[[1, 3]], wanted[[1, 3]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(target[[0, 2]], (noise - batch.x0)[[0, 2]])


def test_sharded_weights_want_one_sample_a_pass(family: Any) -> None:
    def resolved(**settings: Any) -> Any:
        return resolve({"sharding": "FULL", **settings}, {}, family.spec)

    datasets = [{"path": "clips", "batch_size": 2}]
    for refused in ({"batch_size": 2}, {"datasets": datasets}):
        with pytest.raises(VideotuneError, match=r"sharding: .*micro_batch_size"):
            resolved(**refused)
    assert resolved(batch_size=2, micro_batch_size=1).config.sharding == "FULL"
    assert resolved(batch_size=1).config.sharding == "FULL"
    assert resolved(batch_size=2, sharding="OFF").config.batch_size == 2


# the first frame


def test_a_first_frame_has_the_latents_of_an_image(family: Any) -> None:
    """Not those that it has within the clip; a start image takes its place."""
    shape = families.small_shape(family)
    clip = families.clip_of(family, shape, 0)
    image = families.clip_of(family, replace(shape, frames=1), 1)
    alone = family.encode_video(clip[:, :1]).mean
    distribution = family.encode_video(clip)
    torch.testing.assert_close(distribution.start, alone)
    assert (distribution.mean[:, :1] - alone).abs().max() > 1e-3
    other = family.encode_video(clip, start_image=image)
    torch.testing.assert_close(other.start, family.encode_video(image).mean)

    for types in (frozenset({"first_frame"}), frozenset[str]()):
        x0 = distribution.mean.clone()
        start = distribution.start
        known = put_conditions(x0, family.spec, types, 0, {}, start)
        assert known[0].all() == ("first_frame" in types)
        assert not known[1:].any()
        assert torch.equal(x0[:, :1], alone if types else distribution.mean[:, :1])
        assert torch.equal(x0[:, 1:], distribution.mean[:, 1:])


def test_a_start_image_that_would_leave_nothing_to_learn_is_no_target(
    family: Any,
) -> None:
    """All cells would be given, so none is, and the clip's own first frame is learnt."""
    clip = torch.randn(4, 2, 3, 3)
    start = torch.randn(4, 1, 3, 3)
    box = {KNOWN: torch.ones(2, 3, 3), LATENTS: torch.randn(4, 2, 3, 3)}
    support = family.spec.conditions["first_frame"]
    spec = replace(family.spec, further_conditions={"mask": support})

    x0 = clip.clone()
    types = frozenset({"first_frame", "mask"})
    known = put_conditions(x0, spec, types, 0, {"mask": box}, start)
    assert not known.any()
    assert torch.equal(x0, clip)


def test_the_cache_keeps_first_frames_of_its_own_kind(tiny_family: Open) -> None:
    """A checkpoint from text has the same VAE, and entries without first frames."""
    prints = [
        tiny_family(NAME, variant=variant).fingerprints() for variant in ("t2v", "i2v")
    ]
    assert prints[0]["vae"] != prints[1]["vae"]
    text = tiny_family(NAME, variant="t2v")
    clip = families.clip_of(text, families.small_shape(text), 0)
    assert text.encode_video(clip).start is None


def test_the_network_is_fed_an_image_as_by_the_pipeline(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Replayed: the given frame clean in its place, zeros beside it, the mask 1."""
    base = Path(shutil.copytree(tiny_bases(NAME, "i2v"), tmp_path / "base"))
    family = open_family(NAME, base)
    shape = ClipShape(21, 32, 48, 24.0)
    batch = families.batch_of(family, ["a red circle"], given=True, shape=shape)
    heard: list[dict[str, Any]] = []
    net = family.denoiser()
    net.register_forward_pre_hook(
        lambda _, words, named: heard.append(dict(named)), with_kwargs=True
    )
    request = SampleRequest(shape, 3, 1.0, (3,), first=batch.x0[:, :, :1])
    with torch.no_grad():
        family.sample({"transformer": net}, batch.conditioning, None, request)
        theirs = heard[1]
        x_t = theirs["hidden_states"][..., :4].permute(0, 4, 1, 2, 3)
        family.predict(net, x_t, theirs["timestep"] / 1000, batch)
    ours = heard[-1]
    assert torch.equal(ours["hidden_states"], theirs["hidden_states"])
    assert torch.equal(
        ours["hidden_states"][:, 0, ..., :4], batch.x0[:, :, 0].permute(0, 2, 3, 1)
    )
    assert not ours["hidden_states"][..., 4:8].any()
    mask = ours["hidden_states"][..., 8]
    assert bool((mask[:, 0] == 1).all())
    assert not mask[:, 1:].any()
    assert torch.equal(ours["pooled_projections"], theirs["pooled_projections"])


class Perfect(nn.Module):
    """A network that knows the latents."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *words: Any, **named: Any) -> Any:
        return self.answer(*words, **named)


@pytest.mark.parametrize("frames", [5, 13, 17, 33])
def test_what_the_pipeline_repaints(frames: int, family: Any) -> None:
    """By its own function, of each sample alone; up to four latent frames nothing, for
    the pipeline would give NaN.
    """
    shape = ClipShape(frames, 32, 32, 24.0)
    batch = families.batch_of(family, CAPTIONS[:2], shape=shape)
    batch.x0[:, :, :REPAINTED] *= 1.5
    drawn = []
    for row in range(2):
        clean = batch.x0[[row]]
        nets = {"transformer": Perfect(oracle(clean, family.spec))}
        conditioning = batch.conditioning.take([row])
        request = SampleRequest(shape, 20, 1.0, (row,), first=clean[:, :, :1])
        drawn.append(family.sample(nets, conditioning, None, request))
    pipe = diffusers.Kandinsky5I2VPipeline(*[None] * 7)  # type: ignore[arg-type]
    for row, sample in enumerate(drawn):
        wanted = batch.x0[[row]]
        if wanted.shape[2] > REPAINTED:
            channels_last = wanted.permute(0, 2, 3, 4, 1)
            repainted = pipe.normalize_first_frame(channels_last)
            assert not torch.allclose(repainted, channels_last, atol=1e-2)
            wanted = repainted.permute(0, 4, 1, 2, 3)
        torch.testing.assert_close(sample, wanted, rtol=0, atol=1e-2)


# positions, text and configs


@pytest.mark.parametrize(
    ("height", "width"), [(480, 848), (512, 768), (464, 768), (512, 864), (32, 32)]
)
def test_positions_are_scaled_as_by_the_pipeline(
    height: int, width: int, family: Any
) -> None:
    pipe = diffusers.Kandinsky5T2VPipeline(*[None] * 7)  # type: ignore[arg-type]
    x_t = torch.empty(1, 4, 2, height // 8, width // 8)
    positions = family._positions(x_t, torch.empty(1, 7, 16))
    assert positions["scale_factor"] == pipe._get_scale_factor(height, width)


def test_the_template_is_the_pipeline_s() -> None:
    pipe = diffusers.Kandinsky5T2VPipeline(*[None] * 7)  # type: ignore[arg-type]
    assert pipe.prompt_template == TEMPLATE
    assert pipe.prompt_template_encode_start_idx == CROP


def test_of_a_published_processor_the_tokenizer_is_read(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    before = open_family(NAME, base).encode_text(["a red circle"])[0]
    edit_json(
        base / "model_index.json", tokenizer=["transformers", "Qwen2_5_VLProcessor"]
    )
    edit_json(
        base / "tokenizer" / "preprocessor_config.json",
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2_5_VLProcessor",
    )
    edit_json(
        base / "tokenizer" / "tokenizer_config.json",
        processor_class="Qwen2_5_VLProcessor",
        tokenizer_class="Qwen2Tokenizer",
    )
    after = open_family(NAME, base).encode_text(["a red circle"])[0]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_tokenizer_of_another_model_is_refused(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    shutil.rmtree(base / "tokenizer")
    shutil.copytree(tiny_bases("ltx2") / "tokenizer", base / "tokenizer")
    with pytest.raises(VideotuneError, match="tokens in front of a caption, not 128"):
        open_family(NAME, base).tokenizers()
    (base / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(VideotuneError, match=r"no tokenizer\.json"):
        open_family(NAME, base).tokenizers()


def test_a_picture_from_an_image_is_that_image(family: Any) -> None:
    """The pipeline samples every frame but the first, so of one frame it samples none."""
    shape = ClipShape(1, 32, 32, 24.0)
    batch = families.batch_of(family, ["a"], shape=shape)
    request = SampleRequest(shape, 2, 1.0, (1,), first=batch.x0)
    with torch.no_grad():
        nets = {"transformer": family.denoiser()}
        drawn = family.sample(nets, batch.conditioning, None, request)
    torch.testing.assert_close(drawn, batch.x0)
