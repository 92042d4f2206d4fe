"""The index: what is known of files and contents, remembered, dropped, repaired, and never wrong for good."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import noise, write_clip

from videotune.data import index as index_module
from videotune.data.facts import ClipProblem
from videotune.data.index import INDEX_VERSION, Known, identify, recall
from videotune.data.probe import probe
from videotune.data.workers import Workers
from videotune.files import hash_file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good clips and junk, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    for i in range(4):
        write_clip(folder / f"good{i}.mp4", noise(20 + 3 * i, seed=i))
    (folder / "text.mp4").write_text("hello " * 100)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A dataset of three: two good ones and a text."""
    for name, kind in {"a.mp4": "good0", "b.mp4": "text", "c.mp4": "good1"}.items():
        put(made, kind, tmp_path / "set" / name)
    return tmp_path / "set"


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts workers fails."""

    def refuse() -> Workers:
        raise AssertionError("workers were asked for")

    monkeypatch.setattr(index_module, "default_workers", refuse)


def put(made: Path, kind: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return shutil.copy(made / f"{kind}.mp4", path)


def scan(folder: Path, index: Path | None, workers: Workers | None = None, progress: Any = None) -> dict[str, Known]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    known, notes = identify(paths, [folder], index, progress, workers)
    assert notes == []
    return {path.name: what for path, what in zip(paths, known, strict=True)}


def read(index: Path) -> Any:
    return json.loads(index.read_text(encoding="utf-8"))


def mark(index: Path) -> None:
    """Write another codec into all facts: whoever says it has not probed the file."""
    value = read(index)
    for content in value["contents"].values():
        if "facts" in content:
            content["facts"]["codec"] = "marked"
    index.write_text(json.dumps(value))


def test_files_are_what_hashing_and_probing_say(folder: Path, tmp_path: Path, workers: Workers) -> None:
    for index in (None, tmp_path / "index.json"):
        known = scan(folder, index, workers)
        assert known["a.mp4"] == Known(hash_file(folder / "a.mp4"), probe(folder / "a.mp4"))
        assert known["c.mp4"] == Known(hash_file(folder / "c.mp4"), probe(folder / "c.mp4"))
        with pytest.raises(ClipProblem) as caught:
            probe(folder / "b.mp4")
        problem = (caught.value.reason, caught.value.detail)
        assert known["b.mp4"] == Known(hash_file(folder / "b.mp4"), problem=problem)
    value = read(index)
    assert (value["version"], len(value["files"]), len(value["contents"])) == (INDEX_VERSION, 3, 3)
    assert set(value["files"][str(folder / "a.mp4")]) == {"size", "mtime_ns", "id"}


@pytest.mark.usefixtures("no_workers")
def test_a_second_scan_starts_no_worker_and_writes_nothing(folder: Path, tmp_path: Path, workers: Workers) -> None:
    first = scan(folder, tmp_path / "index.json", workers)
    written = (tmp_path / "index.json").stat().st_mtime_ns
    assert scan(folder, tmp_path / "index.json") == first
    assert (tmp_path / "index.json").stat().st_mtime_ns == written


def test_scanning_imports_no_decoder_here(folder: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from videotune.data.index import identify
        known, _ = identify([Path({str(folder / "a.mp4")!r})], [], None)
        assert known[0].facts.width == 96
        print([name for name in ("av", "torch", "PIL", "cv2") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_changed_file_is_read_again(made: Path, folder: Path, tmp_path: Path, workers: Workers) -> None:
    scan(folder, tmp_path / "index.json", workers)
    mark(tmp_path / "index.json")
    put(made, "good2", folder / "c.mp4")
    known = scan(folder, tmp_path / "index.json", workers)
    assert known["c.mp4"].facts == probe(folder / "c.mp4")
    assert known["a.mp4"].facts
    assert known["a.mp4"].facts.codec == "marked"
    assert len(read(tmp_path / "index.json")["contents"]) == 3


def test_a_moved_copied_or_touched_file_is_hashed_and_not_probed(
    made: Path, folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    scan(folder, index, workers)
    mark(index)
    (folder / "a.mp4").rename(folder / "moved.mp4")
    put(made, "good1", folder / "copied.mp4")
    os.utime(folder / "c.mp4", ns=(1, 1))
    known = scan(folder, index, workers)
    for name in ("moved.mp4", "copied.mp4", "c.mp4"):
        facts = known[name].facts
        assert facts
        assert (facts.codec, facts.path) == ("marked", str(folder / name))
        assert known[name].id == hash_file(folder / name)
    assert known["c.mp4"].id == known["copied.mp4"].id
    assert len(read(index)["contents"]) == 3


def test_the_same_bytes_by_another_suffix_are_probed_for_themselves(
    folder: Path, tmp_path: Path, workers: Workers
) -> None:
    (folder / "a.mp4").rename(folder / "a.png")
    assert scan(folder, tmp_path / "index.json", workers)["a.png"].problem
    shutil.copy(folder / "a.png", folder / "a.mp4")
    for _ in range(2):
        known = scan(folder, tmp_path / "index.json", workers)
        assert known["a.png"].problem
        assert known["a.mp4"].facts == probe(folder / "a.mp4")


def test_the_index_follows_its_folders_and_leaves_others(
    made: Path, folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    put(made, "good2", tmp_path / "set2" / "x.mp4")  # a folder whose name begins like the other's
    scan(folder, index, workers)
    scan(tmp_path / "set2", index, workers)
    assert {Path(name).name for name in read(index)["files"]} == {"a.mp4", "b.mp4", "c.mp4", "x.mp4"}
    (folder / "c.mp4").unlink()
    scan(folder, index, workers)
    assert {Path(name).name for name in read(index)["files"]} == {"a.mp4", "b.mp4", "x.mp4"}
    assert len(read(index)["contents"]) == 3
    (tmp_path / "set2" / "x.mp4").unlink()
    scan(folder, index, workers)
    assert len(read(index)["files"]) == 3  # not its folder


def test_progress_counts_every_file(folder: Path, tmp_path: Path, workers: Workers) -> None:
    calls: list[tuple[int, int, str]] = []
    for _ in range(2):
        calls.clear()
        scan(folder, tmp_path / "i.json", workers, lambda done, total, name: calls.append((done, total, name[-5:])))
        assert calls == [(0, 3, "a.mp4"), (1, 3, "b.mp4"), (2, 3, "c.mp4"), (3, 3, "")]


@pytest.mark.parametrize("damage", ["{", "[]", "null", '{"version": 1}', '{"version": 2, "av": ', "\udcff"])
def test_a_damaged_index_is_said_and_made_anew(folder: Path, tmp_path: Path, workers: Workers, damage: str) -> None:
    index = tmp_path / "index.json"
    good = scan(folder, index, workers)
    index.write_bytes(damage.encode(errors="surrogateescape"))
    paths = [folder / name for name in good]
    known, notes = identify(paths, [folder], index, None, workers)
    assert known == list(good.values())
    assert [str(index) in note and "was damaged" in note for note in notes] == [True]
    assert scan(folder, index, workers) == good


@pytest.mark.parametrize("place", ["facts", "contents", "problem", "size", "look"])
def test_damage_inside_the_index_is_said_and_mended(folder: Path, tmp_path: Path, workers: Workers, place: str) -> None:
    index = tmp_path / "index.json"
    good = scan(folder, index, workers)
    clips = [known for known in good.values() if known.facts]
    looks = recall("look", clips, {"until": 10.0}, index, None, workers)
    value = read(index)
    for content in value["contents"].values():
        if place == "facts" and "facts" in content:
            content["facts"]["timestamps"] = "0 12y"
        if place == "problem" and "problem" in content:
            content["problem"] = 3
        if place == "look" and "look" in content:
            content["look"] = 3
    if place == "contents":
        value["contents"] = {}
    if place == "size":
        del value["files"][str(folder / "a.mp4")]["size"]
    index.write_text(json.dumps(value))
    known, notes = identify([folder / name for name in good], [folder], index, None, workers)
    assert known == list(good.values())
    assert ["was damaged" in note for note in notes] == ([] if place == "look" else [True])
    assert recall("look", clips, {"until": 10.0}, index, None, workers) == looks
    assert scan(folder, index, workers) == good


def test_damaged_facts_are_not_lent_to_a_copy(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    scan(folder, index, workers)
    value = read(index)
    for content in value["contents"].values():
        content.get("facts", {}).pop("width", None)
    index.write_text(json.dumps(value))
    shutil.move(folder / "a.mp4", folder / "moved.mp4")
    known, _ = identify([folder / "moved.mp4"], [], index, None, workers)
    assert known[0].facts == probe(folder / "moved.mp4")


def test_another_versions_index_is_made_anew_in_silence(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    good = scan(folder, index, workers)
    mark(index)
    value = read(index)
    index.write_text(json.dumps(value | {"av": "1.2.3"}))
    assert scan(folder, index, workers) == good
    assert read(index)["av"] == value["av"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_scan_keeps_what_it_has(
    folder: Path, tmp_path: Path, workers: Workers, error: type[BaseException]
) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        if done == 2:
            raise error

    index = tmp_path / "index.json"
    with pytest.raises(error):
        scan(folder, index, workers, interrupt)
    assert {Path(name).name for name in read(index)["files"]} == {"a.mp4", "b.mp4"}
    mark(index)
    known = scan(folder, index, workers)
    assert known["a.mp4"].facts
    assert known["c.mp4"].facts
    assert (known["a.mp4"].facts.codec, known["c.mp4"].facts.codec) == ("marked", "h264")


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_scan_killed_outright_leaves_a_whole_index(made: Path, tmp_path: Path, workers: Workers) -> None:
    for i in range(60):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{i:02d}.mp4").write_bytes((made / "good0.mp4").read_bytes() + bytes([i]) * 9)
    code = f"""
        from pathlib import Path
        from videotune.data import index
        index.SAVE_EVERY = 0
        folder = Path({str(tmp_path / "set")!r})
        index.identify(sorted(folder.iterdir()), [folder], folder.parent / "index.json")
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    end = time.monotonic() + 20
    while not (tmp_path / "index.json").exists() and time.monotonic() < end:
        time.sleep(0.005)
    process.kill()
    assert process.wait() in (-signal.SIGKILL, 0)
    assert 1 <= len(read(tmp_path / "index.json")["files"]) <= 60
    known = scan(tmp_path / "set", tmp_path / "index.json", workers)
    assert all(what.facts for what in known.values())
    assert len({what.id for what in known.values()}) == 60


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_a_hang_is_told_and_not_remembered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "aa.mp4")  # whoever reads it waits for ever
    monkeypatch.setattr(index_module, "stat_of", Path.stat)  # which would refuse it
    with Workers(2, limit=1.0) as workers:
        known = scan(folder, tmp_path / "index.json", workers)
    assert known["aa.mp4"] == Known("", problem=("unreadable", "no answer within 1 s"))
    assert known["a.mp4"].facts
    assert known["c.mp4"].facts
    assert {Path(name).name for name in read(tmp_path / "index.json")["files"]} == {"a.mp4", "b.mp4", "c.mp4"}


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_what_is_no_file_is_told_without_a_worker(tmp_path: Path, no_workers: None) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    os.symlink("/dev/null", tmp_path / "device.mp4")
    os.symlink("nowhere.mp4", tmp_path / "link.mp4")
    assert scan(tmp_path, None) == {
        "device.mp4": Known("", problem=("not_a_video", "is no regular file")),
        "link.mp4": Known("", problem=("missing_file", "link to nowhere.mp4, which is missing")),
        "pipe.mp4": Known("", problem=("not_a_video", "is no regular file")),
    }
    for name in ("pipe.mp4", "device.mp4"):
        with pytest.raises(ClipProblem, match="not_a_video: is no regular file"):
            probe(tmp_path / name)
    with pytest.raises(ClipProblem, match=r"missing_file: link to nowhere\.mp4"):
        probe(tmp_path / "link.mp4")


