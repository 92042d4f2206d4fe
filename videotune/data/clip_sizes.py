"""Choose the height and width of a clip, so that a dataset falls into few buckets.

Pure arithmetic: no file is read.
"""

import math
import re
from itertools import product

from videotune.errors import VideotuneError
from videotune.model_spec import VideoRules

MAX_SIDE = 16_384
"""Largest side in pixels of any size."""

Size = tuple[int, int]
"""Height and width in pixels."""

SizeChoices = tuple[int | Size, ...]
"""Value of ``resolution``: an integer n is an area of n², a pair is exactly that size.

Each clip takes one of the choices.
"""


def parse_resolution(
    value: int | str | list[int | str], rules: VideoRules, shrink: int = 1
) -> SizeChoices:
    """Parse 512, "512", "480x832" (height × width), or a list of these.

    Args:
        value: ``resolution`` as in the config.
        rules: sizes that the model accepts.
        shrink: the value is the size before clips are made this many times smaller.

    Raises:
        VideotuneError: for any other value, and for a size that the model does not
            accept; the message names the nearest one that it does.
    """
    if value == []:
        raise VideotuneError(
            'resolution is an empty list. Give 512, "480x832", or a list of such values.'
        )

    values = value if isinstance(value, list) else [value]
    choices = tuple(parse_size(item) for item in values)
    for choice in choices:
        _check_size(choice, rules, shrink)
    return choices


def parse_size(value: int | str) -> int | Size:
    """Parse one value of ``resolution``.

    Raises:
        VideotuneError: if it is neither an integer nor height × width.
    """
    numbers: list[int] = []
    # Turning an integer of thousands of digits into text raises an error of its own.
    if isinstance(value, str) or abs(value) <= MAX_SIDE:
        text = str(value).strip().lower()
        pair = re.fullmatch(r"([0-9]{1,6})\s*[x×]\s*([0-9]{1,6})", text)
        if pair:
            numbers = [int(side) for side in pair.groups()]
        elif re.fullmatch("[0-9]{1,6}", text):
            numbers = [int(text)]

    is_valid = bool(numbers) and min(numbers) >= 1 and max(numbers) <= MAX_SIDE
    if isinstance(value, bool) or not is_valid:
        raise VideotuneError(
            f"resolution: {value!r} is not a valid size. Give 512 (an area of 512·512), "
            f'"480x832" (height × width), or a list; a side has at most {MAX_SIDE} pixels.'
        )

    if len(numbers) == 1:
        return numbers[0]
    return numbers[0], numbers[1]


def _check_size(choice: int | Size, rules: VideoRules, shrink: int) -> None:
    """Raise VideotuneError if the model does not accept a size (times ``shrink``)."""
    problem = _size_problem(choice, rules, shrink)
    if problem is not None:
        sides = (choice,) if isinstance(choice, int) else choice  # one for an area
        text = "x".join(str(side) for side in sides)
        raise VideotuneError(f'resolution "{text}" does not suit this model: {problem}')


def _size_problem(choice: int | Size, rules: VideoRules, shrink: int) -> str | None:
    """Return why the model does not accept a size, with a remedy, or None."""
    # A single number is both sides of a square, whose area a frame has at any aspect ratio.
    sides = (choice,) if isinstance(choice, int) else choice
    multiple = rules.side_multiple * shrink

    if rules.most_area is not None:
        most_area = rules.most_area * shrink**2
        if sides[0] * sides[-1] > most_area:
            side = math.isqrt(most_area)
            return f"a frame may have at most {most_area} pixels, as {side}x{side} has. Lower it."

    if rules.size is not None:
        only_size = (shrink * rules.size[0], shrink * rules.size[1])
        if sides != only_size:
            return (
                f"it accepts only {size_rule(rules)} pixels. "
                f'Set resolution="{only_size[0]}x{only_size[1]}".'
            )

    if rules.most_side is not None and len(sides) == 2:
        most_side = rules.most_side * shrink
        if max(sides) > most_side:
            return f"a side may have at most {most_side} pixels. Lower it."
    return _multiple_problem(sides, multiple)


def _multiple_problem(sides: tuple[int, ...], multiple: int) -> str | None:
    """Return why sides (of an area: one) do not suit the model's ``multiple``, or None."""
    if len(sides) == 1:
        if sides[0] < multiple:
            return f"the smallest side that it accepts is {multiple}."
        return None

    if any(side % multiple for side in sides):
        nearest_sides = [
            max(1, math.floor(side / multiple + 0.5)) * multiple for side in sides
        ]
        nearest = "x".join(str(side) for side in nearest_sides)
        return (
            f'both sides must be multiples of {multiple}. The nearest is "{nearest}".'
        )
    return None


def size_rule(rules: VideoRules) -> str:
    """Describe the sizes, height × width, that a model accepts."""
    if rules.size is not None:
        return f"{rules.size[0]}x{rules.size[1]}"

    side_limit = "" if rules.most_side is None else f", at most {rules.most_side}"
    area_limit = (
        "" if rules.most_area is None else f", at most {rules.most_area} in all"
    )
    return f"multiples of {rules.side_multiple}{side_limit}{area_limit}"


