"""Attention that stays within each frame, where a model has it of its own over a whole video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def by_frame(attentions: Sequence[Any], kind: type, on: bool, hook: Callable[[], Any]) -> None:
    """Put a processor ``kind(own, handle)`` around that of each attention, or take it off again.

    ``hook`` registers what tells them where frames lie; its handle goes with them, and is removed with them.
    """
    inside = [attn for attn in attentions if isinstance(attn.processor, kind)]
    if on and not inside:
        handle = hook()
        for attn in attentions:
            attn.set_processor(kind(attn.processor, handle))
    if not on:
        for attn in inside:
            attn.processor.handle.remove()
            attn.set_processor(attn.processor.own)
