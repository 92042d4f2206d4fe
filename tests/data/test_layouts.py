"""Folders in every layout, metadata that lists clips, archives and Hub datasets as
datasets.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.hub_downloads import COMMIT, hub_of
from tests.support.hub_settings import hub_settings
from videotune.data.clip_file import ClipFile
from videotune.data.layouts import read_folder
from videotune.data.locations import open_location
from videotune.errors import VideotuneError


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def listing(root: Path) -> list[tuple[str, str | None]]:
    captions = {name: clip.caption_file for name, clip in by_name(root).items()}
    return [
        (name, caption and caption.relative_to(root).as_posix())
        for name, caption in captions.items()
    ]


def table(folder: Path, *rows: tuple[str, str], name: str = "metadata.jsonl") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"file_name": file, "text": text}) for file, text in rows]
    (folder / name).write_text("\n".join(lines))


def by_name(root: Path) -> dict[str, ClipFile]:
    return {
        clip.path.relative_to(root).as_posix(): clip for clip in read_folder(root)[0]
    }


@pytest.mark.parametrize(
    ("clips", "others"),
    [
        (
            "videos/a.MOV=captions/a.txt videos/b.mp4 videos/sub/c.webm=captions/sub/c.txt",
            "notes.txt",
        ),
        (
            "images/b.PNG=images/b.txt images/sub/c.jpeg=captions/sub/c.txt videos/a.mp4=captions/a.txt",
            "",
        ),
        ("a.mp4=a.txt x/c.avi x/y/b.v2.mkv=x/y/b.v2.txt", "x/readme.md"),
        ("a.mp4", ".b.mp4 .trash/c.mp4 ._a.mp4 .videotune-cache/archives/0/d.mp4"),
        ("a.MP4=a.TXT b.mp4=b.txt c.mp4", "b.Txt C.txt"),
        (
            "videos/d.mp4=captions/d.TXT videos/e/f.mp4=captions/e/f.TXT videos/g.mp4=videos/g.TXT",
            "videos/e/f.txt",
        ),
    ],
)
def test_clips_have_their_captions_in_every_layout(
    tmp_path: Path, clips: str, others: str
) -> None:
    expected = [
        (clip, caption or None)
        for clip, _, caption in (one.partition("=") for one in clips.split())
    ]
    touch(tmp_path, *clips.replace("=", " ").split(), *others.split())
    assert listing(tmp_path) == expected
    for clip in read_folder(tmp_path)[0]:
        assert (clip.missing_detail == f"{clip.expected_caption} does not exist") == (
            clip.caption_file is None
        )
    # given without its parent it has the same captions
    if (tmp_path / "videos").is_dir():
        inside = [
            caption and tmp_path / caption
            for clip, caption in expected
            if clip.startswith("videos/")
        ]
        assert [
            clip.caption_file for clip in read_folder(tmp_path / "videos")[0]
        ] == inside


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    touch(tmp_path, "real/a.mp4", "set/b.mp4")
    os.symlink(tmp_path / "real", tmp_path / "set" / "linked")
    os.symlink(tmp_path / "set", tmp_path / "set" / "circle")
    assert [name for name, _ in listing(tmp_path / "set")] == ["b.mp4", "linked/a.mp4"]


def test_a_clip_or_caption_that_links_to_itself_costs_no_other(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4")
    for name in ("b.txt", "c.mp4", "d.PNG"):
        os.symlink(name, tmp_path / name)
    assert [name for name, _ in listing(tmp_path)] == [
        "a.mp4",
        "b.mp4",
        "c.mp4",
        "d.PNG",
    ]
    os.symlink("sub", tmp_path / "sub")
    with pytest.raises(VideotuneError, match="sub"):
        listing(tmp_path)


NOTES = [
    (
        "a.mp4 b.m4v x.heic sub/y.HEIC z.avif .w.avif notes.md sub/song.mp3",
        (),
        ["3 files", ".heic (2), .avif (1)"],
    ),
    (
        "videos/a.mp4 images/b.png captions/a.txt captions/b.txt videos/README.txt notes.txt",
        (),
        [],
    ),
    (
        "videos/a.mp4 captions/w.txt captions/x.txt captions/y.txt captions/z.txt",
        (),
        ["4 text files", "and 1 more"],
    ),
    (
        "a.mp4 a.txt b.mp4 typo.txt few/c.mp4 few/d.mp4 few/e.mp4 few/c.txt few/f.txt",
        (),
        ["2 text files", ": few/f.txt, typo.txt"],
    ),
    (
        "a.mp4 a.txt b.mp4 b.txt",
        (("a.mp4", "from the row"),),
        [".txt files of 1 clip (", "since metadata.jsonl"],
    ),
    (
        "Clip.mp4",
        (("clip.mp4", "x"),),
        ["lists clip.mp4, which does not exist; Clip.mp4 does"],
    ),
    (
        "a.mp4 a.txt a.jpg",
        (),
        ["1 image with the name of a video next to it (a.jpg)"],
    ),
    ("a.mp4 more.zip", (), ["1 archives are not unpacked", "(more.zip)"]),
]


@pytest.mark.parametrize(("files", "rows", "notes"), NOTES)
def test_what_is_not_used_is_reported(
    tmp_path: Path, files: str, rows: Any, notes: list[str]
) -> None:
    touch(tmp_path, *files.split())
    if rows:
        table(tmp_path, *rows)
    found = " ".join(read_folder(tmp_path)[1])
    assert bool(found) == bool(notes)
    assert all(note in found for note in notes)


@pytest.mark.parametrize(
    ("files", "place", "words"),
    [
        (
            "a.txt b.txt c.psd d",
            "",
            r"looked for \.mp4 .*\.png .* found 2 \.txt, 1 .*, 1 ",
        ),
        ("x.heic", "", r"found 1 \.heic\. .* of type \.heic are not read: convert"),
        ("a.txt", "nowhere", "does not exist"),
        ("a.txt", "a.txt", "is a file"),
        ("clips.tar.gz", "", r"Give the archive itself: .*clips\.tar\.gz"),
        ("0.parquet", "", "need a column of bytes"),
        ("\udcff.mp4", "", "not valid UTF-8"),
    ],
)
def test_a_folder_without_clips_says_what_was_there(
    tmp_path: Path, files: str, place: str, words: str
) -> None:
    touch(tmp_path / "set", *files.split())
    with pytest.raises(VideotuneError, match=words):
        read_folder(tmp_path / "set" / place)


@pytest.mark.parametrize("name", ["a\nnext: do this.mp4", "a\rb.mp4", "b\n.txt"])
def test_a_name_with_a_line_break_cannot_look_like_a_line_of_the_output(
    name: str, tmp_path: Path
) -> None:
    touch(tmp_path / "set", "b.mp4", name)
    with pytest.raises(VideotuneError, match="has a line break") as refused:
        read_folder(tmp_path / "set")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="file names are text there")
def test_a_name_that_only_this_python_cannot_read_says_so(tmp_path: Path) -> None:
    """In the C locale without Python's UTF-8 mode; the file need not be renamed."""
    touch(tmp_path / "set", "猫.mp4")
    code = (
        "from pathlib import Path\n"
        "from videotune.data.layouts import read_folder\n"
        f"read_folder(Path({str(tmp_path / 'set')!a}))\n"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    message = run.stderr.decode(errors="replace")
    assert "PYTHONUTF8=1" in message
    assert "Rename" not in message


def test_a_clip_is_listed_once(tmp_path: Path) -> None:
    """From a folder above or beside; and in one metadata file of a folder."""
    touch(tmp_path, "videos/a.mp4", "videos/b.mp4")
    table(
        tmp_path / "meta",
        ("../videos/a.mp4", "up"),
        ("..\\videos\\b.mp4", "from Windows"),
    )
    assert [clip.metadata_captions for clip in read_folder(tmp_path)[0]] == [
        ("up",),
        ("from Windows",),
    ]
    table(tmp_path / "videos", ("a.mp4", "y"))
    with pytest.raises(
        VideotuneError,
        match=r"metadata\.jsonl:1 lists a\.mp4, which .*\.jsonl:1 lists already",
    ):
        read_folder(tmp_path)
    table(tmp_path / "meta", ("../videos/b.mp4", "x"))
    (tmp_path / "videos" / "metadata.csv").write_text("file_name,text\na.mp4,x\n")
    with pytest.raises(VideotuneError, match=r"more than one of metadata\.csv"):
        read_folder(tmp_path)


def test_a_metadata_file_gives_captions(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "train/b.mp4", "train/c.png", "train/odd.m4v")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.mp4,"one\ntwo"\n')
    table(
        tmp_path / "train",
        ("./b.mp4", "b"),
        ("c.png", ""),
        ("odd.m4v", "listed, so it is a clip"),
    )
    clips = by_name(tmp_path)
    assert {
        name: (clip.metadata_captions, clip.metadata_row)
        for name, clip in clips.items()
    } == {
        "a.mp4": (("one", "two"), "metadata.csv:2"),
        "train/b.mp4": (("b",), "train/metadata.jsonl:1"),
        "train/c.png": ((), "train/metadata.jsonl:2"),
        "train/odd.m4v": (("listed, so it is a clip",), "train/metadata.jsonl:3"),
    }
    assert all(clip.exists and not clip.missing_detail for clip in clips.values())


@pytest.mark.parametrize("root", [".", "sub/..", "../videos", "../videos/sub/.."])
def test_a_folder_videos_finds_the_captions_beside_it_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    touch(tmp_path, "videos/a.mp4", "videos/sub/b.mp4")
    touch(tmp_path, "captions/a.txt", "captions/sub/b.txt")
    monkeypatch.chdir(tmp_path / "videos")
    clips = read_folder(Path(root))[0]
    assert [clip.caption_file and clip.caption_file.resolve() for clip in clips] == [
        tmp_path / "captions" / "a.txt",
        tmp_path / "captions" / "sub" / "b.txt",
    ]


@pytest.mark.parametrize("root", [".", "../set", "./../set/", "sub/.."])
def test_a_relative_root_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    touch(
        tmp_path / "set",
        "a.mp4",
        "sub/b.mp4",
        "videos/c.mp4",
        "captions/c.txt",
        "sub/d.mp4",
        "e.mp4",
        "e.txt",
    )
    table(tmp_path / "set", ("a.mp4", "a"), ("sub/b.mp4", "b"))
    monkeypatch.chdir(tmp_path / "set")
    clips = read_folder(Path(root))[0]
    assert all(clip.path == Path(root) / clip.path.relative_to(root) for clip in clips)
    assert [
        (
            clip.path.name,
            clip.metadata_captions,
            clip.caption_file and clip.caption_file.name,
            clip.metadata_row,
        )
        for clip in clips
    ] == [
        ("a.mp4", ("a",), None, "metadata.jsonl:1"),
        ("e.mp4", None, "e.txt", None),
        ("b.mp4", ("b",), None, "metadata.jsonl:2"),
        ("d.mp4", None, None, None),
        ("c.mp4", None, "c.txt", None),
    ]
    assert clips[3].missing_detail.startswith("metadata.jsonl does not list it, and ")


def test_what_is_listed_and_not_there_and_what_is_there_and_not_listed(
    tmp_path: Path,
) -> None:
    touch(
        tmp_path,
        "here.mp4",
        "unlisted.mp4",
        "sub/side.mp4",
        "sub/side.txt",
        "sub/deep/none.mp4",
    )
    table(tmp_path, ("here.mp4", "x"), ("gone.mp4", "y"))
    clips = by_name(tmp_path)
    assert (clips["gone.mp4"].exists, clips["gone.mp4"].path.exists()) == (False, False)
    assert (
        clips["gone.mp4"].missing_detail
        == "metadata.jsonl:2 lists it, and it does not exist"
    )
    why = f"metadata.jsonl does not list it, and {tmp_path}/unlisted.txt does not exist"
    assert clips["unlisted.mp4"].missing_detail == why
    assert (
        "metadata.jsonl does not list it" in clips["sub/deep/none.mp4"].missing_detail
    )
    assert clips["sub/side.mp4"].caption_file == tmp_path / "sub/side.txt"
    assert clips["sub/side.mp4"].metadata_row is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret.mp4", "is outside"),
        ("sub/../../secret.mp4", "is outside"),
        ("..", "is outside"),
        ("..\\secret.mp4", "is outside"),
        ("/etc/passwd", "not relative"),
        ("C:\\clips\\a.mp4", "not relative"),
        ("\\\\server\\a.mp4", "not relative"),
        ("a\0.mp4", "not relative"),
        ("link.mp4", r"a link to .*secret\.mp4, outside"),
        ("folder/secret.mp4", r"a link to .*secret\.mp4, outside"),
        (".hidden.mp4", r"a link to .*secret\.mp4, outside"),
    ],
)
def test_metadata_reaches_nothing_outside(
    tmp_path: Path, name: str, words: str
) -> None:
    touch(tmp_path, "secret.mp4", "set/a.mp4", "set/sub/b.mp4")
    os.symlink(tmp_path / "secret.mp4", tmp_path / "set" / "link.mp4")
    os.symlink(tmp_path / "secret.mp4", tmp_path / "set" / ".hidden.mp4")
    os.symlink(tmp_path, tmp_path / "set" / "folder")
    table(tmp_path / "set", ("a.mp4", "x"), (name, "y"))
    with pytest.raises(VideotuneError, match=rf"metadata\.jsonl:2 lists .*{words}"):
        read_folder(tmp_path / "set")[0]