def is_valid_size(size: Size, rules: VideoRules) -> bool:
    """Return whether the model accepts this height and width."""
    if rules.most_side is not None and max(size) > rules.most_side:
        return False
    if rules.most_area is not None and size[0] * size[1] > rules.most_area:
        return False
    if rules.size is not None and rules.size != size:
        return False
    return not any(side % rules.side_multiple for side in size)


def choose_size(
    width: int, height: int, choices: SizeChoices, rules: VideoRules, shrink: int = 1
) -> Size:
    """Choose the size of a clip.

    Of several choices, take the largest that the clip fills without upscaling; at equal
    areas the one that crops least; the smallest if it fills none. A single choice is
    taken even if it upscales (see ``upscale_factor``).

    Args:
        width: width of the clip.
        height: height of the clip.
        choices: the dataset's resolution.
        rules: sizes that the model accepts.
        shrink: the clip is made this many times smaller than the choice.

    Returns:
        Height and width of the samples.
    """
    most_side = None if rules.most_side is None else rules.most_side * shrink
    most_area = None if rules.most_area is None else rules.most_area * shrink**2
    sizes: list[Size] = []
    for choice in choices:
        if isinstance(choice, int):
            size = _size_at_aspect(
                width,
                height,
                side=choice,
                multiple=rules.side_multiple * shrink,
                most_side=most_side,
                most_area=most_area,
            )
            sizes.append(size)
        else:
            sizes.append(choice)

    def preference(size: Size) -> tuple[bool, int, float]:
        is_filled = upscale_factor(width, height, size) <= 1
        area = size[0] * size[1]
        return (
            is_filled,
            area if is_filled else -area,
            visible_share(width, height, size),
        )

    best_height, best_width = max(sizes, key=preference)
    return best_height // shrink, best_width // shrink


def upscale_factor(
    width: int, height: int, size: Size, resize: str = "center"
) -> float:
    """Return by which factor a clip is enlarged; below 1 it is reduced.

    A crop covers the size; "pad" fits into it; "stretch" scales each side by itself,
    and the larger factor counts.

    Args:
        width: width of the clip.
        height: height of the clip.
        size: height and width of the samples.
        resize: "center" or "random" (crops), "pad" or "stretch".
    """
    factors = size[0] / height, size[1] / width
    return min(factors) if resize == "pad" else max(factors)


def padded_box(width: int, height: int, size: Size) -> tuple[int, int, int, int]:
    """Return where "pad" puts the picture in ``size``: (top, left, height, width) in
    pixels.
    """
    scale = min(size[0] / height, size[1] / width)
    box_height = min(size[0], max(1, round(height * scale)))
    box_width = min(size[1], max(1, round(width * scale)))
    return (
        (size[0] - box_height) // 2,
        (size[1] - box_width) // 2,
        box_height,
        box_width,
    )


def visible_share(width: int, height: int, size: Size) -> float:
    """Return the share of the picture's area that the centre crop shows."""
    scale = upscale_factor(width, height, size)
    return size[0] * size[1] / (width * height * scale * scale)


def _size_at_aspect(
    width: int,
    height: int,
    *,
    side: int,
    multiple: int,
    most_side: int | None,
    most_area: int | None,
) -> Size:
    """Return a size of about side² pixels at the clip's aspect ratio.

    Of the multiples just below and above each ideal side, take the pair with the least
    error in aspect and in area, measured in logarithms; aspect counts twice, since its
    error is cropped away. A portrait clip gets the size of its landscape twin, turned.

    Args:
        width: width of the clip.
        height: height of the clip.
        side: root of the area.
        multiple: both sides are multiples of it.
        most_side: limit of each side.
        most_area: limit of the area.
    """
    if height > width:
        turned_height, turned_width = _size_at_aspect(
            height,
            width,
            side=side,
            multiple=multiple,
            most_side=most_side,
            most_area=most_area,
        )
        return turned_width, turned_height

    aspect = width / height
    longest_side = math.inf if most_side is None else most_side // multiple * multiple
    ideal_height = min(longest_side, side / math.sqrt(aspect))
    ideal_width = min(longest_side, side * math.sqrt(aspect))
    heights = _neighbouring_multiples(ideal_height, multiple)
    widths = _neighbouring_multiples(ideal_width, multiple)

    def error(size: Size) -> tuple[float, int]:
        aspect_error = abs(math.log(size[1] / size[0] / aspect))
        area_error = abs(math.log(size[0] * size[1] / side**2))
        return round(2 * aspect_error + area_error, 9), -size[0] * size[1]

    sizes = list(product(heights, widths))
    if most_area is not None:
        sizes = [size for size in sizes if size[0] * size[1] <= most_area]
    return min(sizes or [(multiple, multiple)], key=error)


def _neighbouring_multiples(side: float, multiple: int) -> set[int]:
    """Return the multiples just below and above a side, at least ``multiple`` itself."""
    below = math.floor(side / multiple) * multiple
    above = math.ceil(side / multiple) * multiple
    return {max(multiple, below), above}
