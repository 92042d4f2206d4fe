"""The index: what is known of files and contents, remembered, dropped, repaired, and never wrong for good."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import noise, write_clip

from videotune.data import media_index as module
from videotune.data.content_scan import ContentScan, scan_content
from videotune.data.file_checks import ClipProblem
from videotune.data.media_index import INDEX_VERSION, MediaIndex
from videotune.data.media_info import MediaInfo, probe
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

    monkeypatch.setattr(module, "default_workers", refuse)


def put(made: Path, kind: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return shutil.copy(made / f"{kind}.mp4", path)


Known = dict[str, tuple[str, MediaInfo | str]]


def identified(
    folder: Path, index: Path | None, workers: Workers | None = None, progress: Any = None
) -> tuple[Known, list[str]]:
    """By name the id and the media info, or the problem's text; and the notes."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    media = MediaIndex(index, progress, workers)
    known = [
        (name, info if isinstance(info, MediaInfo) else str(info)) for name, info in media.identify(paths, [folder])
    ]
    return {path.name: what for path, what in zip(paths, known, strict=True)}, media.notes


def scan(folder: Path, index: Path | None, workers: Workers | None = None, progress: Any = None) -> Known:
    known, notes = identified(folder, index, workers, progress)
    assert notes == []
    return known


def content(
    folder: Path, index: Path | None, workers: Workers | None, until: float, progress: Any = None
) -> list[ContentScan | ClipProblem | None]:
    """The content scans of the files a.mp4, b.mp4 (no video) and c.mp4."""
    media = MediaIndex(index, None, workers)
    known = media.identify([folder / name for name in ("a.mp4", "b.mp4", "c.mp4")], [folder])
    media._progress = progress
    return media.content_scans(known, until)


def codecs(known: Known) -> dict[str, str]:
    return {name: info.codec for name, (_, info) in known.items() if isinstance(info, MediaInfo)}


def read(index: Path) -> Any:
    return json.loads(index.read_text(encoding="utf-8"))


def names(index: Path) -> set[str]:
    return {Path(name).name for name in read(index)["files"]}