def test_a_zip_is_a_dataset_with_the_same_clips(tmp_path: Path) -> None:
    touch(tmp_path / "set", "videos/a.mp4", "captions/a.txt", "b.mp4")
    with zipfile.ZipFile(tmp_path / "My Clips.ZIP", "w") as archive:
        for path in sorted((tmp_path / "set").rglob("*.*")):
            archive.write(path, Path("top") / path.relative_to(tmp_path / "set"))
    folder = open_location(str(tmp_path / "set"), tmp_path / "cache")
    packed = open_location(str(tmp_path / "My Clips.ZIP"), tmp_path / "cache")
    assert (folder.name, packed.name) == ("set", "My Clips")
    assert packed.root.parent == tmp_path / "cache" / "archives"
    names = [clip.path.relative_to(packed.root / "top") for clip in packed.files]
    assert names == [clip.path.relative_to(folder.root) for clip in folder.files]
    assert [clip.caption_file is None for clip in packed.files] == [True, False]
    with pytest.raises(VideotuneError, match="is a file"):
        open_location(str(tmp_path / "set" / "b.mp4"), tmp_path / "cache")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A Hub cache as the hub's own library leaves it, with two repositories: clips, and
    an archive of clips.
    """
    repo = tmp_path / "hub" / "datasets--user--clips"
    files = {
        "data/a.mp4": b"video a",
        "data/metadata.csv": b"file_name,text\na.mp4,a cat\n",
        "test/b.mp4": b"b",
    }
    cached(repo, files)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("c.mp4", "c")
        archive.writestr("c.txt", "a cow")
    cached(
        tmp_path / "hub" / "datasets--user--packed",
        {"data.zip": (tmp_path / "data.zip").read_bytes()},
    )
    rows = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"image": [b"GIF8"], "text": ["a bird"]}), rows)
    names = ("data/train-0.parquet", "data/test-0.parquet")
    cached(
        tmp_path / "hub" / "datasets--user--parquet",
        dict.fromkeys(names, rows.read_bytes()),
    )
    return tmp_path / "hub"


def cached(repo: Path, files: dict[str, bytes]) -> None:
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    for number, (name, content) in enumerate(files.items()):
        (repo / "blobs" / str(number)).write_bytes(content)
        place = repo / "snapshots" / COMMIT / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(repo / "blobs" / str(number), place.parent))


def opened(path: str, folder: Path, caption_suffix: str = ".txt", **env: str) -> Any:
    """The layout of a Hub dataset, or the error, with these settings of the Hub."""
    with hub_settings(folder / "hub", env) as patch:
        patch.chdir(folder)
        try:
            layout = open_location(path, Path("cache"), caption_suffix=caption_suffix)
        except VideotuneError as error:
            return str(error)
        clips = []
        for clip in layout.files:
            name = clip.path.relative_to(layout.root).as_posix()
            caption = clip.caption_file and clip.caption_file.read_text()
            metadata = clip.metadata_captions and list(clip.metadata_captions)
            clips.append([name, clip.path.read_text(), metadata, caption])
        return layout.name, clips, layout.notes


@pytest.mark.parametrize(
    "path", ["user/clips", "hf://datasets/user/clips@main", f"user/clips@{COMMIT}"]
)
def test_a_hub_dataset_is_found_offline(hub: Path, tmp_path: Path, path: str) -> None:
    name, clips, notes = opened(path, tmp_path, HF_HUB_OFFLINE="1")
    assert name == "clips"
    assert clips == [
        ["data/a.mp4", "video a", ["a cat"], None],
        ["test/b.mp4", "b", None, None],
    ]
    assert len(notes) == 2
    assert notes[0] == f"{path} is hf://datasets/user/clips@{COMMIT}"
    assert "1 clip is in test folders (test/b.mp4)" in notes[1]


def test_other_hub_datasets_offline(hub: Path, tmp_path: Path) -> None:
    """One that is an archive; one that is not there; one without clips; a link that
    leads out of its repository.
    """
    _, clips, notes = opened("user/packed", tmp_path, HF_HUB_OFFLINE="1")
    assert notes[0].endswith(f" is hf://datasets/user/packed@{COMMIT}/data.zip")
    assert clips == [["c.mp4", "c", None, "a cow"]]
    said = opened("user/other", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith(
        "There is no folder user/other here, and the Hub dataset user/other is not complete in "
    )
    name, clips, notes = opened("user/parquet", tmp_path, HF_HUB_OFFLINE="1")
    assert (name, len(notes)) == ("parquet", 2)
    shard = "data/train-0.parquet"
    assert clips == [[f"{shard}/000001.gif", "GIF8", ["a bird"], None]]
    touch(tmp_path, "secret.mp4")
    place = hub / "datasets--user--clips" / "snapshots" / COMMIT / "data" / "a.mp4"
    place.unlink()
    place.symlink_to(tmp_path / "secret.mp4")
    assert "a link to" in opened("user/clips", tmp_path, HF_HUB_OFFLINE="1")


def test_a_slip_in_a_local_path_asks_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "data/clips/a.mp4")
    monkeypatch.chdir(tmp_path)
    for path in (
        "data/clip",
        "data/clip.zip",
        "none/clip.zip",
        "./a/b",
        str(tmp_path / "nowhere"),
        "nowhere",
    ):
        with pytest.raises(
            VideotuneError, match=r"The dataset folder .* does not exist"
        ):
            open_location(path, tmp_path / "cache")
    with pytest.raises(VideotuneError, match="is not a Hub dataset"):
        open_location("hf://user", tmp_path / "cache")


def test_a_hub_dataset_is_fetched_clips_and_captions_alone(tmp_path: Path) -> None:
    """And the Hub's refusals say what to do."""
    unused = dict.fromkeys(("big.safetensors", "more.zip", "0.parquet"), b"")
    files = {"clips/a.MP4": b"video a", "clips/a.txt": b"a cat", **unused}
    with hub_of({"good": files, "gated": files}) as server:
        _, clips, notes = opened(
            "user/good", tmp_path, HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0"
        )
        assert clips == [["clips/a.MP4", "video a", None, "a cat"]]
        assert notes[1:] == ["user/good: 1 archives are not fetched (more.zip)"]
        assert not any(name in path for _, path, *_ in server.asked for name in unused)
        shutil.rmtree(
            next((tmp_path / "hub").glob("datasets--*"))
            / "snapshots"
            / COMMIT
            / "clips"
        )
        assert "is not complete in" in opened("user/good", tmp_path, HF_HUB_OFFLINE="1")
        for path, words in [
            ("user/none", "is not on the Hub, or is private"),
            ("user/gated", "is gated"),
            ("user/good@nope", "has no such revision"),
        ]:
            said = opened(
                f"hf://datasets/{path}",
                tmp_path,
                HF_ENDPOINT=server.url,
                HF_HUB_OFFLINE="0",
            )
            assert words in said
            assert path.split("@")[0] in said
    said = opened(
        "user/x", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0"
    )
    assert "check the network" in said