def test_what_cannot_be_read_is_told_and_not_remembered(folder: Path, tmp_path: Path, workers: Workers) -> None:
    (folder / "folder.mp4").mkdir()
    paths = [folder / "folder.mp4", folder / "missing.mp4", folder / "a.mp4"]
    known, notes = identify(paths, [folder], tmp_path / "index.json", None, workers)
    assert [what.problem and what.problem[0] for what in known] == ["unreadable", "missing_file", None]
    assert notes == []
    assert len(read(tmp_path / "index.json")["files"]) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of other bytes than text")
def test_a_name_that_is_no_text_is_a_name(made: Path, tmp_path: Path, workers: Workers) -> None:
    names = [b"ok.mp4", "Füchse 狐.mp4".encode(), b"bad\xff.mp4"]
    for name in names:
        (tmp_path / "set").mkdir(exist_ok=True)
        Path(os.fsdecode(os.fsencode(tmp_path / "set") + b"/" + name)).write_bytes((made / "good0.mp4").read_bytes())
    first = scan(tmp_path / "set", tmp_path / "index.json", workers)
    assert [what.facts.width for what in first.values() if what.facts] == [96] * 3
    mark(tmp_path / "index.json")
    again = scan(tmp_path / "set", tmp_path / "index.json", workers)
    assert [what.facts.codec for what in again.values() if what.facts] == ["marked"] * 3