def edit(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the rows of all contents."""
    value = read(index)
    for row in value["contents"].values():
        change(row)
    index.write_text(json.dumps(value))


def mark(index: Path) -> None:
    """Write another codec into all media info: a file that has it was not probed."""
    edit(index, lambda row: row.get("info", {}).update({"codec": "marked"}))


def test_files_are_what_hashing_and_probing_give(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    for place in (None, index):
        known = scan(folder, place, workers)
        for name in ("a.mp4", "c.mp4"):
            assert known[name] == (hash_file(folder / name), probe(folder / name))
        with pytest.raises(ClipProblem) as caught:
            probe(folder / "b.mp4")
        assert known["b.mp4"] == (hash_file(folder / "b.mp4"), str(caught.value))
    value = read(index)
    assert (value["version"], len(value["files"]), len(value["contents"])) == (INDEX_VERSION, 3, 3)


@pytest.mark.usefixtures("no_workers")
def test_a_second_scan_starts_no_worker_and_writes_nothing(folder: Path, tmp_path: Path, workers: Workers) -> None:
    first, scans = (
        scan(folder, tmp_path / "index.json", workers),
        content(folder, tmp_path / "index.json", workers, 30.0),
    )
    written = (tmp_path / "index.json").stat().st_mtime_ns
    assert scan(folder, tmp_path / "index.json") == first
    assert content(folder, tmp_path / "index.json", None, 3600.0) == scans, "both are of the whole clip"
    assert (tmp_path / "index.json").stat().st_mtime_ns == written


def test_scanning_imports_no_decoder_here(folder: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from videotune.data.media_index import MediaIndex
        ((_, info),) = MediaIndex(None).identify([Path({str(folder / "a.mp4")!r})], [])
        assert info.width == 96
        print([name for name in ("av", "torch", "PIL", "cv2") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_changed_files_are_probed_and_moved_copied_or_touched_ones_hashed(
    made: Path, folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    put(made, "good3", folder / "d.mp4")
    scan(folder, index, workers)
    mark(index)
    (folder / "a.mp4").rename(folder / "moved.mp4")
    put(made, "good1", folder / "copied.mp4")
    os.utime(folder / "c.mp4", ns=(1, 1))
    put(made, "good2", folder / "d.mp4")
    known = scan(folder, index, workers)
    assert codecs(known) == {"copied.mp4": "marked", "c.mp4": "marked", "d.mp4": "h264", "moved.mp4": "marked"}
    assert known["d.mp4"] == (hash_file(folder / "d.mp4"), probe(folder / "d.mp4"))
    for name, (clip_id, info) in known.items():
        assert clip_id == hash_file(folder / name)
        assert isinstance(info, str) or info.path == str(folder / name)
    assert len(read(index)["contents"]) == 4


def test_the_same_bytes_by_another_suffix_are_probed_for_themselves(
    folder: Path, tmp_path: Path, workers: Workers
) -> None:
    (folder / "a.mp4").rename(folder / "a.png")
    assert "a.png" not in codecs(scan(folder, tmp_path / "index.json", workers))
    shutil.copy(folder / "a.png", folder / "a.mp4")
    for _ in range(2):
        assert codecs(scan(folder, tmp_path / "index.json", workers)) == {"a.mp4": "h264", "c.mp4": "h264"}


def test_the_index_follows_its_folders_and_leaves_others(
    made: Path, folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    put(made, "good2", tmp_path / "set2" / "x.mp4")  # a folder whose name begins like the other's
    scan(folder, index, workers)
    scan(tmp_path / "set2", index, workers)
    assert names(index) == {"a.mp4", "b.mp4", "c.mp4", "x.mp4"}
    (folder / "c.mp4").unlink()
    (tmp_path / "set2" / "x.mp4").unlink()
    scan(folder, index, workers)
    assert names(index) == {"a.mp4", "b.mp4", "x.mp4"}
    assert len(read(index)["contents"]) == 3


@pytest.mark.parametrize("damage", ["{", "[]", "null", '{"version": 1}', '{"version": 2, "av": ', "\udcff"])
def test_a_damaged_index_is_reported_and_made_anew(folder: Path, tmp_path: Path, workers: Workers, damage: str) -> None:
    index = tmp_path / "index.json"
    good = scan(folder, index, workers)
    index.write_bytes(damage.encode(errors="surrogateescape"))
    known, notes = identified(folder, index, workers)
    assert known == good
    assert [str(index) in note and "was damaged" in note for note in notes] == [True]
    assert scan(folder, index, workers) == good


@pytest.mark.parametrize("place", ["info", "contents", "problem", "size", "scan"])
def test_damage_inside_the_index_is_mended(folder: Path, tmp_path: Path, workers: Workers, place: str) -> None:
    index = tmp_path / "index.json"
    good, scans = scan(folder, index, workers), content(folder, index, workers, 10.0)
    edit(index, lambda row: row.update({place: 3}) if place in row else None)
    value = read(index)
    if place == "contents":
        value["contents"] = {}
    if place == "size":
        del value["files"][str(folder / "a.mp4")]["size"]
    index.write_text(json.dumps(value))
    known, notes = identified(folder, index, workers)
    assert known == good
    assert ["was damaged" in note for note in notes] == ([] if place == "scan" else [True])
    assert content(folder, index, workers, 10.0) == scans
    assert scan(folder, index, workers) == good


def test_damaged_media_info_is_not_lent_to_a_copy(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    scan(folder, index, workers)
    edit(index, lambda row: row.get("info", {}).pop("width", None))
    shutil.move(folder / "a.mp4", folder / "moved.mp4")
    ((_, info),) = MediaIndex(index, None, workers).identify([folder / "moved.mp4"], [])
    assert info == probe(folder / "moved.mp4")


def test_another_versions_index_is_made_anew_without_a_note(folder: Path, tmp_path: Path, workers: Workers) -> None:
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
    assert names(index) == {"a.mp4", "b.mp4"}
    mark(index)
    assert codecs(scan(folder, index, workers)) == {"a.mp4": "marked", "c.mp4": "h264"}


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_scan_killed_outright_leaves_a_whole_index(made: Path, tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "set").mkdir()
    for i in range(60):
        (tmp_path / "set" / f"{i:02d}.mp4").write_bytes((made / "good0.mp4").read_bytes() + bytes([i]) * 9)
    code = f"""
        from pathlib import Path
        from videotune.data import media_index
        media_index.SAVE_EVERY = 0
        folder = Path({str(tmp_path / "set")!r})
        media_index.MediaIndex(folder.parent / "index.json").identify(sorted(folder.iterdir()), [folder])
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    end = time.monotonic() + 20
    while not (tmp_path / "index.json").exists() and time.monotonic() < end:
        time.sleep(0.005)
    process.kill()
    assert process.wait() in (-signal.SIGKILL, 0)
    assert 1 <= len(read(tmp_path / "index.json")["files"]) <= 60
    known = scan(tmp_path / "set", tmp_path / "index.json", workers)
    assert len({clip_id for clip_id, info in known.values() if isinstance(info, MediaInfo)}) == 60


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_a_hang_is_reported_and_not_remembered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "aa.mp4")  # whoever reads it waits for ever
    monkeypatch.setattr(module, "stat_of", Path.stat)  # which would refuse it
    with Workers(2, limit=1.0) as workers:
        known = scan(folder, tmp_path / "index.json", workers)
    assert known["aa.mp4"] == ("", "unreadable: no answer within 1 s")
    assert set(codecs(known)) == {"a.mp4", "c.mp4"}
    assert names(tmp_path / "index.json") == {"a.mp4", "b.mp4", "c.mp4"}


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_what_is_no_file_is_reported_without_a_worker(tmp_path: Path, no_workers: None) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    os.symlink("/dev/null", tmp_path / "device.mp4")
    os.symlink("nowhere.mp4", tmp_path / "link.mp4")
    known = scan(tmp_path, None)
    assert known == {
        "device.mp4": ("", "not_a_video: is no regular file"),
        "link.mp4": ("", "missing_file: link to nowhere.mp4, which is missing"),
        "pipe.mp4": ("", "not_a_video: is no regular file"),
    }
    for name, (_, text) in known.items():
        with pytest.raises(ClipProblem, match=str(text)):
            probe(tmp_path / name)


