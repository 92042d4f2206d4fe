"""Which clips may be mirrored: not those whose captions would then be wrong."""

import re
from collections.abc import Iterable

_SIDES = (
    "left|right|leftwards?|rightwards?|leftmost|rightmost|left-handed|right-handed|"
    "clockwise|counter-?clockwise|anti-?clockwise"
)
_WRITING = (
    "text|texts|word|words|letter|letters|lettering|letterings|writing|writings|"
    "handwriting|handwritten|written|writes|reads|sign|signs|signage|logo|logos|label|"
    "labels|title|titles|subtitle|subtitles|caption|captions|banner|banners|poster|"
    "posters|billboard|billboards|newspaper|newspapers|book|books|page|pages|number|"
    "numbers|digit|digits|clock|clocks|watermark|watermarks|license plate|"
    "number plate|graffiti|map|maps|keyboard|keyboards|screenshot|spelling|spells"
)
_TELLING = re.compile(rf"(?<![\w])({_SIDES}|{_WRITING})(?![\w])", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“„«][^\"“”„«»]{1,200}[\"”“»]")


def word_against_mirroring(captions: Iterable[str]) -> str:
    """Return the first word of the captions that a mirrored picture would contradict:
    a side, or writing. "" if there is none.

    Only English words are known. A text in quotation marks counts as writing.
    """
    for caption in captions:
        match = _TELLING.search(caption) or _QUOTED.search(caption)
        if match is not None:
            return match[0]
    return ""
