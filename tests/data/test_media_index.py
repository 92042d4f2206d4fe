"""The index: what is known of files and contents, remembered, dropped, repaired, and
never wrong for good.
"""

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_clip
from tests.support.damaged_files import limited
from tests.support.datasets import problem_of
from tests.support.index_files import as_json, read_index, write_index
from videotune.data import media_index as module
from videotune.data.archives import silent
from videotune.data.content_scan import ContentScan, scan_content
from videotune.data.file_checks import stat_of
from videotune.data.index_rows import FileStamp
from videotune.data.media_index import INDEX_VERSION, MediaIndex
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.worker_process import examine
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


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A dataset of three: two good ones and a text."""
    for name, kind in {"a.mp4": "good0", "b.mp4": "text", "c.mp4": "good1"}.items():
        put(made, kind, tmp_path / "set" / name)
    return tmp_path / "set"


def put(made: Path, kind: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return shutil.copy(made / f"{kind}.mp4", path)


Known = dict[str, tuple[str, MediaInfo | str | None, ContentScan | None]]


def identified(
    folder: Path, index: Path | None, told: Any = silent, until: float = 10.0
) -> tuple[Known, list[str]]:
    """By name the id, the media info or the problem's text, and the content scan; and
    the notes.
    """
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    media = MediaIndex(index, told)
    known = media.examine(paths, [folder], until)
    plain = [
        (one.id, str(one.problem) if one.problem else one.info, one.scan)
        for one in known
    ]
    return {
        path.name: what for path, what in zip(paths, plain, strict=True)
    }, media.notes


def scan(folder: Path, index: Path | None, *how: Any) -> Known:
    known, notes = identified(folder, index, *how)
    assert notes == []
    return known


def expected(path: Path, until: float = 10.0) -> tuple[str, MediaInfo, ContentScan]:
    return hash_file(path), probe(path), scan_content(probe(path), until)


def codecs(known: Known) -> dict[str, str]:
    return {
        name: info.codec
        for name, (_, info, _) in known.items()
        if isinstance(info, MediaInfo)
    }


def names(index: Path) -> set[str]:
    return {Path(name).name for name in read_index(index)["files"]}


def edit(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the rows of all contents."""
    value = read_index(index)
    for row in value["contents"].values():
        change(row)
    write_index(index, value)


def mark(index: Path) -> None:
    """Write another codec into all media info: a file that has it was not probed."""
    edit(index, lambda row: row.get("info", {}).update({"codec": "marked"}))


