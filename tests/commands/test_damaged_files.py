"""Damaged, renamed, edited and lost files of a run: each is named in a sentence, and nothing is changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.safety_kit import Make, equal, facts_of, resume, start, state, steps_of
from tests.shell import compare, export, train
from videotune.commands.export import exported
from videotune.commands.sample import SampleOptions, open_sampler
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.files import digest, read_json
from videotune.reporter.build import write_report
from videotune.reporter.diagnosis import diagnose, repair_journal
from videotune.trainer.logging import journal
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.run_dir import SCHEDULER


@pytest.fixture(scope="module")
def straight(overrides: Make, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints at 4 and 8, on a base of its own."""
    home = tmp_path_factory.mktemp("straight")
    base = shutil.copytree(tiny_bases("wan"), home / "base")
    assert train(overrides("steps=8", "save_every=4", f"base_model_name={base}"), home / "run") == DONE
    return home / "run"


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A copy of it that was interrupted before its end."""
    copy = Path(shutil.copytree(straight, tmp_path / "run"))
    lines = [line for line in (copy / "journal.jsonl").read_text().splitlines() if '"kind": "end"' not in line]
    (copy / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return copy


def flip(path: Path) -> None:
    """Change a bit near the end of a file."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def listing(folder: Path) -> dict[str, bytes]:
    names = (".lock", "heartbeat.json")
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in names}


def refused(run: Path, text: str, *sets: str, **how: object) -> None:
    """A resume is refused with a sentence, and touches nothing."""
    before = listing(run)
    with pytest.raises(VideotuneError, match=text):
        resume(run, "steps=10", *sets, **how)
    assert listing(run) == before


# ---- checkpoints


def test_a_checkpoint_under_another_step_s_name_is_refused(run: Path, tmp_path: Path) -> None:
    renamed, copied = (Path(shutil.copytree(run, tmp_path / name)) / "checkpoints" for name in ("renamed", "copied"))
    shutil.rmtree(renamed / "step-8")
    (renamed / "step-4").rename(renamed / "step-8")
    refused(renamed.parent, "step 8, is not whole: it is the checkpoint of step 4 under another name")
    with pytest.raises(VideotuneError, match="the checkpoint of step 4 under another name"):
        export(renamed.parent)
    shutil.copytree(copied / "step-8", copied / "step-12")
    refused(copied.parent, "step 12, is not whole: it is the checkpoint of step 8.*--from 8")
    assert resume(copied.parent, step=8) == DONE


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "another step's"])
def test_a_flipped_bit_in_a_checkpoint_is_found_before_it_is_used(name: str, run: Path, straight: Path) -> None:
    checkpoint = run / "checkpoints" / "step-8"
    if name == "another step's":
        name = "optimizer.safetensors"
        shutil.copy(checkpoint.with_name("step-4") / name, checkpoint)
    else:
        flip(checkpoint / name)
    refused(run, rf"{name} is damaged.*--from 4")
    if name == "weights.safetensors":
        for reader in (lambda: export(run), lambda: open_sampler(SampleOptions(("x",), 0, run, None))):
            with pytest.raises(VideotuneError, match="is damaged"):
                reader()
    assert resume(run, step=4) == DONE
    assert equal(state(run, 8), state(straight, 8))


def test_an_export_with_other_bytes_is_not_loaded(run: Path) -> None:
    flip(exported(run, "diffusers"))
    with pytest.raises(VideotuneError, match="damaged"):
        exported(run, "diffusers")


# ---- JSON


