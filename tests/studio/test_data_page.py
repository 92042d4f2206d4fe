"""The page Data without a browser: captions, their history, moves, other folders, and
what is refused.
"""

import json
import os
import struct
import time
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.support.clips import noise, write_clip
from tests.support.job_folders import ended_job
from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.studio import (
    captions_edit,
    clip_history,
    clip_moves,
    clips,
    media,
    projects,
    trash,
    undo,
)

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """A project of three files that are named like clips; two have captions."""
    project = projects.create(tmp_path, "My cats", preset="toy")
    for number, name in enumerate(("a", "b", "c")):
        (project.folder / "clips" / f"{name}.mp4").write_bytes(MP4 + bytes([number]))
    (project.folder / "clips/a.txt").write_text("a cat\n")
    (project.folder / "clips/b.txt").write_text("ohwx, a dog\n")
    return project


DATA = "/p/my-cats/data"


def captions(project: projects.Project) -> dict[str, str]:
    return {name: row["caption"] for name, row in clips.table(project).rows.items()}


def test_a_caption_is_written_where_the_trainer_looks(
    client: Any, cats: projects.Project
) -> None:
    def write(text: str, was: str = "", path: str = "clips/c.mp4") -> int:
        return int(
            client.post(
                f"{DATA}/caption", data={"path": path, "was": was, "text": text}
            ).status_code
        )

    assert write(" a horse \r\n\r\n a mare ") == 204
    assert (cats.folder / "clips/c.txt").read_text() == "a horse\na mare\n"
    assert write("TODO", "a horse\r\na mare") == 204
    assert "placeholder" in " ".join(clips.table(cats).rows["clips/c.mp4"]["hints"])
    assert write(" \n", "TODO") == 422
    assert write("x", path="clips/no.mp4") == write("x", path="../a") == 422
    assert write("\0\ud7ff", "TODO") == 204
    assert (cats.folder / "clips/c.txt").read_text() == "\ud7ff\n"


def test_another_caption_on_the_disk_is_a_conflict(
    client: Any, cats: projects.Project
) -> None:
    answer = client.post(
        f"{DATA}/caption", data={"path": "clips/a.mp4", "was": "a dog", "text": "mine"}
    )
    assert (answer.status_code, answer.json()) == (409, {"theirs": "a cat"})
    answer = client.post(
        f"{DATA}/caption", data={"path": "clips/a.mp4", "was": "old", "text": "a cat"}
    )
    assert answer.status_code == 204, "both say the same"
    assert clip_history.caption_changes(cats) == []


def test_a_listed_caption_is_shown_and_cannot_be_changed(
    client: Any, cats: projects.Project
) -> None:
    (cats.folder / "clips/metadata.csv").write_text(
        "file_name,text\na.mp4,a listed cat\n"
    )
    assert captions(cats)["clips/a.mp4"] == "a listed cat"
    assert "metadata.csv:2" in client.get(DATA).text
    words = {"path": "clips/a.mp4", "was": "a listed cat", "text": "x"}
    assert client.post(f"{DATA}/caption", data=words).status_code == 422
    for to in ("held-out", "bin"):
        assert (
            client.post(
                f"{DATA}/move", data={"path": "clips/a.mp4", "to": to}
            ).status_code
            == 422
        )
    assert (cats.folder / "clips/a.mp4").is_file()


def test_a_caption_that_is_not_utf_8_is_shown_and_can_be_written_anew(
    client: Any, cats: projects.Project
) -> None:
    (cats.folder / "clips/c.txt").write_bytes("ein Kätzchen".encode("latin-1"))
    assert captions(cats)["clips/c.mp4"] == "ein Kätzchen"
    words = {
        "path": "clips/c.mp4",
        "was": "ein Kätzchen",
        "text": "ein Kätzchen im Gras",
    }
    assert client.post(f"{DATA}/caption", data=words).status_code == 204
    assert (cats.folder / "clips/c.txt").read_text("utf-8") == "ein Kätzchen im Gras\n"


