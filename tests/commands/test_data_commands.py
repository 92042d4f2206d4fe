"""What is done with clips by the command line: check, cache and its maintenance,
dataset split.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.clips import noise, numbered, read_numbers, write_clip, write_image
from tests.support.command_line import (
    Bases,
    Patch,
    Printed,
    cache,
    check,
    list_cache,
    prune_cache,
    verify_cache,
)
from tests.support.command_line import run as shell
from tests.support.landscapes import shots
from videotune.commands.cache_folder import cache_at
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.job.overrides import Overrides
from videotune.latent_cache.store import LatentCache
from videotune.models.registry import find

SETS = ("resolution=64x96", "video_config.frames=9")


@pytest.fixture
def settings(data: Path, tiny_bases: Bases) -> Overrides:
    return Overrides(
        data=str(data), sets=(f"base_model_name={tiny_bases('wan')}", *SETS)
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, frames in (
        ("a", numbered(40)),
        ("b", noise(20, seed=2)),
        ("short", noise(3, seed=3)),
    ):
        write_clip(tmp_path / "data" / f"{name}.mp4", frames, 16).with_suffix(
            ".txt"
        ).write_text(f"the clip {name}")
    return tmp_path / "data"


def test_the_row_of_a_clip(
    settings: Overrides, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert check(settings, verbose=True) == 2
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "a.mp4" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:8] == [
        "a.mp4",
        "used, but look at it",  # its pictures change as at a cut
        "40 @ 16 = 2.50 s",
        "96x64",
        "40",
        "96x64, 9 frames",
        "4",
        "36 (4 cut)",
    ]
    assert (
        "found 3 = used 2 + kept aside 0 + skipped 1;  6 windows in 1 bucket\n" in out
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert check(settings, allow_skips="1", verbose=True) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert "short.mp4: too short: has 3 frames at 16 fps" in narrow


def test_captions_are_counted_in_tokens_and_cut_ones_reported(
    data: Path, settings: Overrides, tiny_bases: Bases, tmp_path: Path,
    tiny_family: Callable[..., Any], capsys: Printed,
) -> None:  # fmt: skip
    """As the pipeline counts them; without a fast tokenizer they are not counted."""
    captions = [
        "a cat",
        "  two   spaces &amp; an entity &lt;3 ",
        "ﬁne “quotes” …",
        "",
        "word " * 300,
    ]
    lengths = find("wan").token_lengths(tiny_bases("wan"), captions)
    assert lengths == [tiny_family("wan").text_length(caption) for caption in captions]
    (data / "a.txt").write_text(captions[-1])
    check(settings, as_json=True)
    rows = {
        Path(row["path"]).stem: row
        for row in json.loads(capsys.readouterr().out)["clips"]
    }
    assert (
        f"a caption has {lengths[-1]} tokens; the model reads 512, the rest is cut"
        in rows["a"]["warnings"]
    )
    assert not any("tokens" in warning for warning in rows["b"]["warnings"])
    base = shutil.copytree(tiny_bases("wan"), tmp_path / "base")
    (base / "tokenizer" / "tokenizer.json").unlink()
    own = replace(settings, sets=(f"base_model_name={base}", *SETS))
    for without in (own, Overrides(family="wan", data=str(data))):
        check(without, verbose=True)
        assert "captions were not counted in tokens" in capsys.readouterr().out


def test_the_contact_sheet_shows_what_is_trained(
    settings: Overrides, tmp_path: Path
) -> None:
    """The clip's frames carry their numbers: windows of 9 begin at 0, 9, 18 and 27."""
    sheet = tmp_path / "sheet"
    assert check(settings, contact_sheet=sheet, allow_skips="all") == 0
    pictures = sorted((sheet / "clips").glob("[!s]*.jpg"))
    assert len(pictures) == 6
    page = (sheet / "index.html").read_text(encoding="utf-8")
    assert all(f"clips/{path.name}" in page for path in pictures)
    assert "skipped: too short" in page
    read: dict[str, dict[str, np.ndarray]] = {}
    for path in pictures:
        read.setdefault(path.name.rsplit("-", 1)[0], {})[
            path.stem.rsplit("-", 1)[1]
        ] = np.asarray(Image.open(path))
    numbers = [
        [read_numbers(shots[k][None])[0] for k in ("first", "middle", "last")]
        for shots in read.values()
    ]
    assert [0, 22, 35] in numbers
    with Image.open(sheet / "sheet-001.jpg") as image:
        assert image.height > 2 * 160


