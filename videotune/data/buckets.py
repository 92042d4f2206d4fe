"""Pure arithmetic: which height and width a clip takes, so that a dataset falls into few buckets."""

import math
import re
from itertools import product

from videotune.errors import VideotuneError
from videotune.types import VideoRules

MAX_SIDE = 16_384
"""Pixels of a side beyond which no video goes."""

Size = tuple[int, int]
"""Height and width in pixels."""


Choices = tuple[int | Size, ...]
"""What ``resolution`` asks for: an integer is an area of side², a pair exactly that size; several: one of them."""


def parse_resolution(
    value: int | str | list[int | str], rules: VideoRules, shrink: int = 1
) -> Choices:
    """Read 512, "512", "480x832" (height × width), or a list of these.

    VideotuneError for anything else, and where a size is none of the model's (times ``shrink``), with the nearest that is.
    """
    if value == []:
        raise VideotuneError(
            'resolution is an empty list. Give 512, "480x832", or a list of such values.'
        )
    choices = tuple(
        parse_size(item) for item in (value if isinstance(value, list) else [value])
    )
    for choice in choices:
        _check(choice, rules, shrink)
    return choices


def parse_size(value: int | str) -> int | Size:
    """One size of ``resolution``; VideotuneError for what is none."""
    text = (
        str(value).strip().lower() if isinstance(value, str) or abs(value) <= MAX_SIDE else ""
    )
    pair = re.fullmatch(r"([0-9]{1,6})\s*[x×]\s*([0-9]{1,6})", text)
    numbers = (
        [int(n) for n in pair.groups()]
        if pair
        else [int(text)]
        if re.fullmatch("[0-9]{1,6}", text)
        else []
    )
    if (
        isinstance(value, bool)
        or not numbers
        or not 1 <= min(numbers) <= max(numbers) <= MAX_SIDE
    ):
        forms = f'512 (an area of 512·512), "480x832" (height × width), or a list; a side has at most {MAX_SIDE}'
        raise VideotuneError(f"resolution {value!r} is not understood. Give {forms}.")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _check(choice: int | Size, rules: VideoRules, shrink: int) -> None:
    sides = (choice,) if isinstance(choice, int) else choice
    asked = "x".join(map(str, sides))
    multiple = rules.side_multiple * shrink
    fault = ""
    if rules.most_area is not None and sides[0] * sides[-1] > (
        most_area := rules.most_area * shrink**2
    ):
        side = math.isqrt(most_area)
        fault = f"a frame may have at most {most_area} pixels, as {side}x{side} has. Lower it."
    elif rules.size is not None and sides != (
        only := tuple(shrink * side for side in rules.size)
    ):
        fault = f'it takes one size of {size_rule(rules)} pixels alone. Set resolution="{only[0]}x{only[1]}".'
    elif (
        rules.most_side is not None
        and len(sides) == 2
        and max(sides) > rules.most_side * shrink
    ):
        fault = f"a side may have at most {rules.most_side * shrink} pixels. Lower it."
    elif len(sides) == 1 and sides[0] < multiple:
        fault = f"{multiple} is the smallest side that it takes."
    elif len(sides) == 2 and any(side % multiple for side in sides):
        near = "x".join(
            str(max(1, math.floor(side / multiple + 0.5)) * multiple) for side in sides
        )
        fault = f'both sides must be multiples of {multiple}. The nearest is "{near}".'
    if fault:
        raise VideotuneError(f'resolution "{asked}" does not suit this model: {fault}')


def size_rule(rules: VideoRules) -> str:
    """The sizes, height × width, that a model takes, in words."""
    if rules.size is not None:
        return f"{rules.size[0]}x{rules.size[1]}"
    most = "" if rules.most_side is None else f", at most {rules.most_side}"
    area = "" if rules.most_area is None else f", at most {rules.most_area} in all"
    return f"multiples of {rules.side_multiple}{most}{area}"


def suits(size: Size, rules: VideoRules) -> bool:
    """Whether the model takes this height and width."""
    inside = rules.most_side is None or max(size) <= rules.most_side
    inside = inside and (rules.most_area is None or size[0] * size[1] <= rules.most_area)
    return (
        inside
        and rules.size in (None, size)
        and not any(side % rules.side_multiple for side in size)
    )


def choose_size(
    width: int, height: int, choices: Choices, rules: VideoRules, shrink: int = 1
) -> Size:
    """The (height, width) that a clip of ``width`` × ``height`` takes, ``shrink`` times smaller than asked.

    Of several choices, the largest that it fills without upscaling, at equal areas the one that crops least; the smallest
    if it fills none. One choice is taken even where it upscales: see ``upscale_factor``.
    """
    most = None if rules.most_side is None else rules.most_side * shrink
    area = None if rules.most_area is None else rules.most_area * shrink**2
    multiple = rules.side_multiple * shrink
    sizes = [
        _at_aspect(width, height, c, multiple, most, area) if isinstance(c, int) else c
        for c in choices
    ]

    def largest(size: Size) -> tuple[bool, int, float]:
        fills = upscale_factor(width, height, size) <= 1
        area = size[0] * size[1]
        return fills, area if fills else -area, kept_share(width, height, size)

    high, wide = max(sizes, key=largest)
    return high // shrink, wide // shrink


def upscale_factor(width: int, height: int, size: Size, resize: str = "center") -> float:
    """How much a clip must be enlarged for ``size`` (height, width); at most 1 where it need not be.

    A crop covers the size; "pad" fits into it; "stretch" takes each side by itself, and the larger factor counts.
    """
    factors = size[0] / height, size[1] / width
    return min(factors) if resize == "pad" else max(factors)


def padded_box(width: int, height: int, size: Size) -> tuple[int, int, int, int]:
    """(top, left, height, width) in pixels of the whole picture fitted into ``size`` (height, width), about its centre."""
    scale = min(size[0] / height, size[1] / width)
    high = min(size[0], max(1, round(height * scale)))
    wide = min(size[1], max(1, round(width * scale)))
    return (size[0] - high) // 2, (size[1] - wide) // 2, high, wide


def kept_share(width: int, height: int, size: Size) -> float:
    """The share of the picture that the centre crop keeps."""
    scale = upscale_factor(width, height, size)
    return size[0] * size[1] / (width * height * scale * scale)


def _at_aspect(
    width: int, height: int, side: int, multiple: int, most: int | None, area: int | None
) -> Size:
    """About side² pixels at the clip's aspect ratio, both sides multiples; a portrait clip gets its landscape twin turned.

    Of the multiples just below and above each ideal side, the pair with the least error in aspect and in area, measured in
    logarithms; aspect counts twice, since its error is cropped away. No side is longer than ``most``, no pair has more
    pixels than ``area``.
    """
    if height > width:
        turned = _at_aspect(height, width, side, multiple, most, area)
        return turned[1], turned[0]
    aspect = width / height
    longest = math.inf if most is None else most // multiple * multiple
    ideal = (min(longest, side / math.sqrt(aspect)), min(longest, side * math.sqrt(aspect)))
    around = [
        {max(multiple, math.floor(s / multiple) * multiple), math.ceil(s / multiple) * multiple}
        for s in ideal
    ]

    def error(size: Size) -> tuple[float, int]:
        high, wide = size
        wrong = 2 * abs(math.log(wide / high / aspect)) + abs(math.log(high * wide / side**2))
        return round(wrong, 9), -high * wide

    pairs = [
        (high, wide) for high, wide in product(*around) if area is None or high * wide <= area
    ]
    return min(pairs or [(multiple, multiple)], key=error)
