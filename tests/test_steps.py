"""What the steps of a journal say together: the same from memory, from the file and
after a cut, and in little memory.
"""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.journal_lines import step_line
from videotune.reporter.build import write_report
from videotune.reporter.read import read_run
from videotune.runs.journal import History
from videotune.runs.step_sums import RECENT, Steps


def written(run: Path, steps: int, until: int | None = None) -> Path:
    """A journal with steps that were not applied, without an error, of regularization
    clips alone.
    """
    run.mkdir(exist_ok=True)
    draw = random.Random(0)
    lines: list[dict[str, Any]] = [{"kind": "start", "time": 1.0}]
    for step in range(1, steps + 1):
        names = [
            f"{draw.choice('abcd') * 12}@{draw.randrange(3)}+1x2x2" for _ in range(2)
        ]
        by_t = [draw.random() if draw.random() < 0.3 else None for _ in range(9)]
        more = (
            {"skipped": True, "mse": None} if step % 7 == 3 else {"mse": draw.random()}
        )
        spent = {"forward": draw.randrange(8) / 8, "data": 0.5}
        line = step_line(
            step,
            window_ids=names,
            by_t=by_t,
            seconds=spent,
            grad_norm=draw.random(),
            **more,
        )
        lines += [
            line,
            *([{"kind": "save", "step": step, "path": "x"}] if step % 5 == 0 else []),
        ]
    kept = [line for line in lines if until is None or line.get("step", 0) <= until]
    (run / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in kept)
    )
    clips = [
        {
            "id": "d" * 12,
            "path": "d",
            "used": True,
            "held_out": False,
            "kind": "regularization",
        }
    ]
    (run / "check.json").write_text(json.dumps({"clips": clips}))
    return run


def facts(steps: Steps) -> dict[str, Any]:
    return vars(steps) | {"recent": list(steps.recent), "windows": dict(steps.windows)}


@pytest.mark.parametrize("step", [0, 1, 7, 60, 99, 100])
def test_after_a_cut_it_is_as_if_the_later_steps_had_never_been(
    step: int, tmp_path: Path
) -> None:
    cut, never = (
        History(written(tmp_path / "a", 100)),
        History(written(tmp_path / "b", 100, step)),
    )
    cut.cut(step)
    found, wanted = facts(cut.steps), facts(never.steps)
    assert (
        found.pop("recent")[-RECENT:]
        == wanted.pop("recent")[-len(cut.steps.recent) or RECENT :]
    )
    assert {name: n for name, n in found.pop("seconds").items() if n} == wanted.pop(
        "seconds"
    )
    assert found == wanted
    assert [line["kind"] for line in cut.events] == [
        line["kind"] for line in never.events
    ]


def test_the_page_is_the_same_from_memory_and_from_the_file(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3000)
    history = History(run)
    known = read_run(run, (history.events, history.steps))
    assert facts(known.steps) == facts(read_run(run).steps)
    assert len(known.steps.alone) > 0
    assert (
        write_report(run, (history.events, history.steps)).read_text()
        == write_report(run).read_text()
    )


def test_a_step_takes_little_memory_and_the_page_none_that_grows(
    tmp_path: Path,
) -> None:
    run = written(tmp_path / "run", 10_000)
    tracemalloc.start()
    history = History(run)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    write_report(run, (history.events, history.steps))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 10_000 * 200 + 2**21
    assert peak - held < 2**22