def test_files_are_what_hashing_and_probing_give(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second scan starts no worker and writes nothing."""
    index = tmp_path / "index.sqlite"
    for place in (None, index):
        known = scan(folder, place)
        for name in ("a.mp4", "c.mp4"):
            assert known[name] == expected(folder / name)
        assert known["b.mp4"] == (
            hash_file(folder / "b.mp4"),
            str(problem_of(folder / "b.mp4")),
            None,
        )
    value, written = read_index(index), index.stat().st_mtime_ns
    assert (value["version"], len(value["files"]), len(value["contents"])) == (
        str(INDEX_VERSION),
        3,
        3,
    )
    monkeypatch.setattr(
        module, "default_workers", lambda: pytest.fail("workers were asked for")
    )
    assert scan(folder, index, silent, 3600.0) == known, "both are of the whole clip"
    assert index.stat().st_mtime_ns == written


def test_changed_files_are_probed_and_moved_or_touched_ones_hashed(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    put(made, "good3", folder / "d.mp4")
    scan(folder, index)
    mark(index)
    (folder / "a.mp4").rename(folder / "moved.mp4")
    put(made, "good1", folder / "copied.mp4")
    os.utime(folder / "c.mp4", ns=(1, 1))
    put(made, "good2", folder / "d.mp4")
    known = scan(folder, index)
    assert codecs(known) == {
        "copied.mp4": "marked",
        "c.mp4": "marked",
        "d.mp4": "h264",
        "moved.mp4": "marked",
    }
    assert known["d.mp4"] == expected(folder / "d.mp4")
    for name, (clip_id, info, _) in known.items():
        assert clip_id == hash_file(folder / name)
        assert not isinstance(info, MediaInfo) or info.path == str(folder / name)
    assert len(read_index(index)["contents"]) == 4


def test_the_index_follows_its_folders_and_leaves_others(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    put(
        made, "good2", tmp_path / "set2" / "x.mp4"
    )  # a folder whose name begins like the other's
    scan(folder, index)
    scan(tmp_path / "set2", index)
    assert names(index) == {"a.mp4", "b.mp4", "c.mp4", "x.mp4"}
    (folder / "c.mp4").unlink()
    (tmp_path / "set2" / "x.mp4").unlink()
    scan(folder, index)
    assert names(index) == {"a.mp4", "b.mp4", "x.mp4"}
    assert len(read_index(index)["contents"]) == 3


def test_files_that_a_run_does_not_use_keep_their_entries(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    """Such as masks, when the next run has no use for them: it would be read again."""
    index = tmp_path / "cache" / "index.sqlite"
    mask = put(made, "good2", folder / "masks" / "a.mp4")
    clip = folder / "a.mp4"
    MediaIndex(index).examine([clip, mask], [folder], 10.0)
    MediaIndex(index).examine([clip], [folder], 10.0)
    mark(index)
    _, examined = MediaIndex(index).examine([clip, mask], [folder], 10.0)
    assert examined.info is not None
    assert examined.info.codec == "marked"

    mask.unlink()
    MediaIndex(index).examine([clip], [folder], 10.0)
    assert set(read_index(index)["files"]) == {str(clip)}


def inside(place: str) -> Callable[[Any], Any]:
    """An index in whose contents this is a 3."""

    def spoil(value: Any) -> Any:
        for row in value["contents"].values():
            row |= {place: 3} if place in row else {}
        return value

    return spoil


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "no size": lambda value: (
        value
        | {
            "files": {
                name: row | {"content": 7} for name, row in value["files"].items()
            }
        }
    ),
    "no width": lambda value: (
        [row.get("info", {}).pop("width", 0) for row in value["contents"].values()]
        and value
    ),
    **{place: inside(place) for place in ("info", "problem", "scan")},
}


def spoil_file(index: Path, how: str) -> None:
    """Damage the file of an index."""
    content = bytearray(index.read_bytes())
    if how == "no database":
        content = bytearray(b"{" * 5000)
    elif how == "torn":
        content = content[: len(content) // 2]
    elif how == "overwritten":
        content[100:] = os.urandom(len(content) - 100)
    else:
        with closing(sqlite3.connect(index)) as database:
            database.execute(
                "CREATE TRIGGER t AFTER INSERT ON files BEGIN SELECT 1; END"
            )
        return
    index.write_bytes(content)


@pytest.mark.parametrize(
    "how", [*DAMAGE, "no database", "torn", "overwritten", "foreign schema"]
)
def test_a_damaged_index_is_reported_and_mended(
    folder: Path, tmp_path: Path, how: str
) -> None:
    """Also for a copy of a file whose content it had."""
    index = tmp_path / "index.sqlite"
    good = scan(folder, index)
    if how in DAMAGE:
        write_index(index, DAMAGE[how](read_index(index)))
    else:
        spoil_file(index, how)
    shutil.copy(folder / "a.mp4", folder / "d.mp4")
    known, notes = identified(folder, index)
    assert [known.pop("d.mp4")[0], known] == [good["a.mp4"][0], good]
    assert ["was damaged" in note for note in notes] == [True]
    assert scan(folder, index).items() >= good.items()


def test_contents_that_another_process_dropped_are_read_again(
    folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    good = scan(folder, index)
    write_index(index, read_index(index) | {"contents": {}})
    assert scan(folder, index) == good
    assert len(read_index(index)["contents"]) == 3


OLD_DAMAGE = ("{", '{"version": 2, "av": ', "[]", "null", '{"version": 1}', "\udcff")


@pytest.mark.parametrize("text", OLD_DAMAGE)
def test_a_damaged_index_of_an_earlier_version_is_reported_once(
    folder: Path, tmp_path: Path, text: str
) -> None:
    old = tmp_path / "index.json"
    old.write_bytes(text.encode(errors="surrogateescape"))
    index = tmp_path / "index.sqlite"
    known, notes = identified(folder, index)
    assert set(codecs(known)) == {"a.mp4", "c.mp4"}
    assert ["was damaged" in note for note in notes] == [True]
    assert not old.exists()
    assert scan(folder, index) == known


def test_another_versions_index_is_made_anew_without_a_note(
    folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    good = scan(folder, index)
    mark(index)
    value = read_index(index)
    write_index(index, value | {"av": "1.2.3"})
    assert scan(folder, index) == good
    assert read_index(index)["av"] == value["av"]


def test_a_file_with_an_impossible_value_has_a_problem(
    folder: Path, tmp_path: Path
) -> None:
    """It neither ends the scan nor enters the index."""
    path = folder / "a.mp4"
    answer = examine(str(path), until=3600.0, known_ids=[])
    answer["info"]["frame_seconds"] = -0.02
    index = MediaIndex(tmp_path / "index.sqlite")
    stat = path.stat()
    stamp = FileStamp(stat.st_size, stat.st_mtime_ns)

    examined = index._store(path, stamp, answer, until=3600.0)

    assert examined.problem is not None
    assert examined.problem.reason == "unreadable"
    assert examined.info is None
    assert index.notes == []
    scan(folder, tmp_path / "index.sqlite")
    assert codecs(scan(folder, tmp_path / "index.sqlite"))["a.mp4"] == "h264"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_scan_keeps_what_it_has(
    folder: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        if done == 2:
            raise error

    index = tmp_path / "index.sqlite"
    with pytest.raises(error):
        scan(folder, index, interrupt)
    assert names(index) == {"a.mp4", "b.mp4"}
    mark(index)
    assert codecs(scan(folder, index)) == {"a.mp4": "marked", "c.mp4": "h264"}


@pytest.mark.skipif(os.name == "nt", reason="needs files with holes")
def test_a_hang_is_reported_and_not_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "aa.mp4").touch()
    os.truncate(folder / "aa.mp4", 1 << 42)  # is read for hours
    monkeypatch.setattr(module, "SLOWEST_DISK", float("inf"))
    monkeypatch.setattr(module, "SLOWEST_DECODER", 0.0)
    with Workers(2, limit=1.0) as workers:
        monkeypatch.setattr(module, "default_workers", lambda: workers)
        known = scan(folder, tmp_path / "index.sqlite")
    assert known["aa.mp4"] == ("", "unreadable: no answer within 1 s", None)
    assert set(codecs(known)) == {"a.mp4", "c.mp4"}
    assert names(tmp_path / "index.sqlite") == {"a.mp4", "b.mp4", "c.mp4"}


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
@pytest.mark.parametrize("becomes", ["a pipe", "/dev/zero", "a folder", "a loop"])
def test_a_clip_that_is_exchanged_after_the_first_look_is_not_waited_for(
    becomes: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a link to /dev/stdin, which leads each process to another file."""

    to_exchange = [folder / "a.mp4"]

    def exchange_after_look(path: Path) -> os.stat_result:
        status = stat_of(path)
        if path in to_exchange:
            to_exchange.remove(path)
            path.unlink()
            if becomes == "a pipe":
                os.mkfifo(path)
            elif becomes == "a folder":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero" if becomes == "/dev/zero" else path.name)
        return status

    monkeypatch.setattr(module, "stat_of", exchange_after_look)
    with Workers(1, limit=10.0) as workers, limited(10):
        monkeypatch.setattr(module, "default_workers", lambda: workers)
        monkeypatch.setattr(module, "SLOWEST_DECODER", 0.0)
        known = scan(folder, tmp_path / "index.sqlite")
    _, problem, _ = known["a.mp4"]
    assert problem.startswith("unreadable")
    assert "no answer" not in problem
    assert known["c.mp4"][0]


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_what_is_no_clip_is_reported_and_only_contents_are_remembered(
    tmp_path: Path,
) -> None:
    """Pipes, devices, links to nowhere, folders and files that are gone are not waited
    for; damaged pictures are content.
    """
    folder, index = tmp_path / "set", tmp_path / "index.sqlite"
    path = write_clip(folder / "damaged.mp4", noise(12), options={"bf": "0"})
    data = bytearray(path.read_bytes())
    begin = data.index(b"mdat") + 4
    data[begin : begin + 4000] = bytes(4000)
    path.write_bytes(data)
    shutil.copy(path, folder / "damaged.png")  # a content by another suffix is another
    os.mkfifo(folder / "pipe.mp4")
    os.symlink("/dev/null", folder / "device.mp4")
    os.symlink("nowhere.mp4", folder / "link.mp4")
    (folder / "folder.mp4").mkdir()
    paths = sorted([*folder.iterdir(), folder / "missing.mp4"])
    for _ in range(2):
        media = MediaIndex(index)
        known = {
            one.name: found
            for one, found in zip(
                paths, media.examine(paths, [folder], 10.0), strict=True
            )
        }
        assert {
            name: found.problem and found.problem.reason
            for name, found in known.items()
        } == {
            "damaged.mp4": "decode_error",
            "damaged.png": "not_a_video",
            "device.mp4": "not_a_video",
            "folder.mp4": "unreadable",
            "link.mp4": "missing_file",
            "missing.mp4": "missing_file",
            "pipe.mp4": "not_a_video",
        }
        assert media.notes == []
        assert names(index) == {"damaged.mp4", "damaged.png"}


def test_a_content_scan_is_of_the_seconds_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    calls: list[tuple[int, int, str]] = []
    first = scan(
        folder,
        index,
        lambda done, total, name: calls.append((done, total, name[-5:])),
        0.5,
    )
    assert calls == [(0, 3, "a.mp4"), (1, 3, "b.mp4"), (2, 3, "c.mp4"), (3, 3, "")]
    assert first["a.mp4"] == expected(folder / "a.mp4", 0.5)
    edit(index, lambda row: row.get("scan", {}).update({"jitter": 0.125}))
    found = scan(folder, index, silent, 0.5)["a.mp4"][2]
    assert found.jitter == 0.125
    for other in (0.25, 0.75):  # what another run asked for decides nothing
        assert scan(folder, index, silent, other)["a.mp4"] == expected(
            folder / "a.mp4", other
        )


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_known_file_that_no_longer_opens_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Its size and times are the same: lost rights, a dying disk, a lost mount."""
    index = tmp_path / "index.sqlite"
    first = scan(folder, index)
    opened = os.open

    def refusing(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith("a.mp4"):
            raise OSError(error, os.strerror(error), str(path))
        return opened(path, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        _, found, content = scan(folder, index)["a.mp4"]
    assert str(found).startswith("unreadable")
    assert content is None
    assert scan(folder, index) == first, "and it is remembered until it opens again"


def test_an_index_in_a_dataset_names_files_from_there_and_moves_with_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "private" / "set"
    other = tmp_path / "private" / "other"
    for place in (folder, other):
        write_clip(place / "sub" / "a.mp4", noise(12, seed=len(place.name)))
    write_clip(folder / "b.mp4", noise(12, seed=9))
    index = folder / ".videotune-cache" / "index.sqlite"
    paths = [folder / "b.mp4", folder / "sub" / "a.mp4", other / "sub" / "a.mp4"]
    first = MediaIndex(index).examine(paths, [folder, other], 10.0)
    assert set(read_index(index)["files"]) == {
        "b.mp4",
        "sub/a.mp4",
        "../other/sub/a.mp4",
    }
    assert str(tmp_path).encode() not in index.read_bytes()
    assert (index.parent / ".gitignore").read_text() == "*\n"
    tag = (index.parent / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")

    moved = tmp_path / "elsewhere"
    (tmp_path / "private").rename(moved)
    paths = [moved / path.relative_to(tmp_path / "private") for path in paths]
    index = moved / "set" / ".videotune-cache" / "index.sqlite"
    before = index.stat().st_mtime_ns
    media = MediaIndex(index)
    again = media.examine(paths, [moved / "set", moved / "other"], 10.0)
    assert [one.id for one in again] == [one.id for one in first]
    assert index.stat().st_mtime_ns == before, "nothing was read again"

    paths[0].unlink()
    MediaIndex(index).examine(paths[1:], [moved / "set", moved / "other"], 10.0)
    assert set(read_index(index)["files"]) == {"sub/a.mp4", "../other/sub/a.mp4"}


def test_an_index_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    """Nothing is read again; its names may be absolute."""
    folder = tmp_path / "set"
    paths = [write_clip(folder / name, noise(12)) for name in ("a.mp4", "b.mp4")]
    index = folder / ".videotune-cache" / "index.sqlite"
    MediaIndex(index).examine(paths, [folder], 10.0)
    mark(index)
    value = read_index(index)
    value["files"] = {str(folder / name): row for name, row in value["files"].items()}
    index.unlink()
    index.with_name("index.json").write_text(as_json(value))
    taken = MediaIndex(index).examine(paths, [folder], 10.0)
    assert [result.info and result.info.codec for result in taken] == ["marked"] * 2
    assert set(read_index(index)["files"]) == {"a.mp4", "b.mp4"}
    assert not index.with_name("index.json").exists()

    paths[0].unlink()
    MediaIndex(index).examine(paths[1:], [folder], 10.0)
    assert set(read_index(index)["files"]) == {"b.mp4"}


def test_a_folder_of_the_user_gets_no_tag(tmp_path: Path) -> None:
    """Other files in it may be wanted in backups."""
    clip = write_clip(tmp_path / "set" / "a.mp4", noise(12))
    for name, is_tagged in (("mine", False), ("new", True)):
        folder = tmp_path / name
        if not is_tagged:
            folder.mkdir()
        MediaIndex(folder / "index.sqlite").examine([clip], [clip.parent], 10.0)
        assert (folder / "index.sqlite").is_file()
        assert (folder / "CACHEDIR.TAG").exists() == is_tagged
        assert (folder / ".gitignore").exists() == is_tagged
