"""What a plan is made with has the form of what a training is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from videotune.models.registry import find, names
from videotune.rng import draws
from videotune.types import ClipShape

EACH = [(name, variant) for name in names() for variant in find(name).variants]


@pytest.mark.parametrize(("name", "variant"), EACH)
def test_blank_states_are_those_of_a_real_clip_and_caption(
    name: str, variant: str, tiny_bases: Callable[..., Path]
) -> None:
    family = find(name)(tiny_bases(name, variant), torch.device("cpu"), torch.float32)
    rules = family.spec.rules
    side = 2 * rules.side_multiple
    shape = ClipShape(rules.frame_step + rules.frame_rest, side, side, rules.fps)
    clip = torch.zeros(3, shape.frames, shape.height, shape.width)
    real = family.encode_text(["word " * 600])[0] | dict(family.encode_video(clip, draws(0, "image noise")).extras)
    blank = family.blank_states(shape)
    assert {k: (v.shape, v.dtype) for k, v in blank.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
