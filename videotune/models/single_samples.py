"""Samples one by one, for pipelines that cannot sample several together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from videotune.types import Conditioning, SampleRequest


def one_by_one(
    conditioning: Conditioning,
    unconditional: Conditioning | None,
    request: SampleRequest,
) -> Iterator[tuple[Conditioning, Conditioning | None, SampleRequest]]:
    """Yield conditioning, negative conditioning and request of each sample."""
    for i, seed in enumerate(request.seeds):
        negative = None if unconditional is None else unconditional.take([i])
        single = replace(
            request,
            seeds=(seed,),
            first=None if request.first is None else request.first[[i]],
            known=None if request.known is None else request.known[[i]],
            known_mask=None if request.known_mask is None else request.known_mask[[i]],
        )
        yield conditioning.take([i]), negative, single