def test_a_batch_is_undone_once_and_what_changed_since_stays(
    cats: projects.Project,
) -> None:
    before = captions(cats)
    captions_edit.change(
        cats, {name: f"new {text}".strip() for name, text in before.items()}, "replace"
    )
    captions_edit.change(cats, {"clips/a.mp4": "mine"}, "edit")
    undo.undo(cats)
    assert captions(cats)["clips/a.mp4"] == "new a cat"
    (cats.folder / "clips/b.txt").write_text("by another program\n")
    undo.undo(cats)
    assert captions(cats) == {**before, "clips/b.mp4": "by another program"}
    assert not (cats.folder / "clips/c.txt").exists()
    with pytest.raises(VideotuneError, match="no change"):
        undo.undo(cats)
    names = [line["name"] for line in clip_history.caption_changes(cats, "a.mp4")]
    assert names == ["a.mp4"] * 4, "what happened to a clip, with its undoing"


def test_the_history_outlives_a_torn_line_and_follows_a_moved_clip(
    client: Any, cats: projects.Project
) -> None:
    captions_edit.change(cats, {"clips/a.mp4": "one"}, "edit")
    with (cats.folder / clip_history.HISTORY).open("a") as file:
        file.write('{"batch": "torn\n[1]\n')
    clip_moves.move(cats, ["clips/a.mp4"], "held-out")
    assert [line["before"] for line in clip_history.caption_changes(cats, "a.mp4")] == [
        "a cat"
    ]
    assert "a cat" in client.get(f"{DATA}/clip", params={"path": "held-out/a.mp4"}).text
    undo.undo(cats)
    assert (cats.folder / "held-out/a.txt").read_text() == "a cat\n"


CHANGES = (
    ({"how": "add", "word": "ohwx"}, {"clips/a.mp4": "ohwx, a cat"}),
    ({"how": "remove", "word": "OHWX"}, {"clips/b.mp4": "a dog"}),
    ({"how": "replace", "word": "A ", "to": r"the \1 "}, {"clips/a.mp4": r"the \1 cat", "clips/b.mp4": r"ohwx, the \1 dog"}),
    ({"how": "replace", "word": "A ", "to": "the ", "case": "1"}, {}),
    ({"how": "replace", "word": "a cat", "to": ""}, {}),
    ({"how": "replace", "word": "(", "to": "x"}, {}),
    ({"how": "add", "word": " "}, {}),
    ({"how": "add", "word": "x", "q": "DOG"}, {"clips/b.mp4": "x, ohwx, a dog"}),
    ({"how": "add", "word": "x", "state": "without"}, {}),
)  # fmt: skip


@pytest.mark.parametrize(("words", "changed"), CHANGES)
def test_captions_are_changed_together(
    client: Any, cats: projects.Project, words: dict[str, str], changed: dict[str, str]
) -> None:
    before = captions(cats)
    preview = client.get(f"{DATA}/captions", params={"all": "1", **words}).text
    assert f'data-count="{len(changed)}"' in preview
    assert captions(cats) == before
    assert (
        client.post(f"{DATA}/captions", data={"all": "1", **words}).status_code == 204
    )
    assert captions(cats) == before | changed


def test_the_preview_of_picked_clips_shows_each_of_them(
    client: Any, cats: projects.Project
) -> None:
    words = {"how": "add", "word": "ohwx", "path": ["clips/a.mp4", "clips/b.mp4"]}
    preview = client.get(f"{DATA}/captions", params=words).text
    before = captions(cats)
    client.post(f"{DATA}/captions", data=words)

    now = captions(cats)
    changed = [path for path in now if now[path] != before[path]]
    assert f'data-count="{len(changed)}"' in preview


