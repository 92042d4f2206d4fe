"""What the tests of families share: every kind of tiny checkpoint, clips and batches
for it, and edits of its files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from videotune.adapters.lora import add_lora
from videotune.config.sections import Lora
from videotune.models.registry import find, names
from videotune.types import Batch, ClipShape, ConditionPixels, LatentDistribution

FAMILIES = pytest.mark.parametrize("name", names())
KINDS = pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in names() for variant in find(name).variants],
    ids=lambda word: word,
)
"""Every family with each of the kinds of checkpoint that it knows."""
GREY = 128
"""A pixel in the middle, which 8 bits do not have exactly."""
Bases, Open = Callable[..., Path], Callable[..., Any]


def small_shape(family: Any) -> ClipShape:
    """The smallest shape of more than one latent frame, if the family takes one."""
    rules = family.spec.rules
    side = 2 * rules.side_multiple
    return ClipShape(rules.frame_step + rules.frame_rest, side, side, rules.fps)


def shapes_of(family: Any) -> list[ClipShape]:
    """Shapes of several counts of frames and sizes, as far as the checkpoint takes more
    than one.
    """
    rules, small = family.spec.rules, small_shape(family)
    if rules.size is not None:
        return [small]
    side = rules.side_multiple
    still = ClipShape(1, 3 * side, 2 * side, rules.fps)
    return [
        small,
        still,
        ClipShape(
            2 * rules.frame_step + rules.frame_rest, 2 * side, 3 * side, rules.fps
        ),
    ]


def clip_of(family: Any, shape: ClipShape, seed: int) -> torch.Tensor:
    """A clip (3,T,H,W) of noise in 256 levels, as a decoder gives them."""
    random = torch.Generator().manual_seed(seed)
    levels = torch.randint(
        256, (3, shape.frames, shape.height, shape.width), generator=random
    )
    return levels.float() / 127.5 - 1


def batch_of(
    family: Any,
    captions: list[str],
    seed: int = 0,
    given: bool = False,
    shape: ClipShape | None = None,
) -> Batch:
    """Clips of noise with these captions; where the family is told an image, each is
    told its own first frame.

    ``given``: and feeds that frame clean, where the family does that.
    """
    shape = shape or small_shape(family)
    moments = [
        family.encode_video(clip_of(family, shape, seed + i))
        for i in range(len(captions))
    ]
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn(len(captions), *moments[0].mean.shape, generator=generator)
    clean = torch.zeros(len(captions), 1, x0.shape[2], 1, 1, dtype=torch.bool)
    clean[:, :, 0] = given and family.spec.image_conditioning == "replace"
    texts = family.encode_text(captions)
    shown = [
        shown_of(family, clip_of(family, shape, seed + i), moments[i])
        for i in range(len(captions))
    ]
    conditioning = family.collate_states(
        [text | states for text, states in zip(texts, shown, strict=True)]
    )
    fps = torch.full((len(captions),), shape.fps)
    return Batch.of(
        x0,
        conditioning,
        conditioning_mask=clean,
        loss_mask=(~clean).float(),
        captions=tuple(captions),
        fps=fps,
    )


def shown_of(
    family: Any, clip: torch.Tensor, moments: LatentDistribution
) -> dict[str, torch.Tensor]:
    """What the network reads of a clip beside its text: its first frame, or with control
    channels its upper half, and grey as the control of the rest.
    """
    if not family.spec.control_channels:
        return dict(moments.extras)
    known = torch.zeros(clip.shape[1:], dtype=torch.bool)
    known[:, : known.shape[1] // 2] = True
    grey = torch.full_like(clip, GREY / 127.5 - 1)
    return family.channel_states(ConditionPixels(clip, known, grey))


def denoisers(family: Any) -> dict[str, nn.Module]:
    return {expert.name: family.denoiser(expert.name) for expert in family.spec.experts}


def first_of(family: Any) -> nn.Module:
    return family.denoiser(family.spec.experts[0].name)


def noisy_lora(
    family: Any, net: nn.Module, seed: int = 0, targets: Any = "linear"
) -> dict[str, nn.Parameter]:
    """A LoRA in the network that changes what it answers."""
    state = add_lora(
        net, family.spec, Lora(rank=4, alpha=8, targets=targets), seed=seed
    )
    for name, parameter in state.items():
        if "lora_B" in name:
            parameter.data.normal_(
                std=0.5, generator=torch.Generator().manual_seed(seed + 1)
            )
    return state


def open_family(name: str, folder: Path) -> Any:
    """The family over a checkpoint, on the CPU in float32."""
    return find(name)(folder, torch.device("cpu"), torch.float32)


def edit_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file, or write one."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | values))
