"""Prompts from a file: musubi-tuner's lines, and lists."""

from pathlib import Path
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, resolve_config
from videotune.sampling.prompts import parse_prompt

CAT = "A cat walks on the grass, realistic style."
OWN = {"resolution": "480x640", "frames": 25, "seed": 1, "steps": 20}
MORE = {"negative": "blurry, low", "guidance": 4.5, "shift": 3.0}
LINES: list[tuple[str, Any]] = [
    (f"{CAT} --w 640 --h 480 --f 25 --d 1 --s 20", {"prompt": CAT} | OWN),
    (
        "a dog -- half-asleep --n blurry, low --l 4.5 --fs 3",
        {"prompt": "a dog -- half-asleep"} | MORE,
    ),
    ("a cow, well-lit -s --5", "a cow, well-lit -s --5"),
]


@pytest.mark.parametrize(("line", "prompt"), LINES)
def test_a_line_is_read_as_musubi_tuner_writes_it(line: str, prompt: Any) -> None:
    assert parse_prompt(line, "here") == prompt


@pytest.mark.parametrize(
    "line",
    ["a --quality film", "a --w 640", "a --s many", "a --s", "--s 3"],
)
def test_a_line_that_says_something_else_is_refused(line: str) -> None:
    with pytest.raises(VideotuneError, match=r"^prompts\.txt:3: "):
        parse_prompt(line, "prompts.txt:3")


def test_a_file_of_prompts_is_read_once_into_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# two prompts\n\na cat --s 3\na dog\n")
    (tmp_path / "a.yaml").write_text("- prompt: a cat\n  steps: 3\n- a dog\n")
    for name in ("a.txt", "a.yaml"):
        words = Overrides(
            preset="toy", data="clips", sets=(f"samples={tmp_path / name}",)
        )
        cat, dog = resolve_config(words)[0].config.samples
        assert (cat.prompt, cat.steps, dog) == ("a cat", 3, "a dog")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", ""), ("a.json", '{"a": 1}'), ("b.txt", "a --x"), ("c.json", "[")],
)
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    for path in (tmp_path / name, tmp_path / "missing.txt"):
        with pytest.raises(VideotuneError):
            resolve_config(
                Overrides(preset="toy", data="clips", sets=(f"samples={path}",))
            )