def test_a_captioning_job_is_one_change(
    cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from videotune.queue import jobs

    folder = ended_job(cats, "caption", 0)
    monkeypatch.setattr(
        captions_edit, "start", lambda *words, **options: jobs.read_job(folder)
    )
    captions_edit.start_captioning(cats, ["caption"], {})
    (cats.folder / "clips/c.txt").write_text("by a model\n")
    captions_edit.finish_jobs(cats)
    captions_edit.finish_jobs(cats)
    assert [line["by"] for line in clip_history.caption_changes(cats)] == [
        "auto-caption"
    ]
    undo.undo(cats)
    assert not (cats.folder / "clips/c.txt").exists()


@pytest.mark.parametrize("lengths", [(24,), (12,), (12, 12)])
def test_a_film_without_a_cut_stays_where_it_is(
    client: Any, cats: projects.Project, lengths: tuple[int, ...]
) -> None:
    """A single scene that is shorter is what is left beside scenes that are too short."""
    write_clip(cats.folder / "clips/a.mp4", noise(24, 32, 32), 12)
    film = cats.folder / "scenes" / "a"
    for number, length in enumerate(lengths):
        write_clip(film / f"a-scene-{number}.mp4", noise(length, 32, 32), 12)
    ended_job(cats, "split", 0, about="clips/a.mp4")
    captions_edit.finish_jobs(cats)

    stays = lengths == (24,)
    assert (cats.folder / "clips/a.mp4").exists() == stays
    assert film.exists() == (not stays)
    assert ("a.mp4 has no cut" in client.get(DATA).text) == stays


def test_a_clip_is_held_out_used_again_and_removed_with_its_caption(
    cats: projects.Project,
) -> None:
    clip_moves.move(cats, ["clips/a.mp4"], "held-out")
    assert {
        "path": str(cats.folder / "held-out"),
        "kind": "validation",
    } in projects.datasets(cats)
    assert captions(cats)["held-out/a.mp4"] == "a cat"
    (cats.folder / "clips/a.mp4").write_bytes(MP4)
    with pytest.raises(VideotuneError, match="already"):
        clip_moves.move(cats, ["held-out/a.mp4"], "clips")
    with pytest.raises(VideotuneError, match="moved to"):
        clip_moves.move(cats, ["held-out/a.mp4"], "../..")
    clip_moves.move(cats, ["held-out/a.mp4", "clips/a.mp4"], "bin")
    assert [item.title for item in trash.list_items(cats.folder)] == ["2 clips"]
    trash.restore(cats.folder, trash.list_items(cats.folder)[0].id)
    assert captions(cats)["held-out/a.mp4"] == "a cat"


def account(project: projects.Project, code: int = 2, **clip: Any) -> None:
    """A check that has just ended, and what it says of a.mp4."""
    facts = {
        "path": str(project.folder / "clips/a.mp4"), "used": True, "held_out": False, "reason": None, "detail": None,
        "id": None, "source_fps": 24.0, "source_frames": 48, "source_seconds": 2.0, "width": 64,
        "height": 64, "shape": "17x64x64", "windows": 1, "seconds_cut": 0.0, "captions": ["a cat"],
        "warnings": [], "notes": [],
    }  # fmt: skip
    folder = ended_job(project, "check", code)
    write_json(
        folder / "job.json",
        {"kind": "check", "about": "", "words": [], "started": time.time() + 1},
    )
    write_json(folder / "out", {"clips": [facts | clip], "blockers": [], "notes": []})


def test_a_warning_is_what_a_person_should_act_on(cats: projects.Project) -> None:
    crop, cut = (
        "the crop keeps 62% of the picture: 256x160 becomes 64x64",
        "0.44 of 1.50 s are in no window",
    )
    account(
        cats,
        warnings=[crop, cut, "80% of it is frozen"],
        warning_codes=["cropped", "in_no_window", "frozen"],
    )
    row = clips.table(cats).rows["clips/a.mp4"]
    assert (row["warned"], row["notes"]) == (["80% of it is frozen"], [crop, cut])
    assert [row["path"] for row in clips.select(cats, {"state": "warned"})] == [
        "clips/a.mp4"
    ]
    account(cats, source_seconds=61.0)
    assert clips.table(cats).rows["clips/a.mp4"]["long"]


def test_what_changed_since_the_check_is_not_called_used(
    cats: projects.Project,
) -> None:
    account(cats)
    assert clips.table(cats).rows["clips/a.mp4"]["state"] == "used"
    assert not clips.start_check(cats), "nothing has changed"
    later = time.time() + 5
    os.utime(cats.folder / "clips/a.txt", (later, later))
    os.utime(cats.folder / "clips")
    assert clips.table(cats).rows["clips/a.mp4"]["state"] == "new"
    assert clips.start_check(cats), "a check is due, and waits until nothing changes"


def test_only_the_failed_check_is_called_failed(
    client: Any, cats: projects.Project
) -> None:
    account(cats, code=1)
    assert "notice bad" not in client.get(DATA).text


def test_other_folders_are_for_who_sits_at_the_computer(
    client: Any, cats: projects.Project, tmp_path: Path
) -> None:
    away = tmp_path.parent / f"{tmp_path.name}-away"
    away.mkdir()
    (away / "file.txt").write_text("x")

    def add(path: Any, **words: str) -> int:
        return int(
            client.post(f"{DATA}/source", data={"path": str(path), **words}).status_code
        )

    for path in (away / "no", away / "file.txt", "", "a b", "x"):
        assert add(path) == 422
    assert add(away) == add("user/clips", kind="validation") == 204
    sources = projects.find_project(tmp_path, "my-cats").facts["sources"]
    assert sources == [
        {"path": str(away)},
        {"path": "user/clips", "kind": "validation"},
    ]
    assert add(away, drop="1") == 204
    client.app.state.local = False
    assert add(away) == 422
    assert (
        client.post(f"{DATA}/auto-caption", data={"model": str(away)}).status_code
        == 422
    )


OUTSIDE = (
    "../../secret.mp4",
    "/etc/passwd",
    "clips/../../secret.mp4",
    "project.json",
    "jobs/x.mp4",
    ".studio/x.mp4",
    "",
    "clips",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_route_leads_out_of_the_project(
    client: Any, cats: projects.Project, path: str
) -> None:
    (cats.folder.parent / "secret.mp4").write_bytes(MP4)
    for route in ("/p/my-cats/poster", f"{DATA}/sound"):
        assert client.get(route, params={"path": path}).status_code == 404
    assert client.get(
        f"{DATA}/clip", params={"path": path}, headers={"accept": "text/plain"}
    ).status_code in (404, 422)
    for route, words in (
        ("caption", {"text": "x"}),
        ("move", {"to": "bin"}),
        ("cut", {}),
    ):
        assert (
            client.post(f"{DATA}/{route}", data={"path": path, **words}).status_code
            == 422
        )
    for film in (path, "x"):
        words = {"film": film, "name": path, "keep": "1"}
        client.post(f"{DATA}/scene", data=words)
    assert sorted(one.name for one in (cats.folder / "clips").iterdir()) == [
        "a.mp4",
        "a.txt",
        "b.mp4",
        "b.txt",
        "c.mp4",
    ]
    assert (cats.folder.parent / "secret.mp4").is_file()


def test_names_and_captions_are_escaped(client: Any, cats: projects.Project) -> None:
    evil = "<img src=x onerror=alert(1)>'\""
    (cats.folder / "clips/a.txt").write_text(evil + "\n")
    (cats.folder / "clips/<b>'x.mp4").write_bytes(MP4 + b"x")
    film = cats.folder / "scenes/<i>"
    film.mkdir(parents=True)
    (film / "<i>.mp4").write_bytes(MP4)
    pages = [
        client.get(DATA).text,
        client.get(f"{DATA}/clip", params={"path": "clips/a.mp4"}).text,
    ]
    pages.append(
        client.get(
            f"{DATA}/captions", params={"all": "1", "how": "add", "word": "<u>"}
        ).text
    )
    for text in pages:
        assert "<img src=x" not in text
        assert "<b>'x" not in text
        assert "<i>.mp4" not in text
        assert "<u>" not in text


def test_a_picture_is_made_once_and_damage_is_none(
    tmp_path: Path, client: Any, cats: projects.Project
) -> None:
    black = np.zeros((48, 64, 96, 3), np.uint8)
    black[20:, :, :48] = 200
    write_clip(cats.folder / "clips/tall.mp4", black, 24, rotation=90)
    answer = client.get("/p/my-cats/poster", params={"path": "clips/tall.mp4"})
    assert answer.headers["content-type"] == "image/jpeg"
    posters = list((cats.folder / ".studio/posters").glob("*.jpg"))
    with Image.open(posters[0]) as picture:
        assert picture.size == (64, 96), "upright"
        assert np.asarray(picture).max() > 150, "of the middle, after the black"
    changed = posters[0].stat().st_mtime_ns
    assert (
        client.get("/p/my-cats/poster", params={"path": "clips/tall.mp4"}).status_code
        == 200
    )
    assert posters[0].stat().st_mtime_ns == changed
    answer = client.get("/p/my-cats/poster", params={"path": "clips/a.mp4"})
    assert answer.headers["content-type"] == "image/svg+xml", "no picture, no error"
    Image.new("RGBA", (900, 300), (9, 9, 9, 99)).save(cats.folder / "clips/wide.png")
    path = media.poster(cats.folder / "clips/wide.png", tmp_path / "cache")
    assert path is not None
    with Image.open(path) as picture:
        assert picture.size == (320, 107)


@pytest.mark.parametrize("aspect", [(20_000, 1), (2_000_000_000, 1), (1, 20_000)])
def test_a_poster_is_small_whatever_pixels_a_file_claims(
    aspect: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "a.mp4"
    write_clip(path, np.zeros((12, 48, 64, 3), np.uint8), 12, aspect=Fraction(3, 2))
    content = bytearray(path.read_bytes())
    position = content.index(b"pasp") + 4
    content[position : position + 8] = struct.pack(">II", *aspect)
    path.write_bytes(content)

    tracemalloc.start()
    poster = media.poster(path, tmp_path / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert poster is not None
    with Image.open(poster) as picture:
        assert max(picture.size) <= media.POSTER_SIZE


def test_sound_that_is_longer_than_its_file_claims_has_no_peaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        for start in range(0, 80_000, 8000):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 8000), np.int16), format="s16", layout="mono"
            )
            frame.sample_rate, frame.pts = 8000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    position = content.index(b"\x44\x89\x88") + 3
    content[position : position + 8] = struct.pack(">d", 1000.0)  # of ten seconds
    path.write_bytes(content)

    assert len(media.peaks(path, tmp_path / "whole")) == media.MAX_PEAKS
    monkeypatch.setattr(media, "MAX_SOUND_SECONDS", 5.0)
    assert media.peaks(path, tmp_path / "cut") == []


def test_sound_becomes_peaks(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "loud.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        wave = np.sin(np.arange(32768) / 6) * np.repeat([1000, 20000], 16384)
        wave = wave.astype(np.int16)
        for start in range(0, 32768, 1024):
            frame = av.AudioFrame.from_ndarray(
                wave[None, start : start + 1024], format="s16", layout="mono"
            )
            frame.sample_rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    peaks = media.peaks(tmp_path / "loud.mp4", tmp_path)
    assert len(peaks) == media.MAX_PEAKS
    assert max(peaks[50:250]) < 0.1 < 0.5 < max(peaks[350:])
    write_clip(tmp_path / "silent.mp4", np.zeros((12, 32, 32, 3), np.uint8), 12)
    assert media.peaks(tmp_path / "silent.mp4", tmp_path) == []
    (tmp_path / "broken.mp4").write_bytes(MP4)
    assert media.peaks(tmp_path / "broken.mp4", tmp_path) == []


def test_folders_of_an_upload_are_kept_and_a_zip_counts_its_files(
    client: Any, cats: projects.Project
) -> None:
    import io
    import zipfile

    def send(name: str, content: bytes = MP4 + b"new") -> Any:
        return client.post(
            f"{DATA}/upload", params={"name": name}, content=content
        ).json()

    assert send("../Set/./one/x.mp4")[0]["taken"]
    assert (cats.folder / "clips/Set/one/x.mp4").is_file()
    assert send("Set/metadata.csv", b"file_name,text\none/x.mp4,a lynx\n")[0]["taken"]
    assert captions(cats)["clips/Set/one/x.mp4"] == "a lynx"
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        archive.writestr("y.mp4", MP4 + b"y")
        archive.writestr("y.txt", "a lion")
    assert send("pets.zip", memory.getvalue())[0]["files"] == 2
    assert captions(cats)["clips/pets/y.mp4"] == "a lion"


def test_tiles_come_in_chunks(client: Any, cats: projects.Project) -> None:
    for number in range(130):
        (cats.folder / f"clips/n{number:03d}.mp4").write_bytes(MP4 + bytes([number]))
    first = client.get(DATA).text
    assert first.count("<article") == 60
    assert "first=60" in first
    last = client.get(f"{DATA}/tiles", params={"first": 120}).text
    assert last.count("<article") == 13
    assert "revealed" not in last
    assert client.get(f"{DATA}/tiles", params={"q": "N01"}).text.count("<article") == 10


def test_leaving_out_agrees_to_skipped_clips(
    client: Any, cats: projects.Project
) -> None:
    projects.save_draft(cats, {"steps": 3})
    assert client.post(f"{DATA}/leave-out").status_code == 204
    project = projects.find_project(cats.folder.parent, "my-cats")
    assert projects.draft(project) == {"steps": 3, "missing_caption": "skip"}
    assert projects.skip_arguments(project) == ["--allow-skips", "all"]


def test_a_browser_keeps_a_picture_only_under_the_version_of_its_file(
    client: Any, cats: projects.Project
) -> None:
    """A run that trains on from an earlier step writes its previews anew."""
    address = "/p/my-cats/poster"
    clip = cats.folder / "clips/a.mp4"
    write_clip(clip, np.zeros((4, 32, 32, 3), np.uint8), 8)
    dark = client.get(address, params={"path": "clips/a.mp4"})
    assert dark.headers["Cache-Control"] == "private, no-cache"
    versioned = client.get(address, params={"path": "clips/a.mp4", "v": "1"})
    assert versioned.headers["Cache-Control"] == "private, max-age=86400"

    write_clip(clip, np.full((4, 32, 32, 3), 200, np.uint8), 8)
    bright = client.get(address, params={"path": "clips/a.mp4"})
    assert bright.content != dark.content


def test_leaving_out_is_taken_back(client: Any, cats: projects.Project) -> None:
    projects.save_draft(cats, {"steps": 3})
    client.post(f"{DATA}/leave-out")
    assert "Ask for their captions again" in client.get(DATA).text
    assert client.post(f"{DATA}/leave-out", data={"back": "1"}).status_code == 204
    project = projects.find_project(cats.folder.parent, "my-cats")
    assert projects.draft(project) == {"steps": 3}
    assert projects.skip_arguments(project) == []
    assert "Ask for their captions again" not in client.get(DATA).text


def test_stop_ends_only_jobs_of_this_page(client: Any, cats: projects.Project) -> None:
    for kind in ("train", "check", "../x"):
        assert client.post(f"{DATA}/stop", params={"kind": kind}).status_code == 422
    assert json.loads(client.post(f"{DATA}/undo").headers["HX-Trigger"])["toast"]["bad"]


def test_a_mask_is_shown_over_its_clip_and_is_no_clip(
    client: Any, cats: projects.Project
) -> None:
    masks = cats.folder / "clips" / "masks"
    masks.mkdir()
    Image.new("RGB", (32, 32), "white").save(masks / "a.png")
    rows = clips.table(cats).rows
    assert set(rows) == {"clips/a.mp4", "clips/b.mp4", "clips/c.mp4"}
    assert rows["clips/a.mp4"]["mask_picture"] == "clips/masks/a.png"
    assert rows["clips/b.mp4"]["mask_picture"] == ""

    page = client.get(f"{DATA}/tiles").text
    assert page.count('class="clip-mask"') == 1
    assert client.get("/p/my-cats/poster?path=clips/masks/a.png").status_code == 200


def test_the_files_of_a_clip_are_shown_beside_it_and_move_with_it(
    client: Any, cats: projects.Project
) -> None:
    folder = cats.folder / "clips"
    (folder / "references").mkdir()
    (folder / "controls").mkdir()
    (folder / "references" / "a.mp4").write_bytes(MP4)
    (cats.folder.parent / "secret.mp4").write_bytes(MP4)
    (folder / "controls" / "a.mp4").symlink_to(cats.folder.parent / "secret.mp4")
    companions = clips.table(cats).rows["clips/a.mp4"]["companions"]
    assert [(one.label, one.path, one.is_still) for one in companions] == [
        ("reference", "clips/references/a.mp4", False),
        ("control clip", "", False),
    ]

    # The pages ask for files inside of the project only, by the routes of media.
    query = {"path": "clips/a.mp4"}
    pages = (
        client.get(f"{DATA}/tiles").text,
        client.get(f"{DATA}/clip", params=query).text,
    )
    for page in pages:
        assert "poster?path=clips%2Freferences%2Fa.mp4&" in page
        assert "controls%2Fa.mp4" not in page
    assert "/file?path=clips%2Freferences%2Fa.mp4" in pages[1]
    for route in ("file", "poster"):
        params = {"path": "clips/controls/a.mp4"}
        assert client.get(f"/p/my-cats/{route}", params=params).status_code == 404

    (folder / "controls" / "a.mp4").unlink()
    client.post(f"{DATA}/move", data={"path": "clips/a.mp4", "to": "held-out"})
    assert (cats.folder / "held-out" / "references" / "a.mp4").is_file()
    companions = clips.table(cats).rows["held-out/a.mp4"]["companions"]
    assert [one.path for one in companions] == ["held-out/references/a.mp4"]


def test_a_file_that_a_row_names_and_that_is_missing_has_no_picture(
    client: Any, cats: projects.Project
) -> None:
    row = {"file_name": "a.mp4", "text": "a cat", "reference": "gone.mp4"}
    metadata = cats.folder / "clips" / "metadata.jsonl"
    metadata.write_text(json.dumps(row))
    (companion,) = clips.table(cats).rows["clips/a.mp4"]["companions"]
    assert (companion.name, companion.path) == ("gone.mp4", "")
    page = client.get(f"{DATA}/clip", params={"path": "clips/a.mp4"}).text
    assert "gone.mp4" in page
    assert "poster?path=&" not in page

    # A row that only names files leaves the caption to its text file, which can be changed.
    rows = clips.table(cats).rows
    assert rows["clips/a.mp4"]["caption_fixed"]
    metadata.unlink()
    (metadata.parent / "metadata.csv").write_text(
        "file_name,reference\na.mp4,gone.mp4\n"
    )
    answer = client.post(
        f"{DATA}/caption",
        data={"path": "clips/a.mp4", "was": "a cat", "text": "another cat"},
    )
    assert answer.status_code in (200, 204)
    assert (cats.folder / "clips" / "a.txt").read_text() == "another cat\n"
    assert (
        client.post(
            f"{DATA}/move", data={"path": "clips/a.mp4", "to": "bin"}
        ).status_code
        == 422
    )
