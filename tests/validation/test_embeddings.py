"""The default embedding's numbers, on which thresholds of likeness rest: they change
only with its name.
"""

import pytest
import torch

from videotune.validation.embeddings import (
    HEURISTIC,
    WHOLE,
    default_embedding,
    edge_features,
    resize_square,
)


def noise(seed: int = 0) -> torch.Tensor:
    """Two pictures of noise, wider than high."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 3, 60, 90, generator=generator)


def test_the_heuristic_has_the_numbers_of_its_name() -> None:
    assert HEURISTIC == "edges-1"
    vectors = edge_features(noise())
    assert vectors.shape == (2, 704)
    places = [0, 7, 100, 511, 512, 575, 600, 703]
    expected = torch.tensor(
        [
            *(-0.0603187, 0.0570386, 0.0042119, -0.0671952),
            *(0.0529334, 0.0115519, 0.0077615, 0.0509515),
        ]
    )
    torch.testing.assert_close(vectors[0, places], expected, rtol=0, atol=2e-5)
    assert float((vectors[0] * vectors[1]).sum()) == pytest.approx(-0.0298273, abs=2e-5)


def test_the_views_are_the_frame_its_middle_and_nine_crops() -> None:
    whole, middle, *crops = default_embedding().views
    assert whole == WHOLE
    assert middle == (0.05, 0.05, 0.9)
    places = [(top, left) for top in (0.0, 0.1, 0.2) for left in (0.0, 0.1, 0.2)]
    assert crops == [(top, left, 0.8) for top, left in places]
    assert all(top + side <= 1.001 for top, _, side in crops)


def test_a_picture_is_averaged_where_it_becomes_smaller() -> None:
    """Without that, one pixel in ten would decide."""
    stripes = torch.zeros(1, 3, 60, 60)
    stripes[..., ::2] = 1.0
    small = resize_square(stripes, 6)
    torch.testing.assert_close(small, torch.full_like(small, 0.5), rtol=0, atol=0.05)
