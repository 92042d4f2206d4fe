"""``doctor RUN``: each heading of the page of troubles is found in a run that shows it,
and in no other.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Printed, train
from tests.support.command_line import run as shell
from tests.support.reports import sample
from tests.support.run_processes import Work
from videotune.cli.doctor import show_problems
from videotune.config.nested_keys import merge
from videotune.config.resolve import parse
from videotune.reporter.diagnosis import findings
from videotune.reporter.read import read_run

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(
    encoding="utf-8"
)
SECONDS = {"data": 0.01, "forward": 1.0, "backward": 2.0, "optimizer": 0.1}


def step(number: int, **changed: Any) -> dict[str, Any]:
    line = {
        "kind": "step",
        "step": number,
        "loss": 0.2,
        "mse": 0.2,
        "lr": {"transformer": 1e-4},
        "grad_norm": 0.1,
    }
    return (
        line
        | {"by_t": [0.2] * 9, "window_ids": [f"w{number % 5}"], "seconds": SECONDS}
        | changed
    )


def validation(number: int, held_out: float, train: float) -> dict[str, Any]:
    def part(x: float) -> dict[str, Any]:
        return {
            "normalised": x,
            "by_quantile": [x] * 9,
            "clips": {"a": 0.98 * x, "b": x, "c": 1.02 * x},
        }

    line = {"kind": "validation", "step": number, "validation": "one"}
    return line | {"held_out": part(held_out), "train": part(train)}


def metrics(number: int, *, copies: int, base_copies: int = 0) -> dict[str, Any]:
    replication = {"line": 0.7, "copies": copies, "base_copies": base_copies}
    facts = {"kind": "sample_metrics", "step": number, "samples": [{}] * 8}
    return facts | {"replication": replication}


def warning(text: str) -> dict[str, Any]:
    return {"kind": "warning", "step": 1, "text": text}


GOOD = [
    *[step(n) for n in range(1, 31)],
    *[validation(n, 1 - n / 100, 1 - n / 50) for n in (0, 10, 20, 30)],
    {"kind": "end", "step": 30, "why": "done"},
]


def clip(**changed: Any) -> dict[str, Any]:
    plain = {
        "path": "a.mp4",
        "used": True,
        "repeats_share": 0.0,
        "source_fps": 16.0,
        "warnings": [],
    }
    return plain | changed


def write(
    folder: Path,
    journal: list[dict[str, Any]],
    config: dict[str, Any] | None = None,
    views: str = "moderate",
    clips: list[dict[str, Any]] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    settings = parse(
        merge(
            {"family": "wan", "steps": 30, "video_config": {"target_fps": 16}},
            config or {},
        )
    )
    (folder / "config.json").write_text(
        json.dumps({"settings": settings.model_dump(mode="json"), "steps": 30})
    )
    plan = {
        "views": {
            "per_window": {"band": views, "min": 110, "max": 120},
            "advice": "more clips",
        }
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "check.json").write_text(
        json.dumps({"clips": clips or [clip()], "skipped": 0})
    )
    (folder / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in journal)
    )
    return folder


def lines_of(folder: Path) -> set[str]:
    return {one.line for one in findings(read_run(folder))}


def test_a_good_run_has_no_findings(tmp_path: Path) -> None:
    assert lines_of(write(tmp_path / "run", GOOD)) == set()


MANY = [step(n, mse=0.1 if n <= 60 else 0.3) for n in range(1, 121)]
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "Out of memory",
        {"journal": [*GOOD, warning("out of memory in step 3: bucket 17x64x64")]},
    ),
    (
        "Loss or gradient not finite",
        {
            "journal": [
                step(0, loss=None, mse=None, grad_norm=None, skipped=True),
                *GOOD,
            ]
        },
    ),
    (
        "Poor temporal consistency",
        {"config": {"video_config": {"use_temporal_attention": False}}},
    ),
    (
        "Slow training: steps wait for data",
        {"journal": [*GOOD, step(31, seconds={"data": 900.0, "forward": 1.0})]},
    ),
    (
        "Slow training: experts are loaded too often",
        {"journal": [*GOOD, step(31, seconds={"experts": 900.0})]},
    ),
    (
        "Poor quality: the rate is too high",
        {"journal": [*GOOD, validation(40, 0.7, 1.2)]},
    ),
    (
        "Poor quality: the model learns nothing",
        {"journal": [*GOOD, validation(40, 0.7, 0.99)]},
    ),
    (
        "Poor quality: samples show nothing",
        {
            "journal": [
                *GOOD,
                sample(0, "a"),
                sample(30, "a", picture={"fault": "black"}),
            ]
        },
    ),
    (
        "Poor quality: samples are likely copies",
        {"journal": [*GOOD, metrics(30, copies=4)]},
    ),
    (
        "Poor quality: overfitting",
        {"journal": [*GOOD, validation(40, 0.8, 0.3), validation(50, 0.9, 0.2)]},
    ),
    (
        "Poor quality: frame rates do not fit",
        {"clips": [clip(), clip(repeats_share=0.5, source_fps=8.0)]},
    ),
    (
        "Poor quality: clips and captions",
        {"clips": [clip(warnings=["the caption tells a sequence"])]},
    ),
    ("Poor quality: most gradients are clipped", {"config": {"max_grad_norm": 0.05}}),
    ("Performance tips: regular sampling", {"config": {"sample_after": 0}}),
    ("Performance tips: back up", {"config": {"save_every": 0, "backup_after": 0}}),
    ("The run has not come to its end", {"journal": GOOD[:20]}),
    (
        "Risk: clips are seen often",  # nothing is measured
        {
            "views": "risky",
            "journal": [line for line in GOOD if line["kind"] != "validation"],
        },
    ),
    (
        "Poor quality: the rate is too high",
        {"journal": [*MANY, {"kind": "end", "step": 120, "why": "done"}]},
    ),
]


@pytest.mark.parametrize(("line", "case"), CASES)
def test_each_finding_comes_alone_and_has_its_heading(
    line: str, case: dict[str, Any], tmp_path: Path
) -> None:
    assert lines_of(write(tmp_path / "run", **({"journal": GOOD} | case))) == {line}
    assert any(
        row.strip("# ") == line for row in PAGE.splitlines() if row.startswith("#")
    )


def test_what_is_measured_counts_more_than_planned_views(tmp_path: Path) -> None:
    """No advice to take fewer steps where the report says that more would help."""
    assert lines_of(write(tmp_path / "run", GOOD, views="risky")) == set()


def test_doctor_of_an_interrupted_run_says_first_how_to_continue(
    work: Work, capsys: Printed
) -> None:
    folder = work.copy("steps=2")
    advice = f"To continue it: videotune resume {folder}"
    shell("doctor", folder)
    assert advice not in capsys.readouterr().out

    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    end = json.loads(lines[-1]) | {"why": "interrupted"}
    for left in ([*lines[:-1], json.dumps(end)], lines[:1]):
        journal.write_text("".join(f"{line}\n" for line in left))
        shell("doctor", folder)
        state, found, rest = " ".join(capsys.readouterr().out.split()).partition(advice)
        assert found, "in whatever lines the terminal has"
        assert "do: " not in state, "before all findings"
        assert "do: " in rest


def test_a_run_that_still_runs_is_not_said_to_have_ended(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(n) for n in range(1, 11)])
    ended = "The run has not come to its end"
    assert ended in lines_of(folder)
    now = time.time()
    beat = {"pid": os.getpid(), "host": socket.gethostname(), "step": 10}
    beat |= {"state": "training", "time": now, "started": now - 60}
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    assert ended not in lines_of(folder)


def test_a_window_in_every_broken_step_is_named(tmp_path: Path) -> None:
    bad = [step(n, skipped=True, window_ids=["same", f"other{n}"]) for n in (3, 9)]
    (one,) = findings(read_run(write(tmp_path / "run", [*bad, *GOOD])))
    assert "applied: 2, the first is step 3" in one.found
    assert one.found.endswith("in all of them: same.")


def test_remedies_for_memory_are_those_of_the_run(tmp_path: Path) -> None:
    journal = [*GOOD, warning("out of memory in step 3: bucket 17x64x64")]
    (one,) = findings(
        read_run(
            write(
                tmp_path / "run",
                journal,
                {"gradient_checkpointing": "OFF", "batch_size": 2},
            )
        )
    )
    assert "gradient_checkpointing=ON" in one.do
    assert "batch_size=1" in one.do


@pytest.mark.parametrize(
    ("rate", "why"),
    [("3", "the rate is too high"), ("1e-9", "the model learns nothing")],
)
def test_a_real_run_at_a_wrong_rate_is_found_out(
    rate: str, why: str, work: Work, capsys: Printed
) -> None:
    """Of whole weights, since an adapter of a tiny model bears nearly every rate."""
    sets = (
        "steps=6",
        "training_method=FINE_TUNE",
        f"learning_rate={rate}",
        "validate_every=2",
        "save_every=0",
    )
    train(work.overrides(*sets), work.run)
    capsys.readouterr()
    assert shell("doctor", work.run, json=True) == 0
    lines = {one["line"] for one in json.loads(capsys.readouterr().out)}
    rates = {
        "Poor quality: the rate is too high",
        "Poor quality: the model learns nothing",
    }
    assert lines & rates == {f"Poor quality: {why}"}
    assert not lines & {
        "Out of memory",
        "The run has not come to its end",
        "Loss or gradient not finite",
    }


@pytest.mark.parametrize("journal", [[*GOOD, validation(40, 0.7, 1.2)], MANY])
@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (3e-4, "--set learning_rate=0.0001 --override"),
        (1e4, "set learning_rate=0.0001, in a new run"),
    ],
)
def test_a_rate_that_is_far_too_high_is_not_cut_to_a_third(
    tmp_path: Path, journal: list[dict[str, Any]], rate: float, expected: str
) -> None:
    folder = write(tmp_path / "run", journal, config={"learning_rate": rate})
    remedies = [finding.do for finding in findings(read_run(folder))]
    assert any(expected in remedy for remedy in remedies)
    assert all("third" not in remedy for remedy in remedies) or rate < 1


def test_the_clips_of_a_remedy_are_quoted_for_the_shell(tmp_path: Path) -> None:
    clips = [clip(path="odd clips/a.mp4", warnings=["black"])]
    config = {"datasets": [{"path": "odd clips"}]}
    folder = write(tmp_path / "run", GOOD, config=config, clips=clips)
    (finding,) = findings(read_run(folder))
    assert "videotune check 'odd clips' --verbose" in finding.do
    assert "such as a.mp4" in finding.found


def test_as_many_likely_copies_as_of_the_base_model_are_no_finding(
    tmp_path: Path,
) -> None:
    journal = [*GOOD, metrics(30, copies=2, base_copies=2)]
    assert lines_of(write(tmp_path / "run", journal)) == set()


def test_samples_of_an_earlier_step_and_of_the_base_are_no_finding(
    tmp_path: Path,
) -> None:
    black = {"fault": "black"}
    journal = [*GOOD, sample(0, "a", picture=black), sample(10, "a", picture=black)]
    journal.append(sample(30, "a"))
    assert lines_of(write(tmp_path / "run", journal)) == set()


@pytest.mark.parametrize(
    ("faulty", "line"),
    [(2, "some samples show nothing"), (5, "samples show nothing")],
)
def test_the_heading_says_whether_most_samples_show_nothing(
    faulty: int, line: str, tmp_path: Path
) -> None:
    flat = {"picture": {"fault": "flat"}}
    measured = [flat] * faulty + [{}] * (8 - faulty)
    journal = [*GOOD, sample(30, "a"), sample(30, "b")]
    journal.append({"kind": "sample_metrics", "step": 30, "samples": measured})
    assert lines_of(write(tmp_path / "run", journal)) == {f"Poor quality: {line}"}


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        (1e4, "learning_rate 10000 is 10,000,000 times the usual 0.001"),
        (3e-3, "lower learning_rate (now 0.003)"),
    ],
)
def test_noise_after_good_samples_of_the_base_is_laid_on_the_rate_first(
    rate: float, advice: str, tmp_path: Path
) -> None:
    noise = {"fault": "noise"}
    journal = [*GOOD, sample(0, "a"), sample(30, "a", picture=noise)]
    config = {"learning_rate": rate, "base_model_name": "asset:toy"}
    (finding,) = findings(read_run(write(tmp_path / "run", journal, config)))
    assert finding.do.startswith(advice)
    assert "the toy draws moving shapes alone" in finding.do


def test_samples_that_were_faulty_before_training_get_another_remedy(
    tmp_path: Path,
) -> None:
    noise = {"fault": "noise"}
    journal = [*GOOD, *(sample(step, "a", picture=noise) for step in (0, 30))]
    (finding,) = findings(read_run(write(tmp_path / "run", journal)))
    assert (
        finding.found
        == "step 30: of 1 preview, 1 is noise; before training, of 1 preview, 1 is noise"
    )
    assert "sample.steps" in finding.do
    assert "learning_rate" not in finding.do


def test_doctor_prints_each_heading_once(tmp_path: Path, capsys: Printed) -> None:
    clips = [
        clip(path="/data/a.mp4", warnings=["black from 1.00 s on"]),
        clip(path="/data/b.mp4", used=False, reason="missing_caption"),
    ]
    folder = write(tmp_path / "run", GOOD, clips=clips)
    account = json.loads((folder / "check.json").read_text()) | {"skipped": 1}
    (folder / "check.json").write_text(json.dumps(account))
    show_problems(findings(read_run(folder)))
    printed = capsys.readouterr().out
    assert printed.count("Poor quality: clips and captions") == 1
    assert printed.count("  found: ") == printed.count("  do: ") == 2
    assert "skipped: 1 clip\n" in printed


def test_the_finding_on_sampling_names_the_setting_to_remove(tmp_path: Path) -> None:
    case = {"journal": GOOD, "config": {"sample_after": 0}}
    (one,) = findings(read_run(write(tmp_path / "run", **case)))
    assert one.do.startswith("remove sample_after from the config: `videotune plan`")
