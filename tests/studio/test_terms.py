"""Messages of the commands reach a page without options of a terminal."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import videotune
from videotune.errors import VideotuneError
from videotune.queue.jobs import QueuedJob
from videotune.reporter.read import mapping
from videotune.studio import header, web
from videotune.studio.failures import first_sentence
from videotune.studio.terms import in_studio_terms
from videotune.text import capitalized
from videotune.validation.verdict_words import ErrorReference

PACKAGE = Path(videotune.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z]|`videotune |dataset (is )?of kind")


def messages() -> set[str]:
    """Every text of the packages whose errors a page may show, without docstrings."""
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ("cli", "studio"):
            continue
        tree = ast.parse(path.read_text())
        documents = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        }
        for node in ast.walk(tree):
            if id(node) in documents:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                texts.add("".join(p if isinstance(p, str) else "X" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return {text for text in texts if OPTION.search(text) and " " in text}


def test_no_message_of_the_package_keeps_an_option() -> None:
    texts = messages()
    assert len(texts) > 40
    for text in texts:
        in_page = in_studio_terms(text)
        assert not re.search(r"(?<![\w-])--[a-z]|dataset (is )?of kind", in_page), text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "2 of the clips would be skipped:\n  a: b\n"
            "Fix or remove them, or allow it: --allow-skips 2",
            "2 of the clips would be skipped:\n  a: b\n"
            "Mend or remove them on the page Data, or leave them out there.",
        ),
        (
            "there is no preset 'x': did you mean 'y'?  `videotune presets list` shows all.",
            "there is no preset 'x': did you mean 'y'?",
        ),
        (
            "--resume --set micro_batch_size=1: less at once",
            "set micro_batch_size to 1 and resume: less at once",
        ),
        (
            "Add clips, or put some into a dataset of kind validation",
            "Add clips, or choose “Keep aside” for some",
        ),
        (
            "captions were not counted in tokens: the base model's tokenizer is not on this machine yet",
            "The tokens of the captions are estimated from their words.",
        ),
        ("a -- b", "a -- b"),
        ("nothing to say", "nothing to say"),
    ],
)
def test_a_remedy_is_named_by_its_place_in_the_pages(text: str, said: str) -> None:
    assert in_studio_terms(text) == said


def test_all_ways_of_a_message_to_a_page_translate_it(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise VideotuneError("none: pass --data DIR")

    monkeypatch.setitem(header.REGIONS, "status", fail)
    page = client.get("/", headers={"HX-Request": ""}).text
    assert "None: pass data DIR" in page
    monkeypatch.setattr(web, "describe_outcome", lambda job: "give --out DIR")
    job: QueuedJob = object()  # type: ignore[assignment]
    assert web.TEMPLATES.globals["why"](job) == "give out DIR"
    monkeypatch.setattr("videotune.studio.projects.create", fail)
    answer = client.post("/create", data={"title": "x"})
    assert answer.text == "none: pass data DIR"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("most clips are slow", "Most clips are slow"),
        ("resolution: it makes frames wide", "Resolution: it makes frames wide"),
        ("no-one's clip is used", "No-one's clip is used"),
        ("3 frame rates are mixed", "3 frame rates are mixed"),
        ("“Target FPS” is 8", "“Target FPS” is 8"),
        ("cat.mp4 is short", "cat.mp4 is short"),
        ("bf16 is not exact here", "bf16 is not exact here"),
        ("clips/cat.mp4: too short", "clips/cat.mp4: too short"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_and_a_name_stays(
    text: str, sentence: str
) -> None:
    assert capitalized(text) == sentence


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (
            "5 steps had no finite loss; the journal names them. A resume meets the same",
            "5 steps had no finite loss; the journal names them",
        ),
        ("clips/a.mp4: there is no a.txt", "clips/a.mp4: there is no a.txt"),
        ("rate 1e-4 vs. the usual", "rate 1e-4 vs. the usual"),
    ],
)
def test_a_bar_says_why_a_training_failed_in_one_sentence(
    reason: str, sentence: str
) -> None:
    assert first_sentence(reason) == sentence
    assert first_sentence(f"\n{reason}\nmore") == sentence


def test_a_verdict_names_settings_with_links_and_parts_its_sentences() -> None:
    verdict = {
        "verdict": "OVERFITTING",
        "reason": "the training clips are being learned by heart: a run with a smaller validate_every "
        "or <another> learning_rate has more",
        "best": 0.8,
        "best_step": 200,
        "quantile": 3,
        "step": 400,
    }
    page = web.TEMPLATES.from_string(
        '{% from "macros.html.j2" import verdict_line with context %}'
        "{{ verdict_line(verdict, reference)|setting_links('my cats') }}"
    ).render(verdict=mapping(verdict), reference=ErrorReference())
    for key in ("validate_every", "learning_rate"):
        assert f'<a href="/p/my%20cats/setup#f-{key}">“' in page
        assert f" {key} " not in page
    assert "&lt;another&gt;" in page
    assert '<p class="state">' in page
    sentences = re.sub(r"<[^>]+>", "", page)
    assert not re.search(r"[a-z]\.[A-Z]", sentences)
    assert "has more. It began at noise level 3" in sentences
