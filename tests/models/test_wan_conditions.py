"""What channels of Wan show of a clip: as diffusers' image-to-video pipeline makes it,
and, of pixels that it has no argument for, by the same rule.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from videotune.models.fingerprint import fingerprint
from videotune.types import ClipShape, ConditionPixels, SampleRequest

FRAMES = 9
SIDE = 32


def clip(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(3, FRAMES, SIDE, SIDE, generator=random) * 2 - 1


def known_frames(*frames: int) -> torch.Tensor:
    known = torch.zeros(FRAMES, SIDE, SIDE, dtype=torch.bool)
    known[list(frames)] = True
    return known


def channels_of_pipeline(family: Any, frames: torch.Tensor, last: bool) -> Any:
    """What the pipeline concatenates to the noise."""
    pipe = diffusers.WanImageToVideoPipeline(
        None, None, vae=family.vae(), scheduler=None
    )
    with torch.no_grad():
        _, channels = pipe.prepare_latents(
            frames[None, :, 0],
            1,
            family.spec.latent_channels,
            SIDE,
            SIDE,
            FRAMES,
            torch.float32,
            torch.device("cpu"),
            latents=torch.empty(0),
            last_image=frames[None, :, -1] if last else None,
        )
    return channels[0]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("variant", ["i2v", "flf2v", "i2v-a14b"])
def test_images_are_shown_as_the_pipeline_shows_them(
    variant: str, last: bool, tiny_family: Callable[..., Any]
) -> None:
    family = tiny_family("wan", variant=variant)
    frames = clip()
    known = known_frames(0, -1) if last else known_frames(0)
    states = family.channel_states(ConditionPixels(frames, known))
    assert torch.equal(states["image"], channels_of_pipeline(family, frames, last))

    blank = family.blank_channels(ClipShape(FRAMES, SIDE, SIDE, 16.0))
    assert {name: state.shape for name, state in states.items()} == {
        name: state.shape for name, state in blank.items()
    }


def test_channels_know_nothing_of_hidden_pixels(
    tiny_family: Callable[..., Any],
) -> None:
    family = tiny_family("wan", variant="i2v")
    known = known_frames(*range(FRAMES))
    known[:, 8:24, 8:24] = False
    first, second = (
        family.channel_states(ConditionPixels(frames, known))
        for frames in (clip(), clip().where(known, clip(1)))
    )
    assert torch.equal(first["image"], second["image"])
    assert not first["clip"].any(), "CLIP sees whole frames only"

    mask = first["image"][: family.spec.rules.temporal_stride]
    assert mask[:, :, 1:3, 1:3].sum() == 0
    assert mask.sum() == mask.numel() - mask[:, :, 1:3, 1:3].numel()


def test_one_and_two_images_are_not_mixed_up_in_a_cache(
    tiny_family: Callable[..., Any],
) -> None:
    """The encoders may be the same, what is made with them is not."""
    prints = []
    for variant in ("i2v", "flf2v"):
        family = tiny_family("wan", variant=variant)
        encoders = [family.folder / "vae", family.folder / "image_encoder"]
        prints.append((family.fingerprints()["vae"], *map(fingerprint, encoders)))
    first, second = prints
    assert first[1:] == second[1:]
    assert first[0] != second[0]


def test_the_mask_says_each_pixel_frame(tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan", variant="i2v-a14b")
    known = known_frames(0, 1, 7, 8)
    mask = family.channel_states(ConditionPixels(clip(), known))["image"][:4, :, 0, 0]
    assert mask.T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 1]]


class Recorder(torch.nn.Module):
    """A network that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def cache_context(self, *_: Any) -> Any:
        return torch.no_grad()

    def forward(self, hidden_states: Any, **inputs: Any) -> Any:
        self.calls.append({"hidden_states": hidden_states, **inputs})
        return (torch.zeros_like(hidden_states[:, :4]),)


@pytest.mark.parametrize("variant", ["i2v", "flf2v", "i2v-a14b"])
def test_sampling_feeds_any_channels(
    variant: str, tiny_family: Callable[..., Any]
) -> None:
    """Also those that show what the pipeline has no argument for."""
    family = tiny_family("wan", variant=variant)
    states = family.channel_states(ConditionPixels(clip(), known_frames(0, 5, 8)))
    conditioning = family.collate_states([family.encode_text(["a"])[0] | states])
    network = Recorder()
    nets = {expert.name: network for expert in family.spec.experts}
    request = SampleRequest(ClipShape(FRAMES, SIDE, SIDE, 16.0), 2, 1.0, (1,))
    family.sample(nets, conditioning, None, request)

    assert network.calls
    for call in network.calls:
        assert torch.equal(call["hidden_states"][0, 4:], states["image"])
        image_states = call["encoder_hidden_states_image"]
        if variant == "flf2v":
            assert image_states.shape == (2, 5, 16)
        elif variant == "i2v":
            assert torch.equal(image_states[0], states["clip"])
        else:
            assert image_states is None
