"""Archives unpacked whole or not at all, once, and nowhere but in their folder."""

import gzip
import io
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from videotune.data import archives
from videotune.data.archives import unpack
from videotune.errors import VideotuneError

FILES = {
    "videos/a.mp4": b"a" * 3000,
    "videos/sub/b.mp4": bytes(range(256)) * 20,
    "captions/a.txt": "Bär, 猫".encode(),
}
ZSTD = sys.version_info >= (3, 14)
MODES = {
    ".tar": "w:",
    ".tar.gz": "w:gz",
    ".tgz": "w:gz",
    ".tar.xz": "w:xz",
    ".tar.bz2": "w:bz2",
}


def write_zip(path: Path, members: Mapping[str, bytes], **about: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            for key, value in about.get(name, {}).items():
                setattr(info, key, value)
            archive.writestr(info, content)
    return path


def write_tar(
    path: Path,
    members: Mapping[str, bytes | tarfile.TarInfo],
    mode: str = "w:",
    **kind: Any,
) -> Path:
    with tarfile.open(path, mode, **kind) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = (
                content
                if isinstance(content, tarfile.TarInfo)
                else tarfile.TarInfo(name)
            )
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            archive.addfile(
                info, io.BytesIO(content) if isinstance(content, bytes) else None
            )
    return path


def member(kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, link
    return info


def contents(folder: Path) -> dict[str, bytes]:
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and path.name != ".unpacked.json"
    ]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def nothing_stays(cache: Path) -> bool:
    home = cache / "archives"
    return (
        {path.name for path in home.iterdir()} <= {".lock"} if home.exists() else True
    )


def refused(path: Path, words: str) -> None:
    """It is an error with these words, and nothing lands anywhere."""
    before = set(path.parent.rglob("*"))
    with pytest.raises(VideotuneError, match=words):
        unpack(path, path.parent / "cache")
    assert nothing_stays(path.parent / "cache")
    assert {one for one in path.parent.rglob("*") if "/cache" not in str(one)} <= before


@pytest.mark.parametrize("suffix", [".zip", *MODES])
def test_every_kind_is_unpacked_as_it_was_once(tmp_path: Path, suffix: str) -> None:
    path, junk = (
        tmp_path / f"clips{suffix}",
        {"__MACOSX/videos/._a.mp4": b"x", ".DS_Store": b"x", "a/.git/c.mp4": b"x"},
    )
    if suffix == ".zip":
        write_zip(path, FILES | junk)
    else:
        write_tar(path, FILES | junk, MODES[suffix])
    path = path.rename(tmp_path / "download")  # what it is, its bytes say
    calls: list[tuple[int, int, str]] = []
    found = unpack(path, tmp_path / "cache", lambda *call: calls.append(call))
    assert contents(found) == FILES
    assert [text for _, _, text in calls] == [
        f"unpacking {name}" for name in FILES for _ in range(2)
    ]
    assert all(0 <= done <= total == 1 for done, total, _ in calls)
    assert (
        unpack(path, tmp_path / "cache", lambda *_: pytest.fail("it is there")) == found
    )
    write_zip(path, {"c.mp4": b"c"})
    assert (contents(unpack(path, tmp_path / "cache")), contents(found)) == (
        {"c.mp4": b"c"},
        FILES,
    )


@pytest.mark.parametrize("damage", ["gone", "shorter", "sizes", "file"])
def test_files_that_were_changed_are_unpacked_again(
    tmp_path: Path, damage: str
) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    folder = unpack(path, tmp_path / "cache")
    if damage == "gone":
        (folder / "videos/a.mp4").unlink()
    elif damage == "shorter":
        (folder / "videos/a.mp4").write_bytes(b"a")
    elif damage == "sizes":
        (folder / ".unpacked.json").write_text('{"files": {')
    else:
        shutil.rmtree(folder / "videos")
        (folder / "videos").touch()
    assert contents(unpack(path, tmp_path / "cache")) == FILES


OUT = ("../evil.mp4", "videos/../../evil.mp4", "a/..", "..\\evil.mp4", "/etc/evil.mp4", "//server/evil.mp4", "\\evil.mp4",
       "C:\\evil.mp4", "c:evil.mp4", ".hidden/../../evil.mp4")  # fmt: skip
TWICE = ({"a.mp4": b"1", "./a.mp4": b"2"}, {"a\\b.mp4": b"1", "a/b.mp4": b"2"}, {"a": b"1", "a/b.mp4": b"2"},
         {"a/b.mp4": b"2", "a": b"1"})  # fmt: skip
KINDS = (
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
)


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_names_that_lead_out_or_come_twice_refuse_the_whole(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    for name in OUT:
        refused(
            write(tmp_path / "a", {**FILES, name: b"evil"}), "leads out of its folder"
        )
    for clash in TWICE if write is write_tar else ():
        refused(write(tmp_path / "a", clash), "occurs twice, or is a file and a folder")


def test_links_and_devices_refuse_the_whole(tmp_path: Path) -> None:
    (
        tmp_path / "target"
    ).mkdir()  # the classic: a link to a folder outside, then a file below the link
    evil = [
        {
            "dir": member(tarfile.SYMTYPE, str(tmp_path / "target")),
            "dir/evil.mp4": b"evil",
        }
    ]
    for link in ("/etc/passwd", "../../out", "videos/a.mp4"):
        evil += [{**FILES, "links/x.mp4": member(kind, link)} for kind in KINDS]
    for members in evil:
        refused(write_tar(tmp_path / "a.tar", members), "is a link or a device")
    for mode in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        about = {
            "link.mp4": {"create_system": 3, "external_attr": (mode | 0o777) << 16}
        }
        refused(
            write_zip(tmp_path / "a.zip", {"link.mp4": b"videos/a.mp4"}, **about),
            "is a link or a device",
        )


def test_a_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MARGIN", 10_000_000)
    zeros = bytes(40_000_000)
    honest = write_zip(tmp_path / "honest.zip", {"a.mp4": zeros})
    liar = bytearray(
        honest.read_bytes()
    )  # the same, with a table of contents that says 10 bytes
    head = liar.rindex(b"PK\x01\x02")
    liar[head + 24 : head + 28] = struct.pack("<I", 10)
    (tmp_path / "liar.zip").write_bytes(liar)
    for path in (honest, write_tar(tmp_path / "a.tar.xz", {"a.mp4": zeros}, "w:xz")):
        refused(path, "over 200 times its size")
    refused(
        tmp_path / "liar.zip", "damaged"
    )  # zipfile stops at 10 bytes, and the checksum is wrong
    # without a high ratio in any member: a thousand entries share one member's bytes
    base = write_zip(
        tmp_path / "a.zip", {"000.mp4": random.Random(0).randbytes(100_000)}
    ).read_bytes()
    start = base.rindex(b"PK\x01\x02")
    row = base[start : base.rindex(b"PK\x05\x06")]
    table = b"".join(row[:46] + f"{i:03d}.mp4".encode() + row[53:] for i in range(1000))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(table), start, 0)
    (tmp_path / "a.zip").write_bytes(base[:start] + table + end)
    refused(tmp_path / "a.zip", "over 200 times|damaged")


def test_a_full_disk_and_too_many_members_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    with monkeypatch.context() as patch:
        patch.setattr(archives, "RESERVE", shutil.disk_usage(tmp_path).free * 2)
        refused(path, r"^[^(]*does not fit: 0\.0 GB are free")
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    refused(write_tar(tmp_path / "a.tar", FILES), "or 2 files")

    # A zip says how many it has before the first is written.
    monkeypatch.setattr(archives, "_create", lambda path: pytest.fail(path))
    refused(path, "or 2 files")


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    whole = write_zip(tmp_path / "a.zip", FILES).read_bytes()
    locked, method = bytearray(whole), bytearray(whole)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(mark) + offset] |= 1
        method[method.index(mark) + offset + 2] = 9
    gz = write_tar(tmp_path / "a.tgz", FILES, "w:gz").read_bytes()
    tar = write_tar(tmp_path / "a.tar", FILES).read_bytes()
    second = tar.index(b"videos/sub/b.mp4")
    for content, words in [
        (bytes(locked), "is locked by a password"),
        (bytes(method), r"a compression that is not supported .*deflate64"),
        (whole[:-30], "damaged or cut short"),
        (whole.replace(b"videos/a.mp4", b"videos/b.mp4", 1), "damaged or cut short"),
        (gz[:-12], "damaged or cut short"),
        (gz[:-8] + b"\0\0\0\0" + gz[-4:], r"damaged or cut short.*CRC"),
        (gzip.compress(b"x" * 5000), "the .gz does not contain a tar"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(100), "is a 7z file; zip, tar"),
        (b"Rar!\x1a\x07\x00" + bytes(100), "is a rar file; zip, tar"),
        *(
            []
            if ZSTD
            else [
                (
                    b"\x28\xb5\x2f\xfd" + bytes(100),
                    r"is a zst file.*from Python 3\.14 on",
                )
            ]
        ),
        (b"hello", "is not an archive"),
        (b"", "is not an archive"),
        # tarfile takes a damaged header and a missing end for the archive's end
        # (python/cpython#120740)
        (tar[:second] + b"X" + tar[second + 1 :], "damaged or cut short"),
        *((tar[: second + more], "damaged or cut short") for more in (0, 100, 700)),
        (tar[:second] + b"\xff" * 512, "damaged or cut short"),
    ]:
        (tmp_path / "x").write_bytes(content)
        refused(tmp_path / "x", words)


