"""What a cache is to hold: the captions and samples of a run, which of them are missing,
and what each process encodes of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from videotune.latent_cache.conditions import SeparateCondition, condition_key
from videotune.latent_cache.entry import EntryName
from videotune.latent_cache.fitting import CacheItem, FitsFn, WindowVariant
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import LatentCache


@dataclass(frozen=True)
class CacheItems:
    """Captions and (window, variant) samples: what is read from a cache, or what is
    missing in it.
    """

    captions: tuple[str, ...]
    samples: tuple[WindowVariant, ...]
    masks: tuple[WindowVariant, ...] = ()
    """Samples whose loss mask is missing. In what a run reads it is empty: which of
    ``samples`` have a mask follows from their windows.
    """

    conditions: tuple[SeparateCondition, ...] = ()
    """Conditions that are encoded on their own."""

    def __bool__(self) -> bool:
        return bool(self.captions or self.samples or self.masks or self.conditions)


def items_by_entry(keys: CacheKeys, items: CacheItems) -> dict[EntryName, CacheItem]:
    """Return the names of the entries that items are read from, each with the first
    caption or sample that needs it.
    """
    entries: dict[EntryName, CacheItem] = {}
    for caption in items.captions:
        entries["text", keys.text_key(caption)] = caption
    # Several samples may have one entry: the first of them stands for it.
    for window, variant in items.samples:
        sample = keys.frame_sample(window, variant)
        entries.setdefault(("latents", keys.latents_key(sample)), (window, variant))
        mask = keys.mask_key(sample)
        if mask is not None:
            entries.setdefault(("masks", mask), (window, variant))
    for condition in items.conditions:
        key = condition_key(keys, condition)
        entries.setdefault(("conditions", key), condition)
    return entries


def missing_items(
    store: LatentCache,
    keys: CacheKeys,
    items: CacheItems,
    fits: FitsFn = lambda entry, item: True,
) -> CacheItems:
    """Return the captions and samples that have no usable entry, in order, each entry
    once.

    An entry that does not fit what it is for counts as missing, and so does a
    damaged one among those that stay in memory and are therefore read now.
    """
    entries = items_by_entry(keys, items)
    store.mark_unusable(entries, fits)

    captions: list[str] = []
    samples: list[WindowVariant] = []
    masks: list[WindowVariant] = []
    conditions: list[SeparateCondition] = []
    for name, item in entries.items():
        if store.has(*name):
            continue
        if isinstance(item, str):
            captions.append(item)
        elif isinstance(item, SeparateCondition):
            conditions.append(item)
        elif name[0] == "masks":
            masks.append(item)
        else:
            samples.append(item)
    return CacheItems(tuple(captions), tuple(samples), tuple(masks), tuple(conditions))


def shard_work(todo: CacheItems, part: int, of: int) -> CacheItems:
    """Return what one of several processes encodes: every n-th caption, and clips with
    nearly as many pixels each.

    Samples of one clip stay together, because they are decoded in one pass.

    Args:
        todo: what all processes encode together.
        part: this process, counted from 0.
        of: the number of processes.
    """
    samples_by_clip: dict[str, list[WindowVariant]] = {}
    for window, variant in todo.samples:
        samples_by_clip.setdefault(window.clip_id, []).append((window, variant))

    # The largest clip first, each to the process with the fewest pixels so far.
    pixels_by_process = [0] * of
    own_samples: list[WindowVariant] = []
    for samples in sorted(samples_by_clip.values(), key=_pixels, reverse=True):
        process = pixels_by_process.index(min(pixels_by_process))
        pixels_by_process[process] += _pixels(samples)
        if process == part:
            own_samples += samples
    return CacheItems(
        todo.captions[part::of],
        tuple(own_samples),
        todo.masks[part::of],
        todo.conditions[part::of],
    )


def _pixels(samples: Iterable[WindowVariant]) -> int:
    shapes = [window.shape for window, _ in samples]
    return sum(shape.frames * shape.height * shape.width for shape in shapes)
