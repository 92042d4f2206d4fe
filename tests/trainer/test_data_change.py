"""What has changed in a run's data is described by kind, with the first names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from videotune.trainer import data_change
from videotune.trainer.data_change import describe_change


def account(clip: str, path: str, **fields: Any) -> dict[str, Any]:
    """A clip's entry of check.json."""
    return {
        "id": clip,
        "path": path,
        "used": True,
        "held_out": False,
        "captions": ["a"],
        "mask": None,
        "start_image": None,
        **fields,
    }


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is said of accounts before, and of clips now."""

    def change(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
        path = tmp_path / "check.json"
        path.write_text(json.dumps({"clips": old}))
        # Other tests hold the form of check.json; here only clips matter.
        monkeypatch.setattr(
            data_change, "read_record", lambda path, _: json.loads(path.read_text())
        )
        clips = [
            SimpleNamespace(
                id=each["id"],
                path=each["path"],
                captions=tuple(each["captions"]),
                held_out=each["held_out"],
            )
            for each in new
        ]
        library = SimpleNamespace(clips=clips, accounts=new)
        job: Any = SimpleNamespace(library=library)
        return describe_change(path, job)

    return change


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ([account("1", "a.mp4")], [account("1", "a.mp4"), account("2", "b.mp4")], "1 clip added (b.mp4)"),
        ([account("1", "a.mp4"), account("2", "b.mp4")], [account("1", "a.mp4")], "1 clip removed (b.mp4)"),
        ([account("1", "a.mp4", used=False)], [account("1", "a.mp4")], "1 clip added (a.mp4)"),
        ([account("1", "a.mp4")], [account("2", "a.mp4")],
         "1 clip with other bytes under the same name (a.mp4)"),
        ([account("1", "x/a.mp4")], [account("1", "y/b.mp4")], "1 clip renamed (b.mp4)"),
        ([account("1", "a.mp4")], [account("1", "a.mp4", captions=["b"])],
         "1 clip with another caption (a.mp4)"),
        ([account("1", "a.mp4")], [account("1", "a.mp4", mask="m")],
         "1 clip with another mask or start image (a.mp4)"),
        ([account("1", "a.mp4", start_image="s")], [account("1", "a.mp4")],
         "1 clip with another mask or start image (a.mp4)"),
        ([account("1", "a.mp4", used=False, held_out=True)], [account("1", "a.mp4")],
         "1 clip no longer kept aside (a.mp4)"),
        ([account("1", "a.mp4")], [account("1", "a.mp4", held_out=True)],
         "1 clip trained on before, now kept aside: the validation loss is no longer blind to them (a.mp4)"),
        ([account("1", "a.mp4", used=False, held_out=True)], [account("1", "a.mp4", held_out=True)],
         "clips, their windows or how they are shown differ"),
        ([account("1", "x/a.mp4")], [account("1", "y/a.mp4")],
         "clips, their windows or how they are shown differ"),
        ([], [account(str(i), f"{i}.mp4") for i in range(3)], "3 clips added (0.mp4, 1.mp4, 2.mp4)"),
        ([], [account(str(i), f"{i}.mp4") for i in range(4)], "4 clips added (0.mp4, 1.mp4, 2.mp4, …)"),
        ([account("1", "a.mp4"), account("2", "b.mp4")], [account("2", "b.mp4", captions=["c"])],
         "1 clip removed (a.mp4); 1 clip with another caption (b.mp4)"),
    ],
)  # fmt: skip
def test_each_kind_of_change_is_named(
    before: list[dict[str, Any]], now: list[dict[str, Any]], text: str, describe: Any
) -> None:
    assert describe(before, now) == text
