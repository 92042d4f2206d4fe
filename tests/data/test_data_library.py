"""Folders become a Library: every file accounted for, the split, captions, the index."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clips import noise, write_clip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from videotune.data.account import to_json, totals
from videotune.data.decode import decode
from videotune.data.library import Library, LibrarySettings, Source, buckets, scan
from videotune.data.windows import WindowSettings, take
from videotune.errors import VideotuneError
from videotune.types import PLAIN, ClipShape, VideoRules

RULES = VideoRules(4, 1, 16, 16.0, 8, 4)
SETTINGS = LibrarySettings(WindowSettings(), 64, missing_caption="skip")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files by kind: eight good ones, one too short for any window, and junk."""
    folder = tmp_path_factory.mktemp("made")
    for i in range(8):
        write_clip(folder / f"good{i}.mp4", noise(30 + 3 * i, seed=i))
    write_clip(folder / "tiny.mp4", noise(5, seed=99))
    write_clip(folder / "one.mp4", noise(1))
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("hello " * 100)
    whole = (folder / "good0.mp4").read_bytes()
    (folder / "headless.mp4").write_bytes(whole[: len(whole) // 2])
    return folder


def dataset(
    made: Path, folder: Path, files: dict[str, str], captions: dict[str, bytes | None] | None = None
) -> list[Source]:
    """Copy {name: kind} into the guide's layout, with a caption each unless ``captions`` says otherwise."""
    for name, kind in files.items():
        target = folder / "videos" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / f"{kind}.mp4", target)
        caption = (captions or {}).get(name, f"a clip of {kind}".encode())
        if caption is not None:
            place = (folder / "captions" / name).with_suffix(".txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(caption)
    return [Source(str(folder))]


def reasons(library: Library) -> dict[str, str]:
    return {Path(path).name: reason for path, reason, _ in library.skipped}


def test_clips_windows_and_accounts(made: Path, tmp_path: Path) -> None:
    library = scan(dataset(made, tmp_path, {"b.mp4": "good7", "a.mp4": "good0"}), RULES, SETTINGS)
    assert [Path(clip.path).name for clip in library.clips] == ["a.mp4", "b.mp4"]
    assert [clip.captions for clip in library.clips] == [("a clip of good0",), ("a clip of good7",)]
    # good0: 30 frames at 24 are 20 at 16, one window; good7: 51 are 34, two windows
    assert [w.clip_id for w in library.windows] == [library.clips[0].id] + [library.clips[1].id] * 2
    assert [(w.start, w.end) for w in library.windows][1:] == [(0.0, 17 / 16), (17 / 16, 34 / 16)]
    assert {w.shape for w in library.windows} == {ClipShape(17, 48, 80, 16.0)}
    account = library.accounts[1]
    assert (account.used, account.held_out, account.windows, account.frames) == (True, False, 2, 34)
    assert (account.source_frames, account.width, account.height, account.shape) == (51, 96, 64, "17x48x80")
    assert totals(library) == {"found": 2, "used": 2, "held_out": 0, "skipped": 0}
    for window in library.windows:
        shape = window.shape
        frames = decode(library.facts[window.clip_id], take(window, PLAIN, 0).times, shape.height, shape.width)
        assert frames.shape == (shape.frames, shape.height, shape.width, 3)


def test_every_reason(made: Path, tmp_path: Path) -> None:
    kinds = ["good0", "tiny", "one", "empty", "text", "headless"]
    files = {f"{kind}.mp4": kind for kind in kinds} | {
        "good0_again.mp4": "good0",
        "good1.mp4": "good1",
        "good2.mp4": "good2",
    }
    files["good3.mp4"] = "good3"
    captions = {"good1.mp4": None, "good2.mp4": b"\n", "good3.mp4": b"\xff\xfe"}
    library = scan(dataset(made, tmp_path, files, captions), RULES, SETTINGS)
    assert reasons(library) == {
        "tiny.mp4": "too_short",
        "one.mp4": "one_frame",
        "empty.mp4": "empty",
        "text.mp4": "not_a_video",
        "headless.mp4": "unreadable",
        "good0_again.mp4": "duplicate",
        "good1.mp4": "missing_caption",
        "good2.mp4": "empty_caption",
        "good3.mp4": "undecodable_caption",
    }
    details = {Path(path).name: detail for path, _, detail in library.skipped}
    assert details["good0_again.mp4"].endswith("good0.mp4")
    assert details["tiny.mp4"] == "has 3 frames at 16 fps; the smallest window is 5"
    assert totals(library) == {"found": 10, "used": 1, "held_out": 0, "skipped": 9}


KINDS = ["good0", "good1", "good2", "good3", "tiny", "one", "empty", "text", "headless"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([b"a cat", None, b"", b"\xff"])), min_size=1, max_size=9)
)
def test_found_is_used_plus_held_out_plus_skipped(
    made: Path, tmp_path_factory: pytest.TempPathFactory, mixture: list[tuple[str, bytes | None]]
) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    files = {f"{i:02d}x.mp4": kind for i, (kind, _) in enumerate(mixture)}
    captions = {name: caption for name, (_, caption) in zip(files, mixture, strict=True)}
    library = scan(dataset(made, folder, files, captions), RULES, SETTINGS)
    count = totals(library)
    assert count["found"] == len(mixture) == count["used"] + count["held_out"] + count["skipped"]
    assert count["used"] == len({kind for kind, caption in mixture if kind.startswith("good") and caption == b"a cat"})
    assert len({clip.id for clip in library.clips}) == len(library.clips)
    assert {w.clip_id for w in library.windows} <= {clip.id for clip in library.clips}
    assert json.loads(json.dumps(to_json(library)))["found"] == len(mixture)