def test_any_damage_is_found_or_changes_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = {
        "zip": write_zip(tmp_path / "a.zip", FILES),
        "gz": write_tar(tmp_path / "a.tgz", FILES, "w:gz"),
    }
    whole["xz"] = write_tar(tmp_path / "a.txz", FILES, "w:xz")
    refused = 0
    for trial in range(150):
        content = bytearray(whole[("zip", "gz", "xz")[trial % 3]].read_bytes())
        for _ in range(rng.choice((1, 1, 8))):
            content[rng.randrange(4, len(content))] = rng.randrange(256)
        (tmp_path / "x").write_bytes(
            content[: rng.choice((len(content), rng.randrange(5, len(content))))]
        )
        try:
            found = unpack(tmp_path / "x", tmp_path / "cache")
        except VideotuneError:
            refused += 1
        else:
            got = contents(found)
            assert set(got.values()) <= set(FILES.values())
            shutil.rmtree(found)
        assert nothing_stays(tmp_path / "cache")
    assert refused > 100


def raw_zip(path: Path, name: bytes) -> Path:
    """A zip whose member has these bytes as its name, without declaring what they are."""
    placeholder = "0" * (len(name) - 4) + ".mp4"
    path.write_bytes(
        write_zip(path, {placeholder: b"x"})
        .read_bytes()
        .replace(placeholder.encode(), name)
    )
    return path