DAMAGED: dict[str, Callable[[str], bytes]] = {
    "torn": lambda text: text[: len(text) // 2].encode(),
    "empty": lambda _: b"",
    "list": lambda _: b"[1]",
    "object": lambda _: b"{}",
    "null": lambda _: b"null",
    "utf-16": lambda text: text.encode("utf-16"),
    "deep": lambda _: b"[" * 100_000,
    "types": lambda text: text.replace(": ", ": [").replace(",\n", "],\n").encode(),
}


@pytest.mark.parametrize("name", ["config.json", "plan.json", "check.json", "exports.json"])
@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_json_is_one_sentence_everywhere(name: str, how: str, run: Path) -> None:
    (run / name).write_bytes(DAMAGED[how]((run / name).read_text()))
    refused(run, rf"{name}")
    readers: list[Callable[[], object]] = [lambda: diagnose(run)]
    if name == "config.json":
        readers += [lambda: export(run), lambda: compare(run, "x", 0, None)]
        readers += [lambda: open_sampler(SampleOptions(("x",), 0, run, None))]
    if name in ("plan.json", "exports.json"):
        readers += [lambda: export(run)]
    for reader in readers:
        with pytest.raises(VideotuneError, match=name):
            reader()
    page = write_report(run).read_text()
    assert how == "object" or (name in page and "left out" in page)


def test_a_config_that_was_edited_by_hand_is_refused_unless_allowed(run: Path) -> None:
    config = read_json(run / "config.json")
    config["settings"]["learning_rate"] = 0.5
    (run / "config.json").write_text(json.dumps(config))
    refused(run, r"edited by hand.*--set KEY=VALUE --override")
    assert resume(run, "steps=9", override=True) == DONE
    assert any("edited by hand" in str(line.get("changes")) for line in read_journal(run))
    assert resume(run, "steps=10") == DONE


def test_a_base_with_another_scheduler_is_refused_and_other_versions_are_reported(
    straight: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_json(run / "config.json")
    assert config["base"]["scheduler"]
    scheduler = Path(config["settings"]["base_model_name"]) / SCHEDULER
    whole = scheduler.read_text()
    try:
        scheduler.write_text(whole + "\n")
        refused(run, "scheduler_config.json is not the one")
    finally:
        scheduler.write_text(whole)
    capsys.readouterr()
    config["versions"]["torch"] = "1.0.0"
    del config["digest"]
    (run / "config.json").write_text(json.dumps(config | {"digest": digest(config)}))
    assert resume(run, "steps=9") == DONE
    assert "versions.torch: 1.0.0 ->" in capsys.readouterr().err


# ---- the journal


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace('"kind"', '"kjnd"'),
        lambda line: line.replace('"step": 3', '"step": "3"'),
        lambda line: line.replace('"step": 3', '"step": null'),
        lambda line: line[:40],
        lambda line: "[" * 100_000,
    ],
)
def test_a_damaged_line_of_the_journal_is_refused_by_number_and_can_be_removed(
    damage: Callable[[str], str], run: Path, straight: Path
) -> None:
    path = run / "journal.jsonl"
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"kind": "step", "step": 3' in line)
    lines[number] = damage(lines[number])
    path.write_text("\n".join(lines) + "\n")
    refused(run, rf"line {number + 1} is damaged.*--repair-journal")
    write_report(run)
    assert f"line {number + 1} of the journal" in (run / "report.html").read_text()
    diagnose(run)
    repair_journal(run)
    assert (run / "journal.jsonl.damaged-1").read_text().splitlines() == lines
    assert resume(run, "steps=9") == DONE
    assert [line["step"] for line in steps_of(run)] == [1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("how", ["emptied", "missing", "cut short"])
def test_a_journal_that_lacks_what_was_saved_is_refused_and_can_be_repaired(how: str, run: Path) -> None:
    path = run / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) if how == "cut short" else "")
    if how == "missing":
        path.unlink()
    refused(run, r"says nothing of the steps.*--repair-journal")
    repair_journal(run)
    assert resume(run, "steps=9") == DONE


def test_a_process_with_a_damaged_run_ends_with_a_sentence(server: None, run: Path) -> None:
    (run / "config.json").write_text("{")
    running = start(Overrides(), run, "--resume")
    assert running.ended() == FAILED
    assert "Traceback" not in running.stderr
    assert facts_of(run)


def test_the_journal_is_parsed_once_in_a_resume(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse, there = journal.parse_line, len(read_journal(run))
    monkeypatch.setattr(journal, "parse_line", lambda line: (parsed.append(line), parse(line))[1])
    assert resume(run, "steps=12") == DONE
    assert len(parsed) == there, "each line of before once; none of those that the process itself wrote"
