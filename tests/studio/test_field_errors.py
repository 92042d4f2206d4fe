"""What is wrong with a form names its field, so that the page shows it there."""

import json
from pathlib import Path
from typing import Any

import pytest

from videotune.studio import projects


@pytest.mark.parametrize(
    ("address", "values", "field"),
    [
        ("/create", {"title": "  "}, "title"),
        ("/create", {"title": "Dogs", "card": "other"}, "vram"),
        ("/create", {"title": "Dogs", "card": "other", "vram": "much"}, "vram"),
        ("/p/cats/rename", {"title": ""}, "title"),
        ("/p/cats/setup/preset/save", {"name": ""}, "name"),
        ("/p/cats/data/source", {"path": "no such thing"}, "path"),
        ("/p/cats/data/auto-caption", {"how": "server"}, "endpoint"),
        ("/p/cats/data/auto-caption", {"how": ""}, "model"),
        ("/p/cats/run/draw", {"run": "r", "prompt": " "}, "prompt"),
        ("/p/cats/run/draw", {"run": "r", "prompt": "a", "seed": "x"}, "seed"),
        ("/p/cats/run/copy", {"run": "r"}, "comfyui"),
        ("/p/cats/run/copy", {"run": "r", "comfyui": "/no/such/folder"}, "comfyui"),
        ("/settings", {"comfyui": "/no/such/folder"}, "comfyui"),
    ],
)
def test_an_error_names_the_field_that_it_is_about(
    tmp_path: Path, client: Any, address: str, values: dict[str, str], field: str
) -> None:
    cats = projects.create(tmp_path, "Cats", preset="toy")
    (cats.folder / "runs" / "r").mkdir(parents=True)
    answer = client.post(address, data=values)
    assert answer.status_code == 422
    toast = json.loads(answer.headers["HX-Trigger"])["toast"]
    assert toast["field"] == field, toast
