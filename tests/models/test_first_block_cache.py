"""Samples that skip blocks (``sample.cache_threshold``), in each family that has it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.families import clip_of, denoisers, small_shape
from videotune.memory.block_offload import stream_blocks
from videotune.models.registry import find, names
from videotune.sampling.pipeline import SampleSettings, draw

STEPS = 4
EVERY_STEP_DIFFERS = 1e-12
"""A threshold below every change, so that no block is skipped."""
NO_STEP_DIFFERS = 1e6
"""A threshold above every change, so that all steps but the first skip blocks."""

CACHING = [
    (name, variant)
    for name in names()
    if find(name).spec.caches_first_block
    for variant in find(name).variants
]


class Sampler:
    """Draws samples of a tiny checkpoint and counts how often each block runs."""

    def __init__(self, family: Any) -> None:
        self.family = family
        self.nets = denoisers(family)
        self.calls: Counter[str] = Counter()
        self.settings = SampleSettings(small_shape(family), STEPS, guidance=3.0)

        spec = family.spec
        for net in self.nets.values():
            for path in spec.blocks:
                for number, block in enumerate(net.get_submodule(path)):
                    # A block that is skipped is called, but not what is in it.
                    part = next(iter(block.children()))
                    part.register_forward_hook(self._counting(f"{path}.{number}"))
        self.conditions: list[Any] = [None, None]
        if spec.image_conditioning == "concat":
            clips = [clip_of(family, self.settings.shape, seed) for seed in (0, 1)]
            self.conditions = [family.encode_video(clip) for clip in clips]

    def _counting(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.update([name])

    def draw(
        self, threshold: float, samples: Sequence[int] = (0, 1)
    ) -> list[torch.Tensor]:
        self.calls.clear()
        texts = ["", "a", "b"]
        states = dict(zip(texts, self.family.encode_text(texts), strict=True))
        settings = replace(self.settings, cache_threshold=threshold)
        return draw(
            self.family,
            self.nets,
            settings,
            states.__getitem__,
            [(texts[1 + number], 7 + number) for number in samples],
            conditions=[self.conditions[number] for number in samples],
        )


@pytest.mark.parametrize(("name", "variant"), CACHING)
def test_a_sample_skips_blocks_only_where_little_changes(
    name: str, variant: str, tiny_family: Callable[..., Any]
) -> None:
    """With a threshold that nothing reaches, samples are those without it to the bit.
    With one that everything reaches, the blocks behind the first run in the first step
    of each sample alone.
    """
    sampler = Sampler(tiny_family(name, variant=variant))
    plain = sampler.draw(0.0)
    calls = dict(sampler.calls)
    same = sampler.draw(EVERY_STEP_DIFFERS)
    assert dict(sampler.calls) == calls
    for expected, sample in zip(plain, same, strict=True):
        assert torch.equal(expected, sample)

    skipping = sampler.draw(NO_STEP_DIFFERS)
    first, *others = calls
    assert sampler.calls[first] == calls[first]
    for other in others:
        # Each of two experts has a first step of its own.
        experts = len(sampler.nets)
        assert sampler.calls[other] == experts * calls[other] // STEPS
    for expected, sample in zip(plain, skipping, strict=True):
        assert sample.isfinite().all()
        assert not torch.equal(expected, sample)

    alone = sampler.draw(NO_STEP_DIFFERS, samples=[1])
    assert torch.equal(alone[0], skipping[1]), "it knows nothing of the sample before"
    for net in sampler.nets.values():
        assert not net.is_cache_enabled
    assert torch.equal(sampler.draw(0.0)[0], plain[0])


@pytest.mark.parametrize("variant", ["t2v", "t2v-a14b"])
def test_blocks_that_are_fetched_from_the_host_are_skipped_alike(
    variant: str, tiny_family: Callable[..., Any]
) -> None:
    """Samples of streamed blocks are those of blocks on the device."""
    plain = Sampler(tiny_family("wan", variant=variant))
    streamed = Sampler(tiny_family("wan", variant=variant))
    for net in streamed.nets.values():
        stream_blocks(net, streamed.family.spec.blocks, torch.device("cpu"), 1.0)
    for threshold in (NO_STEP_DIFFERS, 0.0):
        expected = plain.draw(threshold)
        assert all(map(torch.equal, expected, streamed.draw(threshold)))
        assert streamed.calls == plain.calls