def test_captions_of_a_hub_dataset_are_fetched_in_any_case(tmp_path: Path) -> None:
    """The suffix that a dataset names may be in capitals."""
    files = {"a.mp4": b"video a", "a.Cap": b"a cat"}
    with hub_of({"good": files}) as server:
        for suffix in (".cap", ".CAP"):
            folder = tmp_path / suffix[1:]
            folder.mkdir()
            _, clips, _ = opened(
                "user/good",
                folder,
                caption_suffix=suffix,
                HF_ENDPOINT=server.url,
                HF_HUB_OFFLINE="0",
            )
            assert clips == [["a.mp4", "video a", None, "a cat"]]


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_to_what_is_no_caption_is_not_read(tmp_path: Path, inside: bool) -> None:
    secret = (tmp_path / "data" if inside else tmp_path) / "passwd"
    touch(
        tmp_path,
        "data/a.mp4",
        "data/b.mp4",
        "mine/b.txt",
        secret.relative_to(tmp_path).as_posix(),
    )
    (tmp_path / "data/a.txt").symlink_to(secret)
    (tmp_path / "data/b.txt").symlink_to(tmp_path / "mine/b.txt")
    assert listing(tmp_path / "data") == [
        ("a.mp4", "a.txt" if inside else None),
        ("b.mp4", "b.txt"),
    ]
    (tmp_path / "data/metadata.csv").symlink_to(secret)
    secret.write_text("precious,x\nline,2\n")
    with pytest.raises(VideotuneError) as caught:
        read_folder(tmp_path / "data")[0]
    assert ("precious" in str(caught.value)) == inside


@pytest.mark.parametrize("target", ["rows.PARQUET", "rows.JSONL"])
def test_a_metadata_file_may_be_a_link_to_any_file_of_rows(
    tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "data"
    touch(folder, "a.mp4")
    rows = [{"file_name": "a.mp4", "text": "a red ball"}]
    path = tmp_path / "elsewhere" / target
    path.parent.mkdir()
    if target == "rows.PARQUET":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows[0]) + "\n")
    link = folder / f"metadata{path.suffix.lower()}"
    link.symlink_to(path)
    (clip,), _ = read_folder(folder)
    assert clip.metadata_captions == ("a red ball",)


def test_a_contact_sheet_below_the_clips_holds_no_clips(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.txt", "photos/index.html", "photos/b.jpg")
    touch(tmp_path, "sheet/index.html", "sheet/sheet-001.jpg", "sheet/clips/0001.jpg")
    clips, notes = read_folder(tmp_path)
    assert {clip.path.name for clip in clips} == {"a.mp4", "b.jpg"}
    assert any(str(tmp_path / "sheet") in note for note in notes)
    with pytest.raises(VideotuneError):
        read_folder(tmp_path / "sheet")