def test_a_missing_caption_is_an_error_that_lists_the_clips(made: Path, tmp_path: Path) -> None:
    files = {f"n{i}.mp4": f"good{i}" for i in range(4)}
    sources = dataset(made, tmp_path, files, {"n0.mp4": None, "n1.mp4": b"", "n2.mp4": b"\xff"})
    with pytest.raises(VideotuneError) as caught:
        scan(sources, RULES, replace(SETTINGS, missing_caption="error"))
    text = str(caught.value)
    assert "3 clips have no usable caption" in text
    assert all(name in text for name in ("n0.mp4", "n1.mp4", "n2.mp4", '"skip"', '"empty"', "UTF-8"))
    assert "n3.mp4" not in text
    with pytest.raises(VideotuneError, match="1 clip has no usable caption"):  # what cannot be read is not empty
        scan(sources, RULES, replace(SETTINGS, missing_caption="empty"))
    (tmp_path / "captions" / "n2.txt").write_text("a cat\na dog")
    library = scan(sources, RULES, replace(SETTINGS, missing_caption="empty"))
    assert [clip.captions for clip in library.clips] == [("",), ("",), ("a cat", "a dog"), ("a clip of good3",)]


def test_the_trigger_of_each_source(made: Path, tmp_path: Path) -> None:
    one = dataset(made, tmp_path / "one", {"a.mp4": "good0"}, {"a.mp4": b"a cat\nzorble runs"})
    two = dataset(made, tmp_path / "two", {"a.mp4": "good1"})
    library = scan([replace(one[0], trigger="zorble"), *two], RULES, SETTINGS)
    assert library.clips[0].captions == ("zorble, a cat", "zorble runs")
    assert library.clips[1].captions == ("a clip of good1",)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 source videos, four of which are cut in two."""
    folder = tmp_path_factory.mktemp("many")
    names = [f"v{i}" for i in range(20)] + [f"w{i}_part{k}" for i in range(4) for k in (1, 2)]
    for seed, name in enumerate(names):
        write_clip(folder / f"{name}.mp4", noise(20, 32, 32, seed=seed))
        (folder / f"{name}.txt").write_text("a clip")
    return folder


def test_held_out_by_source(many: Path) -> None:
    library = scan([Source(str(many))], RULES, replace(SETTINGS, validation_fraction=0.25))
    held = {clip.source for clip in library.clips if clip.held_out}
    assert len(held) == 6
    assert not held & {clip.source for clip in library.clips if not clip.held_out}
    ids = {clip.id for clip in library.clips if clip.held_out}
    assert {w.clip_id for w in library.held_out_windows} == ids
    assert not {w.clip_id for w in library.windows} & ids
    count = totals(library)
    assert (count["found"], count["skipped"]) == (28, 0)
    assert count["held_out"] == len(ids) == sum(a.held_out for a in library.accounts)
    assert not library.notes or not any("validation" in note for note in library.notes)


def test_the_split_depends_on_the_seed_and_on_names_alone(many: Path, tmp_path: Path) -> None:
    def held(folder: Path, **changes: Any) -> set[str]:
        library = scan([Source(str(folder))], RULES, replace(SETTINGS, **changes))
        return {Path(c.path).stem for c in library.clips if c.held_out}

    first = held(many, seed=1)
    assert len({s.split("_")[0] for s in first}) == 2  # at least two, though a tenth of 24 rounds to two as well
    assert held(many, seed=1) == first
    assert any(held(many, seed=s) != first for s in (2, 3))
    assert len({s.split("_")[0] for s in held(many, validation_fraction=0.01)}) == 2
    assert held(many, validation_fraction=0.0) == set()
    copy = tmp_path / many.name  # the same folder elsewhere, with a clip that is skipped
    shutil.copytree(many, copy)
    (copy / "a_broken.mp4").touch()
    assert held(copy, seed=1) == first


def test_too_few_sources_hold_nothing_out_and_say_so(many: Path, made: Path, tmp_path: Path) -> None:
    library = scan(dataset(made, tmp_path, {f"a_part{i}.mp4": f"good{i}" for i in range(3)}), RULES, SETTINGS)
    assert not library.held_out_windows
    note = next(note for note in library.notes if "validation" in note)
    assert note.startswith("no validation: 1 source video, 20 are needed (3 clips")


def test_notes_on_frames_and_rate(made: Path, tmp_path: Path) -> None:
    sources = dataset(made, tmp_path, {"a.mp4": "good0"})
    notes = scan(sources, RULES, replace(SETTINGS, windows=WindowSettings(target_fps=24))).notes
    assert not any("becomes" in note for note in notes), "nobody asked for 16"
    assert "0.67x as fast as filmed" in notes[0]
    asked = scan(sources, RULES, replace(SETTINGS, windows=WindowSettings(max_frames=20))).notes
    assert "max_frames 20 becomes 21: this model takes 4n+1 frames" in asked
    assert scan(sources, RULES, replace(SETTINGS, windows=WindowSettings(frames=17), validation_fraction=0)).notes == ()


def test_buckets_come_dearest_first(made: Path, tmp_path: Path) -> None:
    sources = dataset(made, tmp_path, {"a.mp4": "tiny", "b.mp4": "good0", "c.mp4": "good7", "d.mp4": "good3"})
    library = scan(sources, RULES, replace(SETTINGS, windows=WindowSettings(frames=33, min_frames=1)))
    found = buckets(library)
    assert [shape.frames for shape in found] == [33, 25, 17, 1]
    assert [w for windows in found.values() for w in windows] != list(library.windows)
    assert sorted(w.id for ws in found.values() for w in ws) == sorted(w.id for w in library.windows)
    assert [row["shape"] for row in to_json(library)["buckets"]] == [str(shape) for shape in found]


def test_wrong_settings(made: Path, tmp_path: Path) -> None:
    sources = dataset(made, tmp_path, {"a.mp4": "good0"})
    for changes, words in [
        ({"missing_caption": "ignore"}, "missing_caption"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"resolution": "100x100"}, "multiples of 16"),
        ({"windows": WindowSettings(frames=20, strict_frames=True)}, "17 or 21"),
    ]:
        with pytest.raises(VideotuneError, match=words):
            scan(sources, RULES, replace(SETTINGS, **changes))
    with pytest.raises(VideotuneError, match="No dataset"):
        scan([], RULES, SETTINGS)


def test_progress_counts_every_file(made: Path, tmp_path: Path) -> None:
    calls = []
    sources = dataset(made, tmp_path, {"a.mp4": "good0", "b.mp4": "empty"})
    scan(sources, RULES, SETTINGS, None, lambda done, total, name: calls.append((done, total, Path(name).name)))
    assert calls[:3] == [(0, 2, "a.mp4"), (1, 2, "b.mp4"), (2, 2, "")]
    assert calls[3:] == [(0, 1, "a.mp4"), (1, 1, "")], "then the pictures of those that can be opened"


def test_importing_the_room_imports_neither_torch_nor_pyav() -> None:
    names = ["account", "buckets", "captions", "decode", "facts", "index", "library", "probe", "windows"]
    imports = "; ".join(f"import videotune.data.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit(bool({{'torch', 'av'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_look_that_the_index_has_lost_is_asked_again(made: Path, tmp_path: Path) -> None:
    sources, index = dataset(made, tmp_path / "set", {"a.mp4": "good0"}), tmp_path / "index.json"
    good = scan(sources, RULES, SETTINGS, index)
    value = json.loads(index.read_text())
    for content in value["contents"].values():
        content["look"]["answer"] = {"until": 10.0}
    index.write_text(json.dumps(value))
    assert scan(sources, RULES, SETTINGS, index) == good


def test_folders_that_begin_with_a_number_repeat_their_clips(tmp_path: Path) -> None:
    wanted = {"10_ohwx horse/a": 20, "1_b/b": 2, "2024_holiday/c": 2, "02_intro/d": 2, "plain/e": 2, "10_x/2_y/g": 20}
    wanted["f"] = 2
    root = tmp_path / "set"
    for i, name in enumerate(wanted):
        write_clip(root / f"{name}.mp4", noise(17, seed=i), 16).with_suffix(".txt").write_text("a")
    library = scan([Source(str(root), repeats=2)], RULES, SETTINGS)
    found = {Path(clip.path).relative_to(root).with_suffix("").as_posix(): clip.repeats for clip in library.clips}
    assert found == wanted
    assert any("10_ohwx horse 10" in note and "2024" not in note for note in library.notes)
    alone = scan([Source(str(root / "10_x" / "2_y"))], RULES, SETTINGS)
    assert [clip.repeats for clip in alone.clips] == [2]
    held = scan([Source(str(root / "10_x"), kind="validation"), Source(str(root / "1_b"))], RULES, SETTINGS)
    assert {clip.repeats for clip in held.clips} == {1}
