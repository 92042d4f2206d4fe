"""Folders of tar files whose members are clips with their captions (WebDataset)."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import scanned
from videotune.errors import VideotuneError


@pytest.fixture
def clip_bytes(tmp_path: Path) -> list[bytes]:
    return [
        write_clip(
            tmp_path / f"{number}.mp4", noise(9, 32, 32, seed=number), 24
        ).read_bytes()
        for number in range(4)
    ]


def write_shard(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_shards_are_one_dataset(tmp_path: Path, clip_bytes: list[bytes]) -> None:
    root = tmp_path / "shards"
    caption = json.dumps({"url": "x", "caption": "of the json"}).encode()
    write_shard(
        root / "b-000.tar",
        {"000.mp4": clip_bytes[0], "000.txt": b"of the txt", "000.json": caption,
         "001.mp4": clip_bytes[1], "001.json": caption},
    )  # fmt: skip
    write_shard(root / "a-001.tar.gz", {"000.mp4": clip_bytes[2], "000.txt": b"other"})
    library = scanned(root)
    found = {
        f"{Path(clip.path).parent.name}/{Path(clip.path).name}": clip.captions
        for clip in library.clips
    }
    assert found == {
        "a-001.tar.gz/000.mp4": ("other",),
        "b-000.tar/000.mp4": ("of the txt",),
        "b-000.tar/001.mp4": ("of the json",),
    }

    # They are unpacked once, and anew if one of them changes.
    (unpacked,) = library.roots
    before = unpacked.stat().st_mtime_ns
    assert scanned(root).roots == (unpacked,)
    assert unpacked.stat().st_mtime_ns == before
    write_shard(root / "a-001.tar.gz", {"000.mp4": clip_bytes[3], "000.txt": b"new"})
    changed = scanned(root)
    assert changed.roots != (unpacked,)
    assert {clip.captions for clip in changed.clips} > {("new",)}


def test_archives_beside_clips_are_no_shards(
    tmp_path: Path, clip_bytes: list[bytes]
) -> None:
    root = tmp_path / "shards"
    write_shard(root / "a.tar", {"000.mp4": clip_bytes[0]})
    (root / "deep").mkdir()
    (root / "deep" / "clip.mp4").write_bytes(clip_bytes[1])
    library = scanned(root)
    assert [Path(clip.path).name for clip in library.clips] == ["clip.mp4"]
    assert any("not unpacked" in note for note in library.notes)


@pytest.mark.parametrize("name", ["../out.mp4", "/tmp/out.mp4"])
def test_a_hostile_shard_is_refused_and_leaves_nothing(
    tmp_path: Path, clip_bytes: list[bytes], name: str
) -> None:
    root = tmp_path / "shards"
    write_shard(root / "a.tar", {"000.mp4": clip_bytes[0]})
    write_shard(root / "b.tar", {name: clip_bytes[1]})
    with pytest.raises(VideotuneError, match=r"b\.tar is refused"):
        scanned(root)
    assert not list(root.rglob("*.mp4"))


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b'{"caption": 3}', b"\xff", b"[" * 200_000, b'{"caption": " "}'],
)
def test_a_json_without_a_caption_is_a_clip_without_one(
    tmp_path: Path, clip_bytes: list[bytes], content: bytes
) -> None:
    root = tmp_path / "shards"
    write_shard(root / "a.tar", {"000.mp4": clip_bytes[0], "000.json": content})
    with pytest.raises(VideotuneError, match="1 clip has no usable caption"):
        scanned(root, missing_caption="error")


def test_a_json_that_is_a_pipe_is_not_waited_for(
    tmp_path: Path, clip_bytes: list[bytes]
) -> None:
    root = tmp_path / "shards"
    write_shard(root / "a.tar", {"000.mp4": clip_bytes[0], "000.txt": b"a"})
    os.mkfifo(root / "b.tar")
    with pytest.raises(VideotuneError, match=r"b\.tar"):
        scanned(root)
