"""HunyuanVideo's latents are those of the authors' class, at every number of frames."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.families import Open
from videotune.latent_cache.keys import CacheKeys

HUNYUAN = "hunyuan_video"


def encoded_in_tiles(vae: Any, clip: torch.Tensor) -> torch.Tensor:
    """Encode in the tiles of time of the authors' class, for clips above 64 frames.

    Tiles of 65 frames begin 48 apart; 4 latents of each are blended into the next one.
    """
    tiles = []
    for begin in range(0, clip.shape[2], 48):
        tile = vae.quant_conv(vae.encoder(clip[:, :, begin : begin + 65]))
        tiles.append(tile if begin == 0 else tile[:, :, 1:])

    parts = [tiles[0][:, :, :13]]
    for before, tile in pairwise(tiles):
        overlap = min(4, before.shape[2], tile.shape[2])
        for i in range(overlap):
            share = i / overlap
            earlier = before[:, :, i - overlap]
            tile[:, :, i] = (1 - share) * earlier + share * tile[:, :, i]
        parts.append(tile[:, :, :12])
    return torch.cat(parts, dim=2)[:, :, : (clip.shape[2] - 1) // 4 + 1]


@pytest.mark.parametrize("frames", [1, 13, 17, 21, 33, 61, 65, 77, 113])
def test_a_clip_is_encoded_as_a_whole_up_to_64_frames(
    tiny_family: Open, frames: int
) -> None:
    """As by the authors' class; above, in its tiles. diffusers' are of 17 frames."""
    family = tiny_family(HUNYUAN)
    clip = torch.randn(1, 3, frames, 32, 32, generator=torch.manual_seed(frames))
    vae = family.vae()
    plain_vae = type(vae).from_pretrained(family.folder / "vae")
    with torch.no_grad():
        if frames <= 64:
            expected = plain_vae.quant_conv(plain_vae.encoder(clip))
        else:
            expected = encoded_in_tiles(plain_vae, clip)
    mean = expected.chunk(2, dim=1)[0][0] * vae.config.scaling_factor

    latents = family.encode_video(clip[0])
    assert torch.allclose(latents.mean, mean, atol=1e-5)
    assert latents.mean.shape[1] == (frames - 1) // 4 + 1
    tiles = (vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames)
    assert tiles == (16, 12), "previews are decoded as diffusers decodes them"

    # The class itself, without the family's hand on it.
    with torch.no_grad():
        plain = plain_vae.encode(clip).latent_dist.mean[0] * vae.config.scaling_factor
    assert torch.allclose(plain, mean, atol=1e-5) is (frames <= 17)


def test_latents_of_diffusers_tiles_are_not_read_from_a_cache(
    tiny_family: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = tiny_family(HUNYUAN)
    name = CacheKeys.of(family, 0).vae
    monkeypatch.setattr(type(family), "encoding", "")
    assert CacheKeys.of(family, 0).vae == family.fingerprints()["vae"] != name