def test_names_in_other_encodings(tmp_path: Path) -> None:
    long = "猫" * 80 + ".mp4"
    for path, name in [
        (write_zip(tmp_path / "0.zip", {"猫.mp4": b"x"}), "猫.mp4"),
        (
            raw_zip(tmp_path / "1.zip", "猫é.mp4".encode()),
            "猫é.mp4",
        ),  # UTF-8, undeclared, as macOS writes it
        (raw_zip(tmp_path / "2.zip", "Bär.mp4".encode("cp437")), "Bär.mp4"),
        (write_zip(tmp_path / "3.zip", {"videos\\a.mp4": b"x"}), "videos/a.mp4"),
        (write_tar(tmp_path / "4.tar", {long: b"x"}, format=tarfile.PAX_FORMAT), long),
    ]:
        assert contents(unpack(path, tmp_path / "cache")) == {name: b"x"}, path
    latin = write_tar(
        tmp_path / "5.tar",
        {"Bär.mp4": b"x"},
        encoding="latin-1",
        format=tarfile.GNU_FORMAT,
    )
    for path, words in [
        (latin, "is not UTF-8"),
        (raw_zip(tmp_path / "6.zip", b"a.mp4\0.txt"), "has a NUL in its name"),
        (
            write_zip(tmp_path / "7.zip", {"a" * 300 + ".mp4": b"x"}),
            "could not be unpacked .*: File name too long",
        ),
    ]:
        with pytest.raises(VideotuneError, match=words):
            unpack(path, tmp_path / "cache")


def start(path: Path, cache: Path, pause: float = 0) -> subprocess.Popen[str]:
    """Unpack in another process, a moment for each file; it prints each file's name."""
    code = f"""
        import time
        from pathlib import Path
        from videotune.data.archives import unpack
        def progress(done, total, text):
            print(text, flush=True)
            time.sleep({pause})
        print(unpack(Path({str(path)!r}), Path({str(cache)!r}), progress))
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL there")
def test_killed_and_run_again_it_is_whole(tmp_path: Path) -> None:
    members = {f"{i:02d}.mp4": bytes([i]) * 1000 for i in range(40)}
    path, cache = write_zip(tmp_path / "a.zip", members), tmp_path / "cache"
    process = start(path, cache, pause=0.05)
    while "05.mp4" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = [path for path in (cache / "archives").iterdir() if path.is_dir()]
    assert left.name.startswith(".part-")
    assert 0 < len(list(left.iterdir())) < 40
    (left / "99.mp4").write_bytes(b"must not be used")
    assert contents(unpack(path, cache)) == members
    assert sorted(
        path.name
        for path in (cache / "archives").iterdir()
        if path.name.startswith(".")
    ) == [".lock"]


def test_two_at_once_do_it_once(tmp_path: Path) -> None:
    members = {f"{i:02d}.mp4": bytes([i]) * 1000 for i in range(20)}
    path = write_zip(tmp_path / "a.zip", members)
    one = start(path, tmp_path / "cache", pause=0.03)
    while "unpacking 01.mp4" not in one.stdout.readline():
        assert one.poll() is None
    two = start(path, tmp_path / "cache")
    output, errors = two.communicate(timeout=60)
    rest, _ = one.communicate(timeout=60)
    assert errors == ""
    assert output.splitlines()[0].startswith("waiting for another process")
    assert "unpacking" not in output
    assert rest.splitlines()[-1] == output.splitlines()[-1]
    assert contents(Path(output.splitlines()[-1])) == members
