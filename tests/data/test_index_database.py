"""The index's database: two processes at once, a killed process, a disk that cannot be
written, disks of networks.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.index_files import leading_journal
from videotune.data import index_database
from videotune.data.index_database import FileRow, IndexDatabase, is_network_disk
from videotune.sqlite_files import FILE_SUFFIXES

VERSIONS = {"version": "1", "av": "1"}

WRITER = """
import sys
from pathlib import Path
from videotune.data.index_database import FileRow, IndexDatabase
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
database = IndexDatabase(path, {"version": "1", "av": "1"})
for number in range(count):
    key = f"{name}{number}"
    database.put_content(key, '{"number": %d}' % number)
    database.put_file(f"{name}/{number}", FileRow(number, number, key))
    if number % 50 == 0:
        database.flush()
        print(number, flush=True)
database.close()
assert database.notes == [], database.notes
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    """Start a process that writes so many files."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


def names_of(database: IndexDatabase) -> set[str]:
    return set().union(*database.names())


def test_processes_fill_one_index_together(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    processes = [writer(path, name, 700) for name in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    database = IndexDatabase(path, VERSIONS)
    assert names_of(database) == {
        f"{name}/{number}" for name in "abc" for number in range(700)
    }
    assert database.contents(["a0", "c699"]) == {
        "a0": '{"number": 0}',
        "c699": '{"number": 699}',
    }


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_process_loses_at_most_its_last_batch(tmp_path: Path) -> None:
    """Files and their contents are there together, and other processes go on."""
    path = tmp_path / "index.sqlite"
    for attempt in range(3):
        process = writer(path, f"k{attempt}", 10**6)
        assert process.stdout is not None
        written = 0
        while written < 2000:
            written = int(process.stdout.readline())
        time.sleep(0.01 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()

        database = IndexDatabase(path, VERSIONS)
        names = [name for name in names_of(database) if name.startswith(f"k{attempt}/")]
        assert len(names) >= written
        rows = database.files(names)
        keys = [row.content for row in rows.values()]
        assert set(database.contents(keys)) == set(keys)
        database.put_file(f"after/{attempt}", FileRow(1, 1, "k"))
        database.close()
        assert database.notes == []
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_rows_of_other_versions_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    database = IndexDatabase(path, VERSIONS)
    database.put_file("a", FileRow(1, 2, "k"))
    database.close()
    assert names_of(IndexDatabase(path, VERSIONS)) == {"a"}
    other = IndexDatabase(path, VERSIONS | {"av": "2"})
    assert names_of(other) == set()
    assert other.notes == []


def test_a_folder_that_cannot_be_made_keeps_rows_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    database = IndexDatabase(tmp_path / "file" / "index.sqlite", VERSIONS)
    assert names_of(database) == set()
    assert database.notes == [], "nothing is lost so far"
    database.put_file("a", FileRow(1, 2, "k"))
    assert database.files(["a"]) == {"a": FileRow(1, 2, "k")}
    (note,) = database.notes
    assert "read again next time" in note


def test_an_index_on_a_disk_without_room_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    database = IndexDatabase(path, VERSIONS)
    database.put_content("k", "{}")
    database.put_file("a", FileRow(1, 2, "k"))
    database.close()

    full = IndexDatabase(path, VERSIONS)
    full.open()
    assert full._connection is not None
    full._connection.execute("PRAGMA max_page_count = 1")
    for number in range(5000):
        full.put_file(f"b{number}", FileRow(1, 2, "k" * 40))
    full.close()
    (note,) = full.notes
    assert "cannot be written" in note
    assert full.files(["a", "b4999"]).keys() == {"a", "b4999"}
    assert full.contents(["k"]) == {"k": "{}"}


def test_a_disk_of_a_network_gets_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = namedtuple("partition", "mountpoint fstype")
    mounts = [partition("/", "ext4"), partition(str(tmp_path / "net"), "nfs4")]
    monkeypatch.setattr(index_database.psutil, "disk_partitions", lambda all: mounts)
    modes = {}
    for folder in ("net", "network"):
        database = IndexDatabase(tmp_path / folder / "index.sqlite", VERSIONS)
        database.put_file("a", FileRow(1, 2, "k"))
        database.flush()
        assert database._connection is not None
        ((modes[folder],),) = database._connection.execute("PRAGMA journal_mode")
        database.close()
    assert modes == {"net": "delete", "network": "wal"}
    assert not is_network_disk(tmp_path)


def database_of_a_stranger(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in index_database.SCHEMA:
            connection.execute(statement)
        connection.commit()
    return path


def test_a_journal_of_a_stranger_deletes_no_file(tmp_path: Path) -> None:
    victim = tmp_path / "thesis.mp4"
    victim.write_bytes(b"precious")
    plain = database_of_a_stranger(tmp_path / "plain.sqlite")
    path = database_of_a_stranger(tmp_path / "index.sqlite")
    for file in (plain, path):
        journal = file.with_name(f"{file.name}-journal")
        journal.write_bytes(leading_journal(file, victim))

    database = IndexDatabase(path, VERSIONS)
    database.put_file("a", FileRow(1, 2, "k"))
    database.close()
    assert victim.read_bytes() == b"precious"
    assert len(database.notes) == 1
    assert names_of(IndexDatabase(path, VERSIONS)) == {"a"}

    with closing(sqlite3.connect(plain)) as connection:
        connection.execute("SELECT * FROM files").fetchall()
    assert not victim.exists(), "SQLite itself deletes what the journal names"


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_among_the_files_of_the_index_is_not_written_through(
    tmp_path: Path, suffix: str, link: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "index.sqlite"
    victim = database_of_a_stranger(tmp_path / "other.sqlite")
    before = victim.read_bytes()
    if suffix:
        database_of_a_stranger(path)
    link(victim, path.with_name(path.name + suffix))

    database = IndexDatabase(path, VERSIONS)
    database.put_file("a", FileRow(1, 2, "k"))
    database.close()
    assert victim.read_bytes() == before
    assert len(database.notes) == 1
    assert names_of(IndexDatabase(path, VERSIONS)) == {"a"}


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
def test_a_pipe_among_the_files_of_the_index_is_not_waited_for(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / "index.sqlite"
    if suffix:
        database_of_a_stranger(path)
    os.mkfifo(path.with_name(path.name + suffix))

    database = IndexDatabase(path, VERSIONS)
    database.put_file("a", FileRow(1, 2, "k"))
    database.close()
    assert len(database.notes) == 1
    assert names_of(IndexDatabase(path, VERSIONS)) == {"a"}
