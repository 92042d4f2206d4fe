"""Masks on the latent grid."""

import pytest
import torch

from videotune.diffusion.regions import cell_shares, cells_without
from videotune.model_spec import VideoRules


@pytest.mark.parametrize(
    ("temporal", "spatial", "frames"), [(4, 8, 9), (8, 32, 17), (1, 4, 1), (4, 16, 1)]
)
def test_a_cell_has_the_share_of_its_pixels(
    temporal: int, spatial: int, frames: int
) -> None:
    rules = VideoRules(temporal, 1, spatial, 16.0, spatial, temporal)
    mask = torch.rand(frames, 3 * spatial, 2 * spatial, dtype=torch.float64)
    shares = cell_shares(mask, rules)

    latent_frames = (frames - 1) // temporal + 1
    assert shares.shape == (latent_frames, 3, 2)
    for frame in range(latent_frames):
        end = frame * temporal + 1
        begin = max(0, end - temporal)
        for row in range(3):
            for column in range(2):
                pixels = mask[
                    begin:end,
                    row * spatial : (row + 1) * spatial,
                    column * spatial : (column + 1) * spatial,
                ]
                assert shares[frame, row, column] == pytest.approx(float(pixels.mean()))


@pytest.mark.parametrize(("temporal", "spatial", "frames"), [(4, 8, 9), (1, 4, 1)])
def test_a_cell_is_without_a_mask_that_covers_no_pixel_of_it(
    temporal: int, spatial: int, frames: int
) -> None:
    rules = VideoRules(temporal, 1, spatial, 16.0, spatial, temporal)
    latent_frames = (frames - 1) // temporal + 1
    for frame in range(frames):
        mask = torch.zeros(frames, 3 * spatial, 2 * spatial)
        mask[frame, 2 * spatial, 2 * spatial - 1] = 1e-3  # one pixel, hardly covered
        expected = torch.ones(latent_frames, 3, 2, dtype=torch.bool)
        expected[(frame + temporal - 1) // temporal, 2, 1] = False
        assert torch.equal(cells_without(mask, rules), expected)