def test_the_contact_sheet_shows_clips_without_captions_too(
    data: Path,
    settings: Overrides,
    tmp_path: Path,
    capsys: Printed,
) -> None:
    sheet = tmp_path / "sheet"
    sheet.mkdir()
    (sheet / "sheet-007.jpg").write_bytes(b"of an earlier time")
    for caption in data.glob("*.txt"):
        caption.unlink()
    (data / "broken.mp4").write_bytes(b"no video")
    assert check(settings, contact_sheet=sheet) == FAILED

    page = (sheet / "index.html").read_text(encoding="utf-8")
    sources = re.findall(r'<img src="(.*?)"', page)
    clips = [path for path in data.iterdir() if path.suffix in (".mp4", ".png")]
    assert len(clips) > 2
    assert sum(source.endswith("-first.jpg") for source in sources) == len(clips) - 1
    assert all((sheet / source).is_file() for source in sources)
    printed = capsys.readouterr().err.replace("\n", "")
    assert re.findall(r"[\w-]+\.(?:html|jpg)", printed.partition("pictures: ")[2]) == [
        "index.html",
        "sheet-001.jpg",
    ]
    assert [path.name for path in sheet.glob("sheet-*")] == ["sheet-001.jpg"]


def test_the_contact_sheet_shows_what_belongs_to_a_clip(
    data: Path, settings: Overrides, tmp_path: Path
) -> None:
    """The reference's frames carry their numbers: it is shown at the clip's times."""
    write_clip(data / "references" / "a.mp4", numbered(40), 16)
    write_image(data / "references" / "b.png", noise(1, 64, 64, seed=5)[0])
    write_image(data / "masks" / "a.png", np.full((64, 96, 3), 255, np.uint8))
    conditions = '[{"type": "reference"}, {"type": "mask"}]'
    sets = (*settings.sets, f"conditions={conditions}", "loss_mask.outside=0.5")
    sheet = tmp_path / "sheet"
    config = replace(settings, sets=sets)
    assert check(config, contact_sheet=sheet, allow_skips="all") == 0

    page = (sheet / "index.html").read_text(encoding="utf-8")
    blocks = re.findall(
        r'<div class="companion">(.*?)</div><div class="shots">(.*?)</div>', page, re.S
    )
    pictures = {label: re.findall(r'src="(.*?)"', html) for label, html in blocks}
    assert {label: len(paths) for label, paths in pictures.items()} == {
        "loss mask and mask: masks/a.png": 1,
        "reference: references/a.mp4": 3,
        "reference: references/b.png": 1,
    }
    shown = []
    for path in pictures["reference: references/a.mp4"]:
        picture = np.asarray(Image.open(sheet / path))
        shown.append(read_numbers(picture[None])[0])
    assert shown == [0, 22, 35]
    with Image.open(sheet / "sheet-001.jpg") as image:
        assert image.height > 5 * 160


def test_a_contact_sheet_among_the_clips_is_refused(
    data: Path, settings: Overrides, tmp_path: Path
) -> None:
    """Its pictures would be clips of the next run; hidden folders, as the cache is, are
    never read.
    """
    (tmp_path / "link").symlink_to(data, target_is_directory=True)
    for folder in (data, data / "sheet", tmp_path / "link" / "deep" / "sheet"):
        with pytest.raises(
            VideotuneError, match=r"inside the dataset .*become clips.*data-sheet"
        ):
            check(settings, contact_sheet=folder)
    assert not list(data.rglob("*.jpg"))
    cached = data / ".videotune-cache" / "sheet"
    assert check(settings, contact_sheet=cached, allow_skips="all") == 0
    assert (cached / "index.html").is_file()