def test_a_look_is_asked_once_and_remembered(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    known = list(scan(folder, index, workers).values())
    calls: list[tuple[int, int, str]] = []
    first = recall(
        "look", known, {"until": 0.5}, index, lambda done, total, name: calls.append((done, total, name[-5:])), workers
    )
    assert calls == [(0, 2, "a.mp4"), (1, 2, "c.mp4"), (2, 2, "")]
    assert [answer is None for answer in first] == [False, True, False]
    assert first[0] == workers.ask("look", {"facts": known[0].facts, "until": 0.5}).result()
    value = read(index)
    for content in value["contents"].values():
        if "look" in content:
            content["look"]["answer"]["jitter"] = 0.125
    index.write_text(json.dumps(value))
    remembered = recall("look", known, {"until": 0.5}, index, None, workers)
    assert [answer and answer["jitter"] for answer in remembered] == [0.125, None, 0.125]
    for other in (0.25, 0.75):  # what another run asked for decides nothing
        answer = recall("look", known, {"until": other}, index, None, workers)[0]
        assert answer == workers.ask("look", {"facts": known[0].facts, "until": other}).result()
    mark(index)
    assert scan(folder, index, workers)["a.mp4"].facts  # the facts stay beside the looks
    assert {"facts", "look"} <= set(read(index)["contents"][known[0].id + ".mp4"])


@pytest.mark.usefixtures("no_workers")
def test_a_look_at_the_whole_clip_serves_any_longer_one(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    known = list(scan(folder, index, workers).values())
    whole = recall("look", known, {"until": 30.0}, index, None, workers)
    written = index.stat().st_mtime_ns
    assert recall("look", known, {"until": 3600.0}, index) == whole
    assert index.stat().st_mtime_ns == written
    with pytest.raises(AssertionError, match="workers were asked for"):
        recall("look", known, {"until": 3600.0, "threshold": 1.0}, index)  # other words, another answer


def test_a_problem_is_an_answer_that_is_remembered(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    known = list(scan(folder, index, workers).values())
    words = {"times": [99.0], "height": 32, "width": 32}  # outside the clip
    for pool in (workers, None):
        answers = recall("decode", known, words, index, None, pool)
        assert isinstance(answers[0], ClipProblem)
        assert answers[0].reason == "decode_error"
        assert "lies outside the clip" in answers[0].detail
        assert answers[1] is None


def test_what_was_said_of_another_file_in_its_place_is_not_remembered(
    folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    known = list(scan(folder, index, workers).values())
    good = recall("look", known, {"until": 1.0}, None, None, workers)
    path, aside = folder / "a.mp4", tmp_path / "aside"
    path.rename(aside)
    lost = recall("look", known, {"until": 1.0}, index, None, workers)
    path.write_bytes(b"\0" * aside.stat().st_size)
    bad = recall("look", known, {"until": 1.0}, index, None, workers)
    assert isinstance(lost[0], ClipProblem)
    assert isinstance(bad[0], ClipProblem)
    aside.replace(path)
    assert recall("look", known, {"until": 1.0}, index, None, workers) == good
