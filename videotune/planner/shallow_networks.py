"""Readings of deep networks, calculated from those of shallow ones: the blocks of a list
are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from videotune.planner.ledger import Reading

Depths = tuple[tuple[str, int], ...]
"""The number of blocks of each list of blocks, by the list's path."""


FEW = 2


MORE = 4
"""Blocks of a list in the shallow networks.

One block would be both the first and the last.
"""


def read_deep(read: Callable[[Depths], Reading], blocks: Mapping[str, int]) -> Reading:
    """Return the reading of a deep network, calculated from shallow networks.

    Blocks of a list are alike, so every number is affine in their count. One network
    has FEW blocks of every list, and for each list another one has MORE. Shallow
    networks are read as they are.

    Args:
        read: Reads a network with these blocks.
        blocks: The number of blocks of each list.
    """
    few_blocks = shallow_counts(blocks)
    base = read(tuple(few_blocks.items()))
    result = base
    for path, count in blocks.items():
        few = few_blocks[path]
        more = min(MORE, count)
        if more <= few:
            continue
        more_blocks = {**few_blocks, path: more}
        deeper = read(tuple(more_blocks.items()))
        times = (count - few) / (more - few)
        result = result.extrapolated(base, deeper, times)
    return result


def shallow_counts(blocks: Mapping[str, int]) -> dict[str, int]:
    """Return the number of blocks of each list in the shallowest network."""
    counts = {}
    for path, count in blocks.items():
        counts[path] = min(FEW, count)
    return counts