def test_a_contact_sheet_shows_a_still_once_and_names_regularization(
    data: Path, settings: Overrides, tmp_path: Path
) -> None:
    keep, config, sheet = (
        tmp_path / "keep",
        tmp_path / "config.json",
        tmp_path / "sheet",
    )
    write_image(keep / "one.png", noise(1, 128, 192, seed=9)[0])
    (keep / "one.txt").write_text("a still\nthe same, otherwise\nonce more")
    config.write_text(
        json.dumps(
            {
                "datasets": [
                    {"path": str(data)},
                    {"path": str(keep), "kind": "regularization"},
                ]
            }
        )
    )
    assert (
        check(
            Overrides(config=config, sets=settings.sets),
            contact_sheet=sheet,
            allow_skips="all",
        )
        == 0
    )
    trained = (sheet / "clips").glob("[!s]*.jpg")
    pictures = [path.name.rsplit("-", 1)[1] for path in trained]
    assert sorted(pictures) == ["first.jpg"] * 3 + ["last.jpg"] * 2 + ["middle.jpg"] * 2
    page = " ".join(
        re.sub(
            r"<[^>]+>", " ", (sheet / "index.html").read_text(encoding="utf-8")
        ).split()
    )
    assert (
        "keep/one.png a still +2 more the same, otherwise once more used (regularization)"
        in page
    )
    assert f"{keep}/" not in page


def test_a_hub_dataset_is_named_with_its_commit(
    tmp_path: Path, settings: Overrides
) -> None:
    """From the Hub's own cache, offline: the commit is reported, so that a run can be
    given the same clips again.
    """
    commit, repo = (
        "0123456789abcdef" * 2 + "01234567",
        tmp_path / "hub" / "datasets--user--films",
    )
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    write_clip(repo / "snapshots" / commit / "a.mp4", noise(20), 16).with_suffix(
        ".txt"
    ).write_text("a film")
    sets = [
        part
        for text in (*settings.sets, f"cache_dir={tmp_path}/cache")
        for part in ("--set", text)
    ]
    command = [
        sys.executable,
        "-m",
        "videotune",
        "check",
        "user/films",
        "--json",
        *sets,
    ]
    offline = os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=offline, check=False
    )
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["used"] == 1
    assert f"user/films is hf://datasets/user/films@{commit}" in account["notes"]


def test_nothing_that_a_dataset_says_steers_the_terminal(
    data: Path, settings: Overrides, capsys: Printed
) -> None:
    odd = "b\x1b[31mc\x07\u202e4pm"
    (data / "b.mp4").rename(data / f"{odd}.mp4")
    (data / "b.txt").rename(data / f"{odd}.txt")
    (data / "metadata.csv").write_text("file_name,text\n\x1b]0;x\x07.mp4,a\n")
    check(settings, verbose=True)
    shown = capsys.readouterr()
    assert r"b\x1b[31mc\x07\u202e4pm.mp4" in shown.out
    assert not set(shown.out + shown.err) & set("\x1b\x07\u202e")
    assert "\x1b" not in str(VideotuneError("\x1b[31m"))
    assert len(str(VideotuneError(f"unknown key '{'k' * 10**7}': why"))) < 1000
    assert len(str(VideotuneError("k " * 10**6))) < 100_000


def test_a_dataset_that_cannot_be_written_is_checked_all_the_same(
    data: Path, settings: Overrides, capsys: Printed
) -> None:
    (data / ".videotune-cache").write_text("a file where the cache would be")
    assert check(settings) == 2
    assert "cannot be written" in capsys.readouterr().out


