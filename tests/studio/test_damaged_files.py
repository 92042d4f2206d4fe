"""A damaged file costs one region or one card, in words, and never another page, another
project or the list.
"""

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.damaged_files import limited
from tests.support.journal_lines import step_line
from videotune.files import write_json
from videotune.studio import projects, queue_page, series, status, tensor_file, web

PAGES = ("data", "setup", "train", "results")
DEEP = '{"a":' * 100_000
NESTED = "[" * 150 + "]" * 150


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker and no plan is started; an error that no reader has foreseen fails."""
    from videotune.studio import clips, plan_server

    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    monkeypatch.setattr(clips, "start_check", lambda project: False)
    monkeypatch.setattr(
        plan_server,
        "request_answer",
        lambda out, question: {
            **plan_server.read_answer(out),
            "current": True,
            "measuring": False,
            "computing": False,
        },
    )


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """A project with a clip and a run, beside another."""
    projects.create(tmp_path, "Dogs", preset="toy")
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips" / "a.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    run = project.folder / "runs" / "run-1"
    write_json(run / "config.json", {"steps": 4, "settings": {}, "origins": {}})
    (run / "journal.jsonl").write_text(json.dumps(step_line(1)) + "\n")
    return project


def write(root: Path, name: str, content: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text)


def look(client: Any, project: str) -> dict[str, int]:
    """The status of each page of a project, as a browser gets it."""
    html = {"accept": "text/html", "hx-request": ""}
    return {
        page: client.get(f"/p/{project}/{page}", headers=html).status_code
        for page in PAGES
    }


def look_at_all(client: Any, cats_status: int = 200) -> None:
    html = {"accept": "text/html", "hx-request": ""}
    assert look(client, "dogs") == dict.fromkeys(PAGES, 200)
    assert look(client, "cats") == dict.fromkeys(PAGES, cats_status)
    for address in ("/", "/queue"):
        answer = client.get(address, headers=html)
        assert answer.status_code == 200
        assert "Cats" in answer.text or "cats" in answer.text or address != "/"
        assert "Dogs" in answer.text or address != "/"
    assert client.get("/p/cats/nothing", headers=html).status_code in (404, 422)


FACTS = {"title": "Cats", "created": 1.0, "preset": "toy"}
PROJECTS: list[Any] = [
    FACTS | {"created": "abc"},
    FACTS | {"created": None},
    '{"created": NaN}',
    '{"created": 1e999}',
    FACTS | {"created": 1e300},
    '{"title": "\\ud800"}',
    FACTS | {"title": 3},
    FACTS | {"vram": "x"},
    FACTS | {"captioning": "x"},
    FACTS | {"captioning": {"model": [1]}},
    FACTS | {"sources": "x"},
    FACTS | {"sources": [{}]},
    FACTS | {"sources": [{"path": 1}]},
    FACTS | {"card": {}},
    DEEP,
    "{",
    [],
    b"\xff\xfe",
]


@pytest.mark.parametrize("content", PROJECTS)
def test_a_damaged_project_is_one_card(
    tmp_path: Path, cats: projects.Project, client: Any, content: Any
) -> None:
    write(tmp_path, "cats/project.json", content)
    is_object = isinstance(content, dict) or str(content).startswith('{"created"')
    look_at_all(client, cats_status=200 if is_object else 404)
    page = client.get("/p/cats/data", headers={"accept": "text/html", "hx-request": ""})
    assert "project.json" in page.text
    assert "project.json" in client.get("/").text
    before = (tmp_path / "cats" / "project.json").read_bytes()
    for act in ("rename", "start", "setup/start", "data/sheet"):
        assert client.post(f"/p/cats/{act}", data={"title": "x"}).status_code == 422
    assert (tmp_path / "cats" / "project.json").read_bytes() == before


JOB = {"kind": "check", "about": "", "words": [], "started": 1.0}
CLIP = {
    "path": "/x.mp4", "used": True, "held_out": False, "reason": None, "detail": None, "source_seconds": 1.0,
    "captions": [], "warnings": [], "notes": [],
}  # fmt: skip
RUN = "cats/runs/run-1/"
STEP = step_line(1)
HEARTBEAT = {"pid": 1, "host": "x", "step": 1, "state": "training", "time": 1.0}
PLAN = {
    "fits": True, "verdict": "fits", "hours": 1.0, "hours_beside": 0.0, "seconds_a_step": 1.0,
    "device": None, "disk": {}, "steps": 4,
    "clips": {"used": 1, "held_out": 0, "skipped": 0},
    "views": {"per_window": {"min": 1, "max": 1, "band": "high"}, "advice": ""}, "remedies": [], "notes": [],
}  # fmt: skip
TRY = "cats/tries/run-1/1f/try.json"
FILES: list[tuple[str, Any]] = [
    *[("check", {"clips": clips, "notes": []}) for clips in (
        "x", [1], [{}], [CLIP | {"spans": 3}], [CLIP | {"captions": [1]}], [CLIP | {"source_seconds": "x"}],
        [CLIP | {"width": 10**30}])],
    ("check", [1]), ("check", DEEP), ("check", '{"clips": [], "notes": [' + "1," * 10 + "1]}"),
    ("check", '{"clips": [], "notes": [], "blockers": 3}'),
    *[("job.json", content) for content in (
        DEEP, "{", JOB | {"started": 1e300}, JOB | {"about": 3}, JOB | {"words": "x"}, JOB | {"env": [1]})],
    *[("pid.json", content) for content in (
        DEEP, {"runner": 10**30, "command": -1, "time": 1}, {"folder": "1", "runner": {}, "command": {}})],
    ("rc.json", {"code": 10**30, "ended": 1.0}), ("rc.json", {"code": 0, "ended": 1e300}), ("rc.json", DEEP),
    *[(".queue/queue.json", content) for content in (
        DEEP, "{", [1], {"a": {"run": "\0"}}, {"a": {"added": 1e300}}, {"a": {"priority": 10**40}})],
    *[("cats/.studio/plan.json", content) for content in (
        [1], DEEP, {"plan": "x"}, {"plan": PLAN | {"views": {}}}, {"plan": PLAN | {"steps": "x"}},
        {"plan": PLAN | {"remedies": [1]}}, {"plan": {}}, {"words": 3}, {"code": "x"})],
    *[("cats/.studio/hours.json", content) for content in ({"presets": [1]}, {"presets": {"toy": 1}}, {}, {"part": 1})],
    *[("cats/.studio/sweeps/s.json", content) for content in (
        {"x": 1}, "{", {"runs": {}}, {"runs": {"a": {}}}, {"runs": {"a": {"b": 1}}}, {"runs": {"a": [1]}}, DEEP)],
    *[("presets/p.json", content) for content in ({}, "{", {"preset": 1, "keys": {}}, {"preset": "x", "keys": [1]}, DEEP)],
    *[("cats/bin/x/item.json", content) for content in (
        {"id": "x", "kind": "clip", "title": "x", "when": 1e300, "bytes": 1, "lay": []}, DEEP, "{", [1])],
    *[("cats/history.jsonl", content) for content in (
        DEEP + "\n", '{"batch": [1], "by": 1, "name": 2, "before": 3, "after": 4}\n',
        '{"batch": "1", "by": "x", "name": "a.mp4", "before": "", "after": "", "undoes": [1], "time": 1e300}\n')],
    *[("cats/config.json", content) for content in ("{", [1], {"lora": 5}, {"steps": {"": 1}},
        {"steps": "x"}, {"samples": [[[1]]]}, DEEP)],
    *[(RUN + "journal.jsonl", json.dumps(line) + "\n") for line in (
        STEP | {"step": 5 * 10**9}, STEP | {"seconds": {"step": 1e308}}, STEP | {"lr": {"x": 1e308}},
        STEP | {"lr": {"x": float("inf")}}, STEP | {"by_t": [1] * 90}, STEP | {"mse": 1e308},
        {"kind": "sample", "step": 1, "prompt": "x", "path": "/etc/passwd", "seed": []},
        {"kind": "sample", "step": 1, "prompt": "x", "path": "\0"},
        {"kind": "end", "step": 1, "why": "x", "time": 1.0, "take": 3},
        {"kind": "verdict", "step": 1, "verdict": "x", "reason": "x"},
        {"kind": "views", "step": 1, "per_clip": 3}, {"kind": "start", "clips": 3}, {"kind": "save", "step": 1, "memory": "x"},
        {"kind": "sample_metrics", "step": 1, "samples": [{"path": "/etc/passwd", "clip": [1]}]},
        {"kind": "validation", "step": 1, "train": None, "held_out": {"normalised": 1e308}},
        {"kind": "warning", "text": "x", "step": 2**40})],
    (RUN + "journal.jsonl", DEEP + "\n"), (RUN + "journal.jsonl", b"\xff\n"),
    *[(RUN + "heartbeat.json", content) for content in (
        HEARTBEAT | {"step": "x"}, HEARTBEAT | {"pid": 10**30}, HEARTBEAT | {"since": 1e300},
        HEARTBEAT | {"progress": {"done": "x", "total": 1}}, HEARTBEAT | {"seconds": [1]}, DEEP)],
    *[(RUN + "config.json", content) for content in (
        {"steps": "x"}, {"steps": 10**30}, {"settings": {"lora": 3, "training_method": [1]}}, {"origins": [1]}, DEEP, [1],
        {"settings": {"base_model_name": 3}})],
    *[(RUN + "check.json", content) for content in ({"clips": 3}, {"clips": [1]}, {"clips": [{"path": 1}]}, DEEP)],
    *[(RUN + "plan.json", content) for content in ({"steps": "x"}, {"views": 3}, {"effective_batch": "x"}, DEEP)],
    *[(RUN + "exports.json", content) for content in (
        {}, [1], [{"path": 3}], [{"format": "x", "path": "/etc/passwd", "hash": "x"}], DEEP,
        [{"format": "x", "path": "config.json", "hash": "x", "verified": 3, "use": [1]}])],
    *[(RUN + "compare/compare.json", content) for content in ({}, [1], [{"video": 3}])],
    *[(TRY, content) for content in ({}, [1], {"prompt": 3}, {"prompt": "x", "entry": [1]}, {"prompt": "x", "asked": 1e300},
        DEEP)],
]  # fmt: skip


def place(root: Path, name: str, content: Any) -> None:
    """Put a file in its place; one of a job gets the rest of the job beside it."""
    if name in ("check", "job.json", "pid.json", "rc.json"):
        for home in ("cats", ".queue"):
            job = f"{home}/jobs/000001-check/"
            write(root, job + "job.json", JOB)
            if name == "check":
                write(root, job + "rc.json", {"code": 0, "ended": 2.0})
                write(root, job + "out", content)
            else:
                write(root, job + name, content)
        return
    write(root, name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    FILES,
    ids=[
        f"{name.rpartition('/')[2]}-{number}" for number, (name, _) in enumerate(FILES)
    ],
)
def test_a_damaged_file_closes_no_page(
    tmp_path: Path,
    cats: projects.Project,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: Any,
) -> None:
    unexpected: list[Exception] = []
    monkeypatch.setattr(
        web, "describe_unexpected", lambda error: unexpected.append(error) or "?"
    )
    place(tmp_path, name, content)
    look_at_all(client)
    for address in ("/p/cats/series?run=run-1", "/p/cats/exposure?run=run-1"):
        answer = client.get(address)
        assert answer.status_code == 200, answer.text
    json.loads(client.get("/p/cats/series?run=run-1").text, parse_constant=pytest.fail)
    assert not unexpected, repr(unexpected[0])


def test_a_large_answer_of_a_check_is_not_read(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    place(tmp_path, "check", '{"clips": [], "notes": [' + "1," * 20_000_000 + "1]}")
    started = time.monotonic()
    assert look(client, "cats")["data"] == 200
    assert time.monotonic() - started < 5


def test_a_region_that_meets_the_unexpected_says_so_and_the_others_are_there(
    tmp_path: Path,
    cats: projects.Project,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from videotune.studio import data_page, header

    for error in (TypeError("x"), KeyError("x"), ZeroDivisionError(), RecursionError()):

        def fail(page: Any, error: Exception = error) -> str:
            raise error

        monkeypatch.setitem(data_page.REGIONS, "state", fail)
        monkeypatch.setitem(header.REGIONS, "status", fail)
        page = client.get("/p/cats/data").text
        assert type(error).__name__ in page
        assert 'id="r-bin"' in page
        assert type(error).__name__ in capsys.readouterr().err
        html = {"accept": "text/html", "hx-request": ""}
        assert client.get("/p/nobody/data", headers=html).status_code == 404


def lora(folder: Path, header: Any, data: bytes = b"") -> Path:
    """A checkpoint with a LoRA of that header, as a dict or as text."""
    content = (header if isinstance(header, str) else json.dumps(header)).encode()
    write(folder, "COMPLETE", {})
    write(
        folder, "weights.safetensors", struct.pack("<Q", len(content)) + content + data
    )
    return folder / "weights.safetensors"


def pair(
    a: list[int], b: list[int], dtype: str = "F32", start: int = 0
) -> dict[str, Any]:
    """The header of a LoRA of these shapes."""
    module = "blocks.0.attn1.to_q"
    size = {"F32": 4, "F16": 2, "BF16": 2}[dtype]
    middle = start + size * int(np.prod(a))
    end = middle + size * int(np.prod(b))
    return {
        f"{module}.lora_A.weight": {"dtype": dtype, "shape": a, "data_offsets": [start, middle]},
        f"{module}.lora_B.weight": {"dtype": dtype, "shape": b, "data_offsets": [middle, end]},
    }  # fmt: skip


BAD_LORAS: list[tuple[Any, bytes]] = [
    (DEEP, b""),
    (NESTED, b""),
    ("{", b""),
    ([1], b""),
    ({"a": {"dtype": "F32"}}, b""),
    (pair([4, 2], [2, 5]), bytes(4 * 18)),
    (pair([4, 2], [2, 4]), b""),
    (pair([4, 2], [2, 4]), bytes(4 * 16 + 1)),
    (pair([4, 2], [2, 4], start=4), bytes(4 * 17)),
    (pair([2**40, 2**40], [2, 4]), bytes(64)),
    (pair([5000, 5000], [5000, 5000]), bytes(4 * 2 * 5000 * 5000)),
    ({**pair([4, 2], [2, 4]), "more": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}, bytes(64)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_LORAS)))
def test_a_bad_checkpoint_costs_its_own_points(
    cats: projects.Project, client: Any, number: int
) -> None:
    run = cats.folder / "runs" / "run-1" / "checkpoints"
    rng = np.random.default_rng(0)
    data = rng.normal(size=16).astype("<f4").tobytes()
    lora(run / "step-1", pair([4, 2], [2, 4]), data)
    lora(run / "step-2", *BAD_LORAS[number])
    lora(run / "step-3", pair([4, 2], [2, 4]), data)
    started = time.monotonic()
    (charts,) = client.get("/p/cats/series?run=run-1").json()
    assert time.monotonic() - started < 3
    (curve,) = charts["charts"]["modules"]
    assert curve["x"] == [0, 1, 3]
    assert len(charts["notes"]) == 1
    assert charts["charts"]["loss"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_weights_that_are_not_finite_give_no_point(
    cats: projects.Project, client: Any, value: float
) -> None:
    run = cats.folder / "runs" / "run-1" / "checkpoints"
    data = np.full(16, value, "<f4").tobytes()
    lora(run / "step-1", pair([4, 2], [2, 4]), data)
    answer = client.get("/p/cats/series?run=run-1")
    (charts,) = json.loads(answer.text, parse_constant=pytest.fail)
    for curve in charts["charts"]["modules"]:
        assert curve["x"] == [0]


@pytest.mark.parametrize("a", [[3, 7], [20, 7], [12000, 1]])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_norm_takes_the_smaller_product(
    tmp_path: Path, a: list[int], dtype: str
) -> None:
    b = [a[1] + 2, a[0]]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("<f4") for shape in (a, b)]
    if dtype == "F32":
        contents = [one.tobytes() for one in values]
    elif dtype == "F16":
        contents = [one.astype("<f2").tobytes() for one in values]
    else:
        contents = [(one.view("<u4") >> 16).astype("<u2").tobytes() for one in values]
    path = lora(tmp_path, pair(a, b, dtype), b"".join(contents))
    started = time.monotonic()
    (norm,) = series.lora_norms(path).values()
    assert time.monotonic() - started < 1
    product = values[1].astype(float) @ values[0].astype(float)
    assert norm == pytest.approx(float(np.linalg.norm(product)), rel=1e-2)


@pytest.mark.parametrize(
    ("state", "factor"),
    [
        ({"lora_scale": 0.5}, 0.5),
        ({"lora_scale": {"blocks.0.attn1.to_q": 0.25, "other": 9}}, 0.25),
        ({"lora_scale": {"0.attn1.to_q": 0.25}}, 0.25),
        ({"lora_scale": {"other": 9}}, 1.0),
        ({"lora_scale": {"blocks.0.attn1.to_q": "x"}}, 1.0),
        ({"lora_scale": "x"}, 1.0),
        ({"lora_scale": 1e308}, 1.0),
        ([1], 1.0),
        (None, 1.0),
    ],
)
def test_a_norm_has_the_scale_of_its_module(
    state: Any, factor: float, tmp_path: Path
) -> None:
    """The name of a module may begin with its expert's, which its scale does not have."""
    ones = np.ones(6, dtype="<f4").tobytes()
    weights = lora(tmp_path, pair([2, 3], [3, 2]), 2 * ones)
    write(tmp_path, "state.json", state)
    (norm,) = series._checkpoint_norms(weights).values()  # type: ignore[union-attr]
    assert norm == pytest.approx(factor * 6.0)


def test_a_pipe_in_a_run_folder_is_not_waited_for(cats: projects.Project) -> None:
    run = cats.folder / "runs" / "run-1"
    (run / "journal.jsonl").unlink()
    weights = run / "weights.safetensors"
    os.mkfifo(run / "journal.jsonl")
    os.mkfifo(weights)

    with limited(1):
        events, _ = status.read_journal(run)
        with pytest.raises(ValueError, match="not a file"):
            series.lora_norms(weights)
    assert events == ()


def test_a_header_beyond_that_of_any_model_is_not_read(tmp_path: Path) -> None:
    length = tensor_file.MAX_HEADER_BYTES + 1
    path = tmp_path / "weights.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b" " * length)
    with pytest.raises(ValueError, match="header"):
        tensor_file.TensorFile(path)
