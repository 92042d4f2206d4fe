"""Archives unpacked whole or not at all, once, and nowhere but in their folder."""

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

FILES = {"videos/a.mp4": b"a" * 3000, "videos/sub/b.mp4": bytes(range(256)) * 20, "captions/a.txt": "Bär, 猫".encode()}
MODES = {".tar": "w:", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.xz": "w:xz", ".tar.bz2": "w:bz2"}


def write_zip(path: Path, members: Mapping[str, bytes], **about: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            for key, value in about.get(name, {}).items():
                setattr(info, key, value)
            archive.writestr(info, content)
    return path


def write_tar(path: Path, members: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w:", **kind: Any) -> Path:
    with tarfile.open(path, mode, **kind) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def member(kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, link
    return info


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir() and path.name != ".unpacked.json"]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def nothing_stays(cache: Path) -> bool:
    home = cache / "archives"
    return {path.name for path in home.iterdir()} <= {".lock", "seen.json"} if home.exists() else True


def everything(root: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("suffix", [".zip", *MODES])
def test_every_kind_is_unpacked_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clips{suffix}"
    if suffix == ".zip":
        write_zip(path, FILES)
    else:
        write_tar(path, FILES, MODES[suffix])
    found = unpack(path, tmp_path / "cache")
    assert contents(found.folder) == FILES
    assert found.notes == ()
    misnamed = path.rename(tmp_path / "download")  # what it is, its bytes say
    assert unpack(misnamed, tmp_path / "cache") == found


def test_a_second_time_nothing_is_read_or_written(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    told: list[tuple[int, int, str]] = []
    first = unpack(path, tmp_path / "cache", lambda *words: told.append(words))
    assert [text for _, _, text in told] == [
        "reading a.zip",
        *(f"unpacking {name}" for name in FILES for _ in range(2)),
    ]
    assert all(0 <= done <= total == 1 for done, total, _ in told)
    before, told[:] = everything(tmp_path / "cache"), []
    assert unpack(path, tmp_path / "cache", lambda *words: told.append(words)) == first
    assert told == []
    assert everything(tmp_path / "cache") == before


def test_other_bytes_are_another_folder(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    first = unpack(path, tmp_path / "cache").folder
    write_zip(path, {"c.mp4": b"c"})
    second = unpack(path, tmp_path / "cache").folder
    assert (contents(first), contents(second)) == (FILES, {"c.mp4": b"c"})


@pytest.mark.parametrize("damage", ["gone", "shorter", "mark", "file"])
def test_files_that_were_changed_are_unpacked_again(tmp_path: Path, damage: str) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    folder = unpack(path, tmp_path / "cache").folder
    victim = folder / "videos/a.mp4"
    if damage == "gone":
        victim.unlink()
    elif damage == "shorter":
        victim.write_bytes(b"a")
    elif damage == "mark":
        (folder / ".unpacked.json").write_text('{"files": {')
    else:
        shutil.rmtree(folder / "videos")
        (folder / "videos").touch()
    again = unpack(path, tmp_path / "cache")
    assert contents(again.folder) == FILES
    assert "had been changed" in again.notes[0]
    assert unpack(path, tmp_path / "cache").notes == ()


def test_hidden_members_are_passed_over(tmp_path: Path) -> None:
    junk = {"__MACOSX/videos/._a.mp4": b"x", "videos/._a.mp4": b"x", ".DS_Store": b"x", "videos/.git/c.mp4": b"x"}
    assert contents(unpack(write_zip(tmp_path / "a.zip", FILES | junk), tmp_path / "cache").folder) == FILES
    assert contents(unpack(write_tar(tmp_path / "a.tar", FILES | junk), tmp_path / "cache").folder) == FILES


OUTSIDE = {
    "../evil.mp4": "leads out of its folder",
    "videos/../../evil.mp4": "leads out of its folder",
    "a/..": "leads out of its folder",
    "..\\evil.mp4": "leads out of its folder",
    "/etc/evil.mp4": "has an absolute path",
    "//server/evil.mp4": "has an absolute path",
    "\\evil.mp4": "has an absolute path",
    "C:\\evil.mp4": "has an absolute path",
    "c:evil.mp4": "has an absolute path",
    ".hidden/../../evil.mp4": "leads out of its folder",
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_a_name_that_leads_out_refuses_the_whole(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    suffix = "zip" if write is write_zip else "tar"
    path = write(tmp_path / f"a.{suffix}", {**FILES, name: b"evil"})
    before = everything(tmp_path)
    with pytest.raises(VideotuneError) as caught:
        unpack(path, tmp_path / "cache")
    assert f"its member {name!r} {OUTSIDE[name]}" in str(caught.value)
    assert nothing_stays(tmp_path / "cache")
    assert {name for name in everything(tmp_path) if "/cache" not in name} == set(before)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (member(tarfile.SYMTYPE, "/etc/passwd"), "a link out of its folder, to '/etc/passwd'"),
        (member(tarfile.SYMTYPE, "../../secret"), "a link out of its folder"),
        (member(tarfile.SYMTYPE, "x/../../../secret"), "a link out of its folder"),
        (member(tarfile.SYMTYPE, "C:\\secret"), "a link out of its folder"),
        (member(tarfile.LNKTYPE, "/etc/passwd"), "a link out of its folder"),
        (member(tarfile.LNKTYPE, "../secret"), "a link out of its folder"),
        (member(tarfile.SYMTYPE, "nowhere"), "a link to 'links/nowhere', which is no file of it"),
        (member(tarfile.SYMTYPE, "../videos"), "a link to 'videos', which is no file of it"),
        (member(tarfile.SYMTYPE, "member.mp4"), "a link to 'links/member.mp4', which is no file of it"),
        (member(tarfile.CHRTYPE), "a device, pipe or socket"),
        (member(tarfile.BLKTYPE), "a device, pipe or socket"),
        (member(tarfile.FIFOTYPE), "a device, pipe or socket"),
    ],
)
def test_links_out_and_devices_refuse_the_whole(tmp_path: Path, info: tarfile.TarInfo, words: str) -> None:
    path = write_tar(tmp_path / "a.tar", {**FILES, "links/member.mp4": info})
    with pytest.raises(VideotuneError, match=f"its member 'links/member.mp4' is {words}"):
        unpack(path, tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")


def test_files_below_a_link_do_not_pass_through_it(tmp_path: Path) -> None:
    """The classic: a link to a folder outside, then a file below the link."""
    target = tmp_path / "target"
    target.mkdir()
    path = write_tar(tmp_path / "a.tar", {"dir": member(tarfile.SYMTYPE, str(target)), "dir/evil.mp4": b"evil"})
    with pytest.raises(VideotuneError, match="a link out of its folder"):
        unpack(path, tmp_path / "cache")
    assert list(target.iterdir()) == []


def test_links_within_become_copies(tmp_path: Path) -> None:
    links = {
        "first.mp4": member(tarfile.SYMTYPE, "videos/second.mp4"),
        "videos/second.mp4": member(tarfile.SYMTYPE, "../videos/a.mp4"),
        "hard.mp4": member(tarfile.LNKTYPE, "videos/a.mp4"),
    }
    found = contents(unpack(write_tar(tmp_path / "a.tar", links | FILES), tmp_path / "cache").folder)
    assert found == FILES | dict.fromkeys(links, FILES["videos/a.mp4"])


def test_links_and_devices_of_a_zip(tmp_path: Path) -> None:
    def linked(target: str, mode: int) -> Path:
        about = {"link.mp4": {"create_system": 3, "external_attr": (mode | 0o777) << 16}}
        return write_zip(tmp_path / "a.zip", {**FILES, "link.mp4": target.encode()}, **about)

    found = contents(unpack(linked("videos/a.mp4", stat.S_IFLNK), tmp_path / "cache").folder)
    assert found == {**FILES, "link.mp4": FILES["videos/a.mp4"]}
    for target, mode, words in [
        ("../secret", stat.S_IFLNK, "a link out of its folder, to '../secret'"),
        ("", stat.S_IFCHR, "is a device, pipe or socket"),
    ]:
        with pytest.raises(VideotuneError, match=words):
            unpack(linked(target, mode), tmp_path / "other")
    assert nothing_stays(tmp_path / "other")


def test_a_bomb_is_stopped_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MARGIN", 10_000_000)
    zeros = bytes(40_000_000)
    honest = write_zip(tmp_path / "honest.zip", {"a.mp4": zeros})
    liar = bytearray(honest.read_bytes())  # the same, with a table of contents that says 10 bytes
    head = liar.rindex(b"PK\x01\x02")
    liar[head + 24 : head + 28] = struct.pack("<I", 10)
    (tmp_path / "liar.zip").write_bytes(liar)
    tar = write_tar(tmp_path / "a.tar.xz", {"a.mp4": zeros}, "w:xz")
    for path in (honest, tar):
        with pytest.raises(VideotuneError, match="over 200 times its size"):
            unpack(path, tmp_path / "cache")
    with pytest.raises(VideotuneError, match="damaged"):  # zipfile stops at 10 bytes, and the checksum is wrong
        unpack(tmp_path / "liar.zip", tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")


def test_overlapping_members_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb without a high ratio in any member: a thousand entries share one member's bytes."""
    monkeypatch.setattr(archives, "MARGIN", 10_000_000)
    base = write_zip(tmp_path / "a.zip", {"000.mp4": random.Random(0).randbytes(100_000)}).read_bytes()
    start = base.rindex(b"PK\x01\x02")
    row = base[start : base.rindex(b"PK\x05\x06")]
    table = b"".join(row[:46] + f"{i:03d}.mp4".encode() + row[53:] for i in range(1000))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(table), start, 0)
    (tmp_path / "a.zip").write_bytes(base[:start] + table + end)
    with pytest.raises(VideotuneError, match=r"over 200 times|damaged"):
        unpack(tmp_path / "a.zip", tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    monkeypatch.setattr(archives, "RESERVE", shutil.disk_usage(tmp_path).free * 2)
    with pytest.raises(
        VideotuneError, match=r"does not fit on the disk of .* 0\.0 GB can be used there, .* are needed"
    ):
        unpack(path, tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBERS", 3)
    assert unpack(write_zip(tmp_path / "a.zip", FILES), tmp_path / "cache").folder.is_dir()
    with pytest.raises(VideotuneError, match="more than 3 members"):
        unpack(write_zip(tmp_path / "b.zip", {**FILES, "d": b""}), tmp_path / "cache")


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    whole = write_zip(tmp_path / "a.zip", FILES).read_bytes()
    locked = bytearray(whole)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(mark) + offset] |= 1
    method = bytearray(whole)
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        method[method.index(mark) + offset] = 9
    gz = write_tar(tmp_path / "a.tgz", FILES, "w:gz").read_bytes()
    for content, words in [
        (bytes(locked), "is locked by a password. Unpack it"),
        (bytes(method), r"uses a compression that is not read here .*Deflate64"),
        (whole[:-30], "damaged or cut short"),
        (whole.replace(b"videos/a.mp4", b"videos/b.mp4", 1), "damaged or cut short"),
        (gz[:-12], "damaged or cut short"),
        (gz[:-8] + b"\0\0\0\0" + gz[-4:], r"damaged or cut short \(CRC"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(100), "is a 7z archive; zip, tar"),
        (b"Rar!\x1a\x07\x00" + bytes(100), "is a rar archive; zip, tar"),
        (b"hello", "is no archive"),
        (b"", "is no archive"),
    ]:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(VideotuneError, match=words):
            unpack(tmp_path / "x", tmp_path / "cache")
        assert nothing_stays(tmp_path / "cache")


def test_a_compressed_file_that_is_no_tar(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.mp4.gz").write_bytes(gzip.compress(b"x" * 5000))
    with pytest.raises(VideotuneError, match=r"is no tar archive .*must hold a tar"):
        unpack(tmp_path / "a.mp4.gz", tmp_path / "cache")


def test_zstd_is_read_or_refused_clearly(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    if sys.version_info >= (3, 14):
        write_tar(path, FILES, "w:zst")
        assert contents(unpack(path, tmp_path / "cache").folder) == FILES
        return
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    with pytest.raises(VideotuneError, match=r"zstd, which Python reads from 3\.14 on"):
        unpack(path, tmp_path / "cache")


def test_a_tar_with_a_damaged_header_or_no_end_is_not_read_in_part(tmp_path: Path) -> None:
    """tarfile takes both for the archive's end (python/cpython#120740)."""
    whole = write_tar(tmp_path / "a.tar", FILES).read_bytes()
    second = whole.index(b"videos/sub/b.mp4")
    for content in (
        whole[:second] + b"X" + whole[second + 1 :],
        whole[:second],
        whole[: second + 100],
        whole[: second + 700],
        whole[:second] + b"\xff" * 512,
    ):
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(VideotuneError, match="damaged or cut short"):
            unpack(tmp_path / "x.tar", tmp_path / "cache")
        assert nothing_stays(tmp_path / "cache")


def test_any_damage_is_found_or_changes_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = {"zip": write_zip(tmp_path / "a.zip", FILES), "gz": write_tar(tmp_path / "a.tgz", FILES, "w:gz")}
    whole["xz"] = write_tar(tmp_path / "a.txz", FILES, "w:xz")
    refused = 0
    for trial in range(150):
        content = bytearray(whole[("zip", "gz", "xz")[trial % 3]].read_bytes())
        for _ in range(rng.choice((1, 1, 8))):
            content[rng.randrange(4, len(content))] = rng.randrange(256)
        (tmp_path / "x").write_bytes(content[: rng.choice((len(content), rng.randrange(5, len(content))))])
        try:
            found = unpack(tmp_path / "x", tmp_path / "cache")
        except VideotuneError:
            refused += 1
        else:
            got = contents(found.folder)
            assert set(got.values()) <= set(FILES.values())
            shutil.rmtree(found.folder)
        assert nothing_stays(tmp_path / "cache")
    assert refused > 100


def test_names_twice_or_alike(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.mp4", "1")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.mp4", "2")
    with pytest.raises(VideotuneError, match=r"member 'a\.mp4' stands in it twice"):
        unpack(tmp_path / "a.zip", tmp_path / "cache")
    for clash in ({"a.mp4": b"1", "./a.mp4": b"2"}, {"a\\b.mp4": b"1", "a/b.mp4": b"2"}):
        with pytest.raises(VideotuneError, match="stands in it twice"):
            unpack(write_tar(tmp_path / "a.tar", clash), tmp_path / "cache")
    for clash in ({"a": b"1", "a/b.mp4": b"2"}, {"a/b.mp4": b"2", "a": b"1"}):
        with pytest.raises(VideotuneError, match="is a file and a folder"):
            unpack(write_tar(tmp_path / "a.tar", clash), tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")
    alike = {"A.mp4": b"1", "a.mp4": b"2", "caf\u00e9.txt": b"3", "cafe\u0301.txt": b"4"}
    notes = unpack(write_tar(tmp_path / "b.tar", alike), tmp_path / "cache").notes
    assert len(notes) == 2
    assert "A.mp4 and a.mp4 differ only in case" in notes[0]
    assert unpack(tmp_path / "b.tar", tmp_path / "cache").notes == notes  # said again when it lies there


def raw_zip(path: Path, name: bytes, placeholder: str) -> Path:
    """A zip whose member has these bytes as its name, without declaring what they are."""
    assert len(name) == len(placeholder)
    path.write_bytes(write_zip(path, {placeholder: b"x"}).read_bytes().replace(placeholder.encode(), name))
    return path


def test_names_in_other_encodings(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert contents(unpack(write_zip(tmp_path / "0.zip", {"猫.mp4": b"x"}), cache).folder) == {"猫.mp4": b"x"}
    mac = raw_zip(tmp_path / "1.zip", "猫é.mp4".encode(), "00000.mp4")  # UTF-8, undeclared
    assert contents(unpack(mac, cache).folder) == {"猫é.mp4": b"x"}
    dos = raw_zip(tmp_path / "2.zip", "Bär.mp4".encode("cp437"), "000.mp4")
    found = unpack(dos, cache)
    assert contents(found.folder) == {"Bär.mp4": b"x"}
    assert "the encoding of 1 names is not declared; they were read as CP437 (Bär.mp4)" in found.notes[0]
    windows = write_zip(tmp_path / "3.zip", {"videos\\a.mp4": b"x"})
    assert contents(unpack(windows, cache).folder) == {"videos/a.mp4": b"x"}
    latin = write_tar(tmp_path / "4.tar", {"Bär.mp4": b"x"}, encoding="latin-1", format=tarfile.GNU_FORMAT)
    with pytest.raises(VideotuneError, match="has a name that is not UTF-8"):
        unpack(latin, cache)
    pax = write_tar(tmp_path / "5.tar", {"猫" * 80 + ".mp4": b"x"}, format=tarfile.PAX_FORMAT)
    assert contents(unpack(pax, cache).folder) == {"猫" * 80 + ".mp4": b"x"}


def test_a_name_with_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="has a NUL in its name"):
        unpack(raw_zip(tmp_path / "a.zip", b"a.mp4\0.txt", "000000.txt"), tmp_path / "cache")


def test_a_name_too_long_for_the_disk_names_the_file(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", {"a" * 300 + ".mp4": b"x"})
    with pytest.raises(VideotuneError, match=r"could not be unpacked into .*: File name too long .*aaa"):
        unpack(path, tmp_path / "cache")
    assert nothing_stays(tmp_path / "cache")


def start(path: Path, cache: Path, pause: float = 0) -> subprocess.Popen[str]:
    """Unpack in another process, a moment for each file; it prints each file's name."""
    code = f"""
        import time
        from pathlib import Path
        from videotune.data.archives import unpack
        def progress(done, total, text):
            print(text, flush=True)
            time.sleep({pause})
        print(unpack(Path({str(path)!r}), Path({str(cache)!r}), progress).folder)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL there")
def test_killed_and_run_again_it_is_whole(tmp_path: Path) -> None:
    members = {f"{i:02d}.mp4": bytes([i]) * 1000 for i in range(40)}
    path = write_zip(tmp_path / "a.zip", members)
    cache = tmp_path / "cache"
    process = start(path, cache, pause=0.05)
    assert process.stdout is not None
    while "05.mp4" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = [path for path in (cache / "archives").iterdir() if path.is_dir()]
    assert [path.name[:11] for path in left] == [".unpacking-"]
    assert 0 < len(list(left[0].iterdir())) < 40
    (left[0] / "99.mp4").write_bytes(b"must not be used")
    assert contents(unpack(path, cache).folder) == members
    assert sorted(path.name for path in (cache / "archives").iterdir() if path.name.startswith(".")) == [".lock"]


def test_two_at_once_do_it_once(tmp_path: Path) -> None:
    members = {f"{i:02d}.mp4": bytes([i]) * 1000 for i in range(20)}
    path = write_zip(tmp_path / "a.zip", members)
    one = start(path, tmp_path / "cache", pause=0.03)
    assert one.stdout is not None
    while "unpacking 01.mp4" not in one.stdout.readline():
        assert one.poll() is None
    two = start(path, tmp_path / "cache")
    said, worry = two.communicate(timeout=60)
    rest, _ = one.communicate(timeout=60)
    assert worry == ""
    assert said.splitlines()[0].startswith("waiting for another process")
    assert "unpacking" not in said
    assert rest.splitlines()[-1] == said.splitlines()[-1]
    assert contents(Path(said.splitlines()[-1])) == members


@pytest.mark.long
def test_ten_thousand_members(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for i in range(10_000):
            archive.addfile(tarfile.TarInfo(f"{i // 1000}/{i}.mp4"))
    first = unpack(path, tmp_path / "cache")
    assert sum(1 for _ in first.folder.rglob("*.mp4")) == 10_000
    assert unpack(path, tmp_path / "cache") == first