def test_serious_remarks_come_first_and_small_ones_on_request(
    tmp_path: Path, settings: Overrides, capsys: Printed, monkeypatch: Patch
) -> None:
    """Black and frozen clips are used, and should be looked at; a size is a small remark."""
    folder = tmp_path / "odd"
    films = {
        "black": np.zeros((40, 60, 90, 3), np.uint8),
        "frozen": np.repeat(noise(1, 60, 90, seed=1), 40, axis=0),
        "usual": noise(40, 60, 90, seed=2),
    }
    for name, frames in films.items():
        write_clip(folder / f"{name}.mp4", frames, 16)
        (folder / f"{name}.txt").write_text(f"a {name} film")
    monkeypatch.setenv("COLUMNS", "80")
    odd = replace(settings, data=str(folder))
    assert check(odd) == DONE
    short = capsys.readouterr().out.splitlines()
    assert short[0].startswith("3 found: 3 used, 0 kept aside, 0 skipped (")
    assert short[1].startswith("used, but look at it: black.mp4: 100% of it is black")
    assert short[2].startswith("used, but look at it: frozen.mp4: ")
    assert len(short) <= 12
    assert max(map(len, short)) <= 80
    assert not any("upscaled" in line for line in short)

    check(odd, verbose=True)
    table = capsys.readouterr().out
    assert re.search(r"│ black\.mp4 +│ used, but look at it", table)
    assert re.search(r"│ usual\.mp4 +│ used  ", table)
    remarks = re.search(
        r"^black\.mp4: 100% of it is black(.|\n)*?upscaled", table, re.M
    )
    assert remarks, "the serious remark of a clip is its first"

    check(odd, as_json=True)
    rows = json.loads(capsys.readouterr().out)["clips"]
    serious = {Path(row["path"]).stem: bool(row["serious"]) for row in rows}
    assert serious == {"black": True, "frozen": True, "usual": False}
    assert all(row["warnings"][: len(row["serious"])] == row["serious"] for row in rows)


def test_clips_without_captions_are_looked_at_too(
    tmp_path: Path, settings: Overrides, capsys: Printed, monkeypatch: Patch
) -> None:
    """Black, frozen, cut and doubled ones are better removed than captioned."""
    folder = tmp_path / "my clips"
    usual = (
        noise(1, 60, 90, seed=2) // 2
        + np.arange(40, dtype=np.uint8)[:, None, None, None]
    )
    films = {
        "black": np.zeros((40, 60, 90, 3), np.uint8),
        "frozen": np.repeat(noise(1, 60, 90, seed=1), 40, axis=0),
        "twin": usual,
        "usual": usual[:-1],
    }
    for name, frames in films.items():
        write_clip(folder / f"{name}.mp4", frames, 16)
    monkeypatch.setenv("COLUMNS", "500")
    odd = replace(settings, data=str(folder))
    assert check(odd) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    look = "skipped: no caption; look at the clip, too: "
    assert f"{look}black.mp4: 100% of it is black or one flat colour" in lines
    assert any(line.startswith(f"{look}frozen.mp4: ") for line in lines)
    assert f"{look}twin.mp4: looks nearly the same as usual.mp4" in lines
    assert not any(
        "looks nearly" in line for line in lines if "skipped: frozen" in line
    )

    example = folder / "black.txt"
    assert f'a text file such as {example} with a line like "a kitten' in printed.err
    assert "--allow-skips" not in printed.err, "no clip would be left"
    assert "folder of your clips" not in printed.err

    # A clip that is used does not name one that is not.
    (folder / "usual.txt").write_text("a film")
    assert check(odd) == 1
    printed = capsys.readouterr()
    assert "usual.mp4: looks" not in printed.out
    assert f"{look}twin.mp4: looks nearly the same as usual.mp4" in printed.out
    assert "--allow-skips 3" in printed.err


def test_many_clips_are_cut_short_and_numbers_sort_by_value(
    tmp_path: Path, settings: Overrides, capsys: Printed, monkeypatch: Patch
) -> None:
    for i in range(1, 24):
        clip = write_clip(
            tmp_path / "many" / f"clip_{i}.mp4", noise(9, 32, 48, seed=i), 16
        )
        clip.with_suffix(".txt").write_text("a")
    monkeypatch.setenv("COLUMNS", "80")
    many = replace(
        settings,
        data=str(tmp_path / "many"),
        sets=(*settings.sets, "validation_fraction=0"),
    )
    for more, listed in (({"verbose": True}, 5), ({"every": True}, 23)):
        assert check(many, **more) == 0
        out = capsys.readouterr().out
        assert ("18 more (--all)" in out) == ("verbose" in more)
        numbers = [int(number) for number in re.findall(r"│ clip_(\d+)\.mp4", out)]
        assert numbers == list(range(1, listed + 1))


