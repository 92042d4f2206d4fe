"""Buckets: the training windows of a library, grouped by what a step has in common."""

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from videotune.data.clip_sizes import is_valid_size, visible_share
from videotune.data.clip_table import ClipColumns
from videotune.data.library import Library
from videotune.data.window_table import WindowTable, most_expensive_first
from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules
from videotune.types import ClipShape, Pacing, Window


class BucketKey(NamedTuple):
    """What the windows of a bucket share."""

    first_step: int
    """The first step of the phase in which the bucket is shown."""
    minus_pixels: int
    """Minus the pixels of a sample, so that the most expensive bucket is the first of
    its phase."""
    shape: ClipShape
    batch_size: int
    """Samples of a forward pass. 0: the run's."""
    probability: float


def buckets(library: Library) -> dict[BucketKey, WindowTable]:
    """Group the training windows by phase, shape, batch size and probability, the most
    expensive shape first, in path order.

    A new phase begins where a dataset comes or goes. The windows of a dataset with
    repeats appear several times: a bucket lists all windows, then those with a second
    copy, and so on.

    Raises:
        VideotuneError: if no dataset is trained before a later one begins.
    """
    windows = WindowTable.of(library.windows)
    columns = library.columns
    clip_of_owner = columns.ids.positions(windows.clip_ids)
    clip_of_window = clip_of_owner[windows.owners()]
    windows_pacing = columns.pacing[clip_of_window]
    trained = {columns.pacings[number] for number in np.unique(windows_pacing)}

    positions_by_key: dict[BucketKey, list[NDArray[np.integer]]] = {}
    for first_step in _first_steps(trained):
        is_pacing_shown = np.array(
            [is_shown(pacing, first_step) for pacing in columns.pacings], bool
        )
        numbers, keys = _key_numbers(windows, columns, windows_pacing, first_step)
        # First all windows, then the second copies of those with repeats, and so on.
        for copy in range(int(columns.repeats.max(initial=1))):
            has_copy = copy < columns.repeats[clip_of_window]
            positions = np.flatnonzero(has_copy & is_pacing_shown[windows_pacing])
            for number, part in _grouped(positions, numbers[positions]):
                positions_by_key.setdefault(keys[number], []).append(part)
    return {
        key: windows.take(np.concatenate(parts))
        for key, parts in sorted(positions_by_key.items())
    }


def _key_numbers(
    windows: WindowTable,
    columns: ClipColumns,
    pacing_of_window: NDArray[np.int32],
    first_step: int,
) -> tuple[NDArray[np.int64], list[BucketKey]]:
    """Return the number of each window's bucket, and the keys of the buckets."""
    shapes = list(dict.fromkeys(kind.shape for kind in windows.kinds))
    numbers: dict[BucketKey, int] = {}
    number_by_shape = np.zeros((len(shapes), len(columns.pacings)), np.int64)
    for row, shape in enumerate(shapes):
        for column, pacing in enumerate(columns.pacings):
            key = _bucket_key(first_step, shape, pacing)
            number_by_shape[row, column] = numbers.setdefault(key, len(numbers))

    shape_of_window = windows.map_kinds(lambda kind: shapes.index(kind.shape), np.int64)
    return number_by_shape[shape_of_window, pacing_of_window], list(numbers)


def _grouped(
    positions: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each number with its positions, in their order."""
    for number in np.unique(numbers).tolist():
        yield number, positions[numbers == number]


def _bucket_key(first_step: int, shape: ClipShape, pacing: Pacing) -> BucketKey:
    minus_pixels, _ = most_expensive_first(shape)
    return BucketKey(
        first_step, minus_pixels, shape, pacing.batch_size, pacing.probability
    )


def is_shown(pacing: Pacing, step: int) -> bool:
    """Return whether a step may show clips of this pacing."""
    has_begun = pacing.from_step <= step
    return has_begun and (not pacing.until_step or step <= pacing.until_step)


def _first_steps(pacings: Collection[Pacing]) -> list[int]:
    """Return the first step of each phase in which something is shown.

    Raises:
        VideotuneError: if there is a phase before the last one that shows nothing.
    """
    borders = {1}
    for pacing in pacings:
        borders.add(pacing.from_step)
        if pacing.until_step:
            borders.add(pacing.until_step + 1)

    first_steps = sorted(borders)
    if pacings and not any(is_shown(pacing, first_steps[-1]) for pacing in pacings):
        first_steps.pop()
    # 0 has no meaning: something is shown in the last phase, so its end is not reported.
    for step, next_step in pairwise([*first_steps, 0]):
        if pacings and not any(is_shown(pacing, step) for pacing in pacings):
            raise VideotuneError(
                f"datasets.from_step: no dataset is trained from step {step} to step "
                f"{next_step - 1}. Let one begin earlier or end later (until_step)."
            )
    return first_steps


def last_windows(*tables: WindowTable) -> Iterator[Window]:
    """Yield the last window of each clip; of a clip in several tables, that of the last
    table.
    """
    yielded_ids: set[str] = set()
    for table in reversed(tables):
        # The first position of each clip, counted from the end of the table.
        owners = table.owners()
        _, from_end = np.unique(owners[::-1], return_index=True)
        for position in np.sort(len(owners) - 1 - from_end).tolist():
            window = table[position]
            if window.clip_id not in yielded_ids:
                yielded_ids.add(window.clip_id)
                yield window


def crop_problem(library: Library, rules: VideoRules, resolution: object) -> str | None:
    """Return a message if every clip loses over half of its picture to the crop, or
    None.

    Mostly this means that height and width were exchanged.

    Args:
        library: the clips.
        rules: sizes that the model accepts.
        resolution: ``resolution`` as the user set it, for the message.
    """
    tables = [
        WindowTable.of(windows)
        for windows in (library.windows, library.held_out_windows)
    ]
    kinds = [*tables[0].used_kinds(), *tables[1].used_kinds()]
    if not kinds or any(kind.resize not in ("center", "random") for kind in kinds):
        return None

    cropped = []
    shares = []
    turned_shares = []
    for window in last_windows(*tables):
        info = library.media[window.clip_id]
        size = (window.shape.height, window.shape.width)
        cropped.append(window)
        shares.append(visible_share(info.width, info.height, size))
        turned_shares.append(visible_share(info.width, info.height, size[::-1]))
        # In most datasets this is the first clip.
        if shares[-1] >= 0.5:
            return None
    largest_share = max(shares)

    height = cropped[0].shape.height
    width = cropped[0].shape.width
    remedy = 'resize="pad" keeps all of them'
    if min(turned_shares) > largest_share and is_valid_size((width, height), rules):
        remedy = (
            f'width={height} and height={width} (resolution "{width}x{height}") '
            "keep more of them"
        )
    return (
        f"resolution: {resolution} makes frames {width} wide and {height} high, and crops away "
        f"{1 - largest_share:.0%} or more of every clip; {remedy}. Set that, or "
        "allow_crop=true if this is intended."
    )
