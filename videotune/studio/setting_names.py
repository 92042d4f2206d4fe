"""Messages that name settings as the page Setup names them, instead of by their keys."""

import re
from collections import Counter
from functools import cache

from videotune.studio.form import fields
from videotune.studio.terms import in_studio_terms


def with_value_words(text: str) -> str:
    """Return a message in which the value of a setting is called as its list does:
    "“Windows” is not “slide”".
    """
    word_by_value: dict[str, str] = {}
    for field in fields():
        for value, words in field.words.items():
            if value:
                word_by_value.setdefault(value, words)

    def replace(match: re.Match[str]) -> str:
        return f"“{word_by_value.get(match[1], match[1])}”"

    return re.sub(r'"([\w.]+)"', replace, text)


def in_page_words(text: str) -> str:
    """Return a message without options of a terminal and without keys of the config."""
    pattern, names = _names_of_keys()

    def replace(match: re.Match[str]) -> str:
        name = f"“{names[match['key']]}”"
        return f"{name} set to {match['value']}" if match["value"] else name

    return pattern.sub(replace, in_studio_terms(text))


@cache
def _names_of_keys() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return what finds a key in a text, and the name of each key.

    A key may stand without its section if no other key ends like it. One of a single
    word ("frames") is found with its section only, since it may be meant as a word.
    """
    last_parts = Counter(field.key.rpartition(".")[2] for field in fields())
    names = {}
    for field in fields():
        last_part = field.key.rpartition(".")[2]
        if "." in field.key:
            names[field.key] = field.name
        if "_" in last_part and last_parts[last_part] == 1:
            names[last_part] = field.name

    longest_first = sorted(names, key=len, reverse=True)
    keys = "|".join(map(re.escape, longest_first))
    pattern = rf"`?(?<![\w.])(?P<key>{keys})(?![\w.]*\w)(?:=(?P<value>[^\s,;:`]+))?`?"
    return re.compile(pattern), names