# ---- cache


@pytest.fixture
def small(clips: Path, tiny_bases: Bases) -> Overrides:
    sets = ("resolution=32x32", "samples=0", "dataloader_threads=1")
    return Overrides(
        data=str(clips), sets=(f"base_model_name={tiny_bases('wan')}", *sets)
    )


def spoil(store: LatentCache, kind: str) -> str:
    """Change a byte of one entry's data in its shard; the entry's key."""
    entry = next(entry for entry in store.entries() if entry.kind == kind)
    path = store.path(*entry.name)
    first = next(iter(store.get(kind, entry.key).values()))
    data = bytearray(path.read_bytes())
    data[data.index(first.reshape(-1).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    return entry.key


def test_a_cache_is_filled_listed_verified_and_pruned(
    clips: Path, small: Overrides, capsys: Printed
) -> None:
    assert cache(small) == DONE
    capsys.readouterr()
    for place in (clips, clips / ".videotune-cache"):
        assert list_cache(place, as_json=True) == DONE
        listed = json.loads(capsys.readouterr().out)
        assert listed["folder"] == str(clips / ".videotune-cache")
        assert [row["kind"] for row in listed["entries"]] == ["latents"] * 6 + [
            "text"
        ] * 7
    captions = {path.read_text() for path in (clips / "captions").iterdir()} | {""}
    assert {row["of"] for row in listed["entries"] if row["kind"] == "text"} == captions
    films = {f"videos/{path.name}" for path in (clips / "videos").iterdir()}
    assert {
        row["clip"] for row in listed["entries"] if row["kind"] == "latents"
    } == films
    assert list_cache(clips) == DONE
    assert "6 windows of" in (short := capsys.readouterr().out)
    assert len(short.splitlines()) == 3
    assert list_cache(clips, every=True) == DONE
    assert "13 entries" in capsys.readouterr().out
    assert verify_cache(clips) == DONE
    assert "13 entries in" in capsys.readouterr().out
    assert prune_cache(small) == DONE
    assert "nothing to remove" in capsys.readouterr().out

    folder = clips / ".videotune-cache"
    assert (folder / "CACHEDIR.TAG").is_file()
    assert (folder / ".gitignore").read_text() == "*\n"
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(clips.parent).encode() not in path.read_bytes(), path


def test_a_damaged_entry_is_listed_with_exit_code_2_and_made_anew(
    clips: Path, small: Overrides, capsys: Printed
) -> None:
    cache(small)
    folder = clips / ".videotune-cache"
    before = {entry.name: entry.hash for entry in LatentCache(folder).entries()}
    key = spoil(LatentCache(folder), "latents")
    capsys.readouterr()
    assert verify_cache(clips) == SKIPPED
    printed = capsys.readouterr().out
    assert "holds other bytes than were written" in printed
    assert "damaged and dropped: 1 of 13 entries" in printed
    assert not LatentCache(folder).has("latents", key)
    assert verify_cache(clips) == DONE
    assert cache(small) == DONE
    assert {entry.name: entry.hash for entry in LatentCache(folder).entries()} == before


def test_pruning_removes_what_the_settings_do_not_need_and_only_with_yes(
    clips: Path, small: Overrides, capsys: Printed
) -> None:
    cache(small)
    caption = sorted((clips / "captions").iterdir())[0]
    old = caption.read_text()
    caption.write_text("something else")
    video = sorted((clips / "videos").iterdir())[1]
    video.unlink()
    (clips / "captions" / f"{video.stem}.txt").unlink()
    cache(small)
    capsys.readouterr()
    assert prune_cache(small) == DONE
    printed = capsys.readouterr().out
    assert "would remove 3 entries" in printed
    assert "leave 11 entries. --yes removes them" in printed
    assert f"text of {old!r}" in printed
    assert len(LatentCache(clips / ".videotune-cache").entries()) == 14
    assert prune_cache(small, yes=True) == DONE
    assert "removed 3 entries" in capsys.readouterr().out
    assert len(LatentCache(clips / ".videotune-cache").entries()) == 11
    assert verify_cache(clips) == DONE
    assert prune_cache(small) == DONE
    assert "nothing to remove" in capsys.readouterr().out


def test_a_folder_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        VideotuneError, match=r"neither a cache nor a dataset.*cache_dir"
    ):
        verify_cache(tmp_path)
    with pytest.raises(VideotuneError, match="there is no such folder"):
        list_cache(tmp_path / "none")
    (tmp_path / "text").mkdir()
    with pytest.raises(VideotuneError, match="neither a cache"):
        verify_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"], (
        "looking leaves nothing behind"
    )
    (tmp_path / "lock").touch()
    assert cache_at(tmp_path) == tmp_path