def test_what_cannot_be_read_is_reported_and_not_remembered(folder: Path, tmp_path: Path, workers: Workers) -> None:
    (folder / "folder.mp4").mkdir()
    media = MediaIndex(tmp_path / "index.json", None, workers)
    known = media.identify([folder / "folder.mp4", folder / "missing.mp4", folder / "a.mp4"], [folder])
    assert [getattr(what, "reason", None) for _, what in known] == ["unreadable", "missing_file", None]
    assert media.notes == []
    assert names(tmp_path / "index.json") == {"a.mp4"}


@pytest.mark.skipif(sys.platform != "linux", reason="names of other bytes than text")
def test_a_name_that_is_no_text_is_a_name(made: Path, tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "set").mkdir()
    for name in [b"ok.mp4", "Füchse 狐.mp4".encode(), b"bad\xff.mp4"]:
        Path(os.fsdecode(os.fsencode(tmp_path / "set") + b"/" + name)).write_bytes((made / "good0.mp4").read_bytes())
    for codec in ("h264", "marked"):
        assert list(codecs(scan(tmp_path / "set", tmp_path / "index.json", workers)).values()) == [codec] * 3
        mark(tmp_path / "index.json")


def test_a_content_scan_is_made_once_and_remembered(folder: Path, tmp_path: Path, workers: Workers) -> None:
    index = tmp_path / "index.json"
    calls: list[tuple[int, int, str]] = []
    first = content(folder, index, workers, 0.5, lambda done, total, name: calls.append((done, total, name[-5:])))
    assert calls == [(0, 2, "a.mp4"), (1, 2, "c.mp4"), (2, 2, "")]
    info = probe(folder / "a.mp4")
    assert first == [scan_content(info, 0.5), None, scan_content(probe(folder / "c.mp4"), 0.5)]
    edit(index, lambda row: row.get("scan", {}).update({"jitter": 0.125}))
    assert [getattr(one, "jitter", None) for one in content(folder, index, workers, 0.5)] == [0.125, None, 0.125]
    for other in (0.25, 0.75):  # what another run asked for decides nothing
        assert content(folder, index, workers, other)[0] == scan_content(info, other)


def test_a_problem_is_remembered_but_not_that_of_another_file_in_its_place(
    folder: Path, tmp_path: Path, workers: Workers
) -> None:
    index = tmp_path / "index.json"
    media = MediaIndex(index, None, workers)
    known = media.identify([folder / "a.mp4"], [folder])
    path, aside = folder / "a.mp4", tmp_path / "aside"
    path.rename(aside)
    (lost,) = media.content_scans(known, 1.0)
    path.write_bytes(b"\0" * aside.stat().st_size)
    (bad,) = media.content_scans(known, 1.0)
    assert isinstance(lost, ClipProblem)
    assert isinstance(bad, ClipProblem)
    aside.replace(path)
    assert isinstance(content(folder, index, workers, 1.0)[0], ContentScan)
    edit(index, lambda row: row.update({"scan": {"until": 1.0, "problem": ["decode_error", "frame 0"]}}))
    assert "frame 0" in str(content(folder, index, workers, 1.0)[0])
