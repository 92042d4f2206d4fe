"""Messages that name settings as the page Setup names them, instead of by their keys."""

import re
from collections import Counter
from functools import cache
from urllib.parse import quote

from markupsafe import Markup, escape

from videotune.studio.form import Field, fields
from videotune.studio.terms import in_studio_terms
from videotune.text import capitalized


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
    pattern, fields_by_key = _fields_by_key()

    def replace(match: re.Match[str]) -> str:
        return _with_value(f"“{fields_by_key[match['key']].name}”", match)

    return pattern.sub(replace, in_studio_terms(text))


def with_setting_links(text: str, project: str) -> Markup:
    """Return a message or a piece of a page in which each key of the config is the
    setting's name and leads to it.

    Args:
        text: a text, or markup, whose marks stay.
        project: name of the project.
    """
    pattern, fields_by_key = _fields_by_key()
    setup = f"/p/{quote(project, safe='')}/setup"

    def replace(match: re.Match[str]) -> str:
        field = fields_by_key[match["key"]]
        link = f'<a href="{setup}#f-{field.key}">“{escape(field.name)}”</a>'
        return _with_value(link, match)

    # The text is escaped before marks are added to it.
    return Markup(pattern.sub(replace, in_studio_terms(escape(text))))


def linked_sentence(text: str, project: str) -> Markup:
    """Return a message with links to its settings that begins with a capital letter,
    unless it begins with a setting.
    """
    return Markup(capitalized(str(with_setting_links(text, project))))


def _with_value(name: str, match: re.Match[str]) -> str:
    """Return a setting's name with the value that a text gives it: "steps=9" and
    "set steps=9" become "Steps set to 9" and "set Steps to 9".
    """
    verb = match["set"] or ""
    if not match["value"]:
        return verb + name
    if verb:
        return f"{verb}{name} to {match['value']}"
    return f"{name} set to {match['value']}"


@cache
def _fields_by_key() -> tuple[re.Pattern[str], dict[str, Field]]:
    """Return what finds a key in a text, and the setting of each key.

    A key may stand without its section if it has none, or no other key ends like it. One of a single
    word ("frames") is found with its section only, since it may be meant as a word.
    """
    last_parts = Counter(field.key.rpartition(".")[2] for field in fields())
    fields_by_key = {}
    for field in fields():
        last_part = field.key.rpartition(".")[2]
        if "." in field.key:
            fields_by_key[field.key] = field
        is_plain = "." not in field.key or last_parts[last_part] == 1
        if "_" in last_part and is_plain:
            fields_by_key[last_part] = field

    longest_first = sorted(fields_by_key, key=len, reverse=True)
    keys = "|".join(map(re.escape, longest_first))
    pattern = rf"(?P<set>\b[Ss]et )?`?(?<![\w.])(?P<key>{keys})(?![\w.]*\w)(?:=(?P<value>[^\s,;:`]+))?`?"
    return re.compile(pattern), fields_by_key
