"""docs/api.md: its cells run one after the other, as in a notebook, and give what the
page says.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import videotune

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_cells_run_and_give_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S
    ):
        exec(compile(cell, str(PAGE), "exec"), names)
    assert [clip["used"] for clip in names["checked"].account["clips"]] == [True] * 4
    assert names["planned"].plan["fits"] is True
    assert (
        names["trained"].why,
        names["trained"].step,
        names["trained"].exit_code,
    ) == (
        "done",
        4,
        0,
    )
    assert [path.suffix for path in names["videos"]] == [".mp4"]
    assert any(name.endswith("lora_A.weight") for name in names["names"])
    assert names["page"] == Path("run/report.html")
    assert names["page"].is_file()


def test_each_function_of_the_api_stands_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in videotune.COMMANDS if f"| `{name}(" not in page] == []
