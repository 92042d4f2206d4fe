"""What a whole run says of itself: the frozen validation set, weights and their average, times seen, the verdict."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands.safety_kit import Finished, Make, of_kind, resume, steps_of, warnings_of
from tests.shell import plan, train
from videotune.errors import DONE
from videotune.files import digest, read_json, write_json
from videotune.trainer.resolve_config import Overrides


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("time", "seconds")} for line in lines]


@pytest.fixture
def settings(overrides: Make, small_clips: Path, tmp_path: Path) -> Make:
    """A run on four clips that is measured on two others, with an average of its weights."""
    for part in ("videos", "captions"):
        for number, path in enumerate(sorted((small_clips / part).iterdir())):
            place = tmp_path / ("own" if number < 4 else "others") / part
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)

    def make(*sets: str) -> Overrides:
        data = [{"path": str(tmp_path / "own")}, {"path": str(tmp_path / "others"), "kind": "validation"}]
        often = ("steps=4", "validate_every=1", "save_every=2", "ema.decay=0.5", f"datasets={json.dumps(data)}")
        return Overrides(sets=(*overrides().sets, *often, *sets))

    return make


def test_a_killed_and_resumed_run_measures_the_same_bits(settings: Make, tmp_path: Path) -> None:
    """Readings, views and verdicts, of the average and of the weights; the first half ends as a kill would leave it."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert train(settings(), straight) == DONE
    assert train(settings("steps=2"), run) == DONE
    ended = [line for line in (run / "journal.jsonl").read_text().splitlines() if json.loads(line)["kind"] != "end"]
    (run / "journal.jsonl").write_text("\n".join(ended) + "\n")
    assert resume(run, "steps=4") == DONE
    assert without_times(of_kind(run, "validation")) == without_times(of_kind(straight, "validation"))
    seen, wanted = (without_times(of_kind(folder, "views")) for folder in (run, straight))
    plans = [[line.pop("by_the_end")["max"] for line in lines] for lines in (seen, wanted)]
    assert seen == wanted
    most = [read_json(folder / "plan.json")["views"]["per_window"]["max"] for folder in (run, straight)]
    assert plans[1] == [most[1]] * 5
    assert plans[0][3:] == [most[0]] * 2 == [most[1]] * 2, "planned for two steps at first, and for four since"
    assert read_json(run / "validation.json") == read_json(straight / "validation.json")

    readings = of_kind(run, "validation")
    assert [line["step"] for line in readings] == [0, 1, 2, 3, 4]
    first, last = readings[0], readings[-1]
    assert first["live"] == {part: first[part] for part in ("held_out", "train")}, "nothing is averaged yet"
    assert last["live"]["train"]["mean"] != last["train"]["mean"]
    assert len(last["held_out"]["clips"]) == 2
    assert sum(last["held_out"]["clips"].values()) / 2 == pytest.approx(last["held_out"]["normalised"])
    views = of_kind(run, "views")
    shown = [name[:12] for line in of_kind(run, "step") for name in line["window_ids"]]
    assert [line["step"] for line in views] == [0, 1, 2, 3, 4], "once, where a reading and a save meet"
    assert views[-1]["clips"] == {name: shown.count(name) for name in views[-1]["clips"]}
    assert of_kind(run, "verdict")[-1]["step"] == 4
    assert of_kind(run, "end")[-1]["take"]["step"] in (2, 4)


def test_the_validation_set_is_frozen_and_a_changed_one_is_reported(settings: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(settings("steps=1"), run) == DONE
    frozen = read_json(run / "validation.json")
    assert of_kind(run, "validation")[0]["validation"] == frozen["name"]
    assert [len(frozen[part]) for part in ("held_out", "train", "levels")] == [2, 2, 9]
    assert len({row["latents"] for part in ("held_out", "train") for row in frozen[part]}) == 4
    caption = next((tmp_path / "others" / "captions").glob("*.txt"))
    caption.write_text("quite another caption")
    assert resume(run, "steps=2", data_change=True) == DONE
    (warning,) = [text for text in warnings_of(run) if "the validation set changed" in text]
    assert "the text of its held-out clips differ" in warning
    assert frozen["mean"] == "clips, each at a third of the levels"
    assert read_json(run / "validation.json")["name"] == of_kind(run, "validation")[-1]["validation"] != frozen["name"]
    kept = read_json(run / "validation.json")
    write_json(run / "validation.json", kept | {"seed": 5})
    assert resume(run, "steps=3") == DONE
    assert read_json(run / "validation.json") == kept, "a file that was changed gives way"
    assert len([text for text in warnings_of(run) if "the validation set changed" in text]) == 1
    older = {key: value for key, value in kept.items() if key not in ("name", "mean")}  # it averaged over windows
    write_json(run / "validation.json", {"name": digest(older)[:8], **older})
    text = (run / "journal.jsonl").read_text().replace(kept["name"], digest(older)[:8])
    (run / "journal.jsonl").write_text(text)
    assert resume(run, "steps=4") == DONE
    assert "its averaging differ" in warnings_of(run)[-1]


def test_the_plan_has_the_steps_for_a_number_of_times_seen(overrides: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Two samples a step."""

    def planned(*sets: str, **more: Any) -> dict[str, Any]:
        capsys.readouterr()
        assert plan(overrides("batch_size=2", "video_config.frames=9", *sets), as_json=True, **more) == DONE
        return json.loads(capsys.readouterr().out)

    found = planned("steps=9")
    steps = found["views"]["steps_for"]
    assert list(steps) == ["10", "20", "50", "100"]
    assert steps["10"] == pytest.approx(10 * found["windows"] / 2, abs=found["windows"])
    again = planned(f"steps={steps['10']}", views=(10, 33))["views"]
    assert again["per_window"]["max"] == 10
    assert list(again["steps_for"]) == ["10", "33"]


def test_without_held_out_clips_the_verdict_says_so(finished: Finished) -> None:
    run = finished("steps=3", "validate_every=1", "early_stopping=1")
    verdicts = of_kind(run, "verdict")
    assert [(line["step"], line["verdict"]) for line in verdicts] == [(step, None) for step in range(4)]
    reason = verdicts[-1]["reason"]
    assert reason.startswith("no validation possible")
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3], "and nothing stops it"
    assert of_kind(run, "end")[-1]["take"] == {"step": 3, "why": reason}