def split(source: Path, out: Path) -> int:
    return shell("dataset", "split", source, out=out, min_seconds=1.0)


def test_the_table_and_files_of_a_split(tmp_path: Path, capsys: Printed) -> None:
    """Scenes, a whole file, images that are listed and not split, a broken file."""
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2, 3], 30)[:-12])
    write_clip(tmp_path / "in" / "whole.mp4", shots([4], 30))
    pages = [Image.fromarray(frame) for frame in shots([5, 6], 30)]
    pages[0].save(
        tmp_path / "in" / "a.gif", save_all=True, append_images=pages[1:], duration=40
    )
    for name in ("b.gif", "c.png", "d.jpg"):
        pages[0].save(tmp_path / "in" / name)
    assert split(tmp_path / "in", tmp_path / "out") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    said = (
        "omitted: 2.50 to 3.25 s",
        "no cut: copied as it is",
        "1 scene is shorter than 1 s",
        "3 images were not split",
    )
    for part in said:
        assert part in printed
    assert printed.count("image: not split") == 3
    assert f"videotune check {tmp_path / 'out'}" in printed
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in made if name.startswith("a-scene-")}
    assert not {name for name in made if name.endswith((".png", ".jpg"))}
    (tmp_path / "in" / "bad.mp4").write_bytes(b"")
    assert split(tmp_path / "in", tmp_path / "again") == SKIPPED
    printed = capsys.readouterr()
    assert "empty: the file has 0 bytes" in " ".join(printed.out.split())
    assert "not split; the table has" in printed.err
    assert (tmp_path / "again" / "film-scene-002.mp4").exists()


def test_a_folder_without_videos_has_nothing_to_split(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("no clip")
    with pytest.raises(VideotuneError, match="No videos or images"):
        split(tmp_path / "in", tmp_path / "out")
    Image.fromarray(noise(1)[0]).save(tmp_path / "in" / "a.png")
    with pytest.raises(
        VideotuneError,
        match=r"No video files.*Its 1 images have no scenes to split",
    ):
        split(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "metadata.csv").write_text("nonsense\nx\n")
    with pytest.raises(VideotuneError, match=r"metadata\.csv"):
        split(tmp_path / "in", tmp_path / "out")


# ---- the short account


def test_notes_that_ask_for_a_decision_are_in_the_short_account(
    tmp_path: Path, capsys: Printed
) -> None:
    """Clips far below the rate of the training, captions whose paragraphs become
    variants, and a warm-up longer than the run; a changed frame count comes after them.
    """
    folder = tmp_path / "slow"
    for seed in range(2):
        clip = write_clip(folder / f"{seed}.mp4", noise(40, 64, 96, seed=seed), 8)
        clip.with_suffix(".txt").write_text(f"a first text {seed}\n\na second text")
    sets = ["resolution=64x96", "video_config.frames=34", "warmup_steps=50", "steps=20"]
    options = [word for setting in sets for word in ("--set", setting)]
    words = [str(folder), "--preset", "ltx 2B LoRA 12GB", *options]

    for command in ("check", "plan"):
        capsys.readouterr()
        assert shell(command, *words) == DONE
        printed = capsys.readouterr().out
        notes = " ".join(printed.split())
        assert "plays motion 3.1" in notes, command
        assert "have paragraphs" in notes, command
        assert "warmup_steps 50" in notes, command
        assert "becomes 33" not in notes, f"{command}: it is one of the others"
        assert "more note" in notes, command
