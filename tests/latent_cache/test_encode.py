"""Filling the cache: the right entries, once each, whatever kills it; frames from
worker processes; memory flat.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.clips import noise, write_clip
from videotune.data.decode import decode
from videotune.data.frame_sampling import draw_frames
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.workers import Workers
from videotune.errors import VideotuneError
from videotune.files import hash_file
from videotune.latent_cache import decode_ahead, keys
from videotune.latent_cache.cache_items import CacheItems, items_by_entry, missing_items
from videotune.latent_cache.encode import cut_captions, encode_missing
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.pixels import to_model
from videotune.latent_cache.store import LatentCache
from videotune.models.registry import find
from videotune.types import DETERMINISTIC_VARIANT, ClipShape, LatentDistribution, Window

SHAPE = ClipShape(9, 32, 32, 16.0)
LENGTH = 9 / 16
Open = Callable[..., Any]


@dataclass
class Data:
    """A small dataset: facts by id of content, takes, captions."""

    facts: dict[str, MediaInfo]
    takes: list[tuple[Window, int]]
    captions: list[str]
    seed: int = 3

    @property
    def items(self) -> CacheItems:
        return CacheItems(tuple(self.captions), tuple(self.takes))


def data_of(folder: Path) -> Data:
    """Two windows of each clip below a folder, and a caption each."""
    facts = {hash_file(path): probe(path) for path in sorted(folder.rglob("*.mp4"))}
    starts = (0.0, LENGTH)
    takes = [
        (Window(clip, start, start + LENGTH, SHAPE), 0)
        for clip in facts
        for start in starts
    ]
    return Data(
        facts, takes, ["", *(Path(known.path).parent.name for known in facts.values())]
    )


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of the same name in two folders, 20 frames of 32x48 at 16 fps."""
    folder = tmp_path_factory.mktemp("clips")
    for seed, name in enumerate("ab"):
        write_clip(folder / name / "same.mp4", noise(20, 32, 48, seed), 16)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


@dataclass
class Watched:
    """A family that notes what it encodes."""

    family: Any
    captions: list[str] = field(default_factory=list)
    pixels: list[torch.Tensor] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def encode_text(self, captions: list[str]) -> Any:
        self.captions += captions
        return self.family.encode_text(captions)

    def encode_video(self, frames: torch.Tensor) -> LatentDistribution:
        self.pixels.append(frames)
        return self.family.encode_video(frames)

    def free(self, part: str) -> None:
        self.freed.append(part)
        self.family.free(part)


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def todo_of(family: Any, cache: LatentCache, data: Data) -> CacheItems:
    return missing_items(cache, CacheKeys.of(family, data.seed), data.items)


def filled(
    family: Any, folder: Path, data: Data, workers: Workers | None = None
) -> Watched:
    """Fill a cache with what the data lacks there; what was encoded."""
    watched: Any = Watched(family)
    cache = LatentCache(folder)
    encode_missing(
        watched,
        cache,
        todo_of(family, cache, data),
        data.facts,
        data.seed,
        workers,
        quiet,
    )
    return watched


# ---- what is made


def test_the_cache_holds_what_the_vae_makes_of_the_decoded_takes(
    clips: Path, tiny_family: Open, tmp_path: Path, workers: Workers
) -> None:
    """By worker processes and without them alike, bit for bit, for every way to show a
    window.
    """
    family, data = tiny_family("wan"), data_of(clips)
    window = data.takes[0][0]
    whole, swapping = replace(window, end=1.2), replace(window, swaps=True)
    plain = draw_frames(window, 0, data.seed).times
    swapped = next(
        variant
        for variant in range(99)
        if draw_frames(swapping, variant, data.seed).times != plain
    )
    data.takes += [
        (replace(window, resize="random"), 2),
        (swapping, swapped),
        (replace(whole, sampling="start"), 3),
    ]
    data.takes += [(replace(window, resize=way), 0) for way in ("pad", "stretch")]
    filled(family, tmp_path / "here", data)
    filled(family, tmp_path / "there", data, workers)
    here, there = LatentCache(tmp_path / "here"), LatentCache(tmp_path / "there")
    for window, variant in data.takes:
        shown = draw_frames(window, variant, data.seed)
        key = CacheKeys.of(family, data.seed).latents_key(shown)
        frames = decode(
            data.facts[window.clip_id],
            shown.times,
            32,
            32,
            shown.window.resize,
            shown.crop_position,
        )
        truth = family.encode_video(to_model(frames)).mean
        for cache in (here, there):
            assert torch.equal(cache.get("latents", key)["mean"], truth)
            assert cache.get("latents", key)["mean"].dtype == torch.float32
    assert (
        len({entry.hash for entry in here.entries() if entry.kind == "latents"}) == 9
    ), "all of them differ"


def test_progress_report_and_what_is_freed(
    clips: Path, tiny_family: Open, tmp_path: Path, workers: Workers
) -> None:
    data, family, cache, told = (
        data_of(clips),
        Watched(tiny_family("wan")),
        LatentCache(tmp_path),
        [],
    )
    todo = todo_of(family, cache, data)
    assert (
        encode_missing(
            family, cache, todo, data.facts, 3, workers, lambda *row: told.append(row)
        )
        > 0
    )
    assert [row[1:] for row in told] == [
        (1, 3),
        (2, 3),
        (3, 3),
        (1, 4),
        (2, 4),
        (3, 4),
        (4, 4),
    ]
    assert told[0][0].startswith("captions, ")
    assert told[-1][0].startswith("windows, ")
    assert told[-1][0].endswith(" a second")
    assert family.freed == ["text_encoder", "vae"]
    files = sorted(path.parent.parent.name for path in tmp_path.rglob("*.safetensors"))
    assert files == ["latents"] * 4 + ["text"] * 3
    paths = {
        entry.about["clip"] for entry in cache.entries() if entry.kind == "latents"
    }
    assert paths == {known.path for known in data.facts.values()}


def test_what_several_ask_for_is_encoded_once(
    clips: Path, tiny_family: Open, tmp_path: Path
) -> None:
    data = data_of(clips)
    window = data.takes[0][0]
    data.takes = [
        (window, 0),
        (window, DETERMINISTIC_VARIANT),
        (window, 5),
        (replace(window, resize="random"), DETERMINISTIC_VARIANT),
        (window, 0),
    ]
    data.captions = ["a", "b", "a"]
    watched = filled(tiny_family("wan"), tmp_path, data)
    assert (len(watched.pixels), watched.captions) == (1, ["a", "b"])


def test_long_captions_are_counted(tiny_family: Open, tmp_path: Path) -> None:
    family = tiny_family("wan")
    filled(family, tmp_path, Data({}, [], ["short", "long " * 300]))
    cache, own = LatentCache(tmp_path), CacheKeys.of(family, 0)
    assert cut_captions(cache, own, ["short", "long " * 300]) == ["long " * 300]
    assert cache.get("text", own.text_key("long " * 300))["text"].shape[0] == 512


# ---- nothing stale, nothing in vain


CHANGES = {
    **dict.fromkeys(("nothing", "a clip's name", "seed", "transformer"), (0, 0)),
    **dict.fromkeys(
        ("DECODE_VERSION", "frames", "height", "width", "resize", "place", "vae"),
        (4, 0),
    ),
    **dict.fromkeys(("text_encoder", "tokenizer", "dtype", "token limit"), (0, 3)),
    **dict.fromkeys(("a window's start", "a window's length in time"), (1, 0)),
} | {"a clip's bytes": (2, 0), "a caption": (0, 1), "SCHEMA": (4, 3)}
"""What a person or an upgrade changes, and how many latents and captions that must make
anew, of 4 and 3.
"""


@pytest.fixture(scope="module")
def baseline(
    clips: Path,
    tiny_bases: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """A base model and a cache filled from it."""
    base, cache = tiny_bases("wan"), tmp_path_factory.mktemp("baseline")
    filled(find("wan")(base, torch.device("cpu"), torch.float32), cache, data_of(clips))
    return base, cache


def another_model(base: Path, part: str, tmp: Path) -> Path:
    """The checkpoint with one part of it changed: a weight, or a word of the
    tokenizer's config.
    """
    folder = shutil.copytree(base, tmp / "base")
    if part == "tokenizer":
        path = folder / part / "tokenizer_config.json"
        path.write_text(path.read_text().replace("{", '{"changed": 1,', 1))
        return folder
    path = next((folder / part).glob("*.safetensors"))
    weights = load_file(path)
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_exactly_what_it_touches_anew(
    change: str,
    clips: Path,
    baseline: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, cache = baseline[0], shutil.copytree(baseline[1], tmp_path / "cache")
    folder, dtype, data = (
        shutil.copytree(clips, tmp_path / "clips"),
        torch.float32,
        data_of(clips),
    )
    first, variant = data.takes[0]
    match change:
        case "a clip's bytes":
            write_clip(folder / "a" / "same.mp4", noise(20, 32, 48, seed=9), 16)
            data = data_of(folder)
        case "a clip's name":
            (folder / "a" / "same.mp4").rename(folder / "a" / "other.mp4")
            data = data_of(folder)
        case "DECODE_VERSION" | "SCHEMA":
            monkeypatch.setattr(keys, change, getattr(keys, change) + 1)
        case "a window's start":
            data.takes[0] = (
                replace(first, start=0.0625, end=first.end + 0.0625),
                variant,
            )
        case "a window's length in time":
            data.takes[0] = replace(first, end=first.end + 0.2), variant
        case "frames" | "height" | "width":
            shape = replace(first.shape, **{change: 5 if change == "frames" else 16})
            data.takes = [
                (replace(window, shape=shape), variant)
                for window, variant in data.takes
            ]
        case "resize":
            data.takes = [
                (replace(window, resize="pad"), 0) for window, _ in data.takes
            ]
        case "place":
            data.takes += [
                (replace(window, resize="random"), v)
                for window, _ in data.takes
                for v in (DETERMINISTIC_VARIANT, 1)
            ]
        case "seed":
            data.seed += 1
        case "vae" | "text_encoder" | "tokenizer" | "transformer":
            base = another_model(base, change, tmp_path)
        case "dtype":
            dtype = torch.bfloat16
        case "a caption":
            data.captions[1] = "something else"
    family = find("wan")(base, torch.device("cpu"), dtype)
    if change == "token limit":
        family.spec = replace(family.spec, text_tokens=256)
    before = {entry.name: entry.hash for entry in LatentCache(cache).entries()}
    watched = filled(family, cache, data)
    assert (len(watched.pixels), len(watched.captions)) == CHANGES[change]
    after = {entry.name: entry.hash for entry in LatentCache(cache).entries()}
    assert before.items() <= after.items(), "what was there stays as it was"
    assert len(after) - len(before) == sum(CHANGES[change])
    assert (
        items_by_entry(CacheKeys.of(family, data.seed), data.items).keys()
        <= after.keys()
    )
    assert not todo_of(family, LatentCache(cache), data)


# ---- two at once


def test_two_fills_at_once_do_not_disturb_each_other(
    clips: Path, tiny_family: Open, tmp_path: Path
) -> None:
    """The second is told who fills; when it comes back it has nothing to do, though it
    looked before.
    """
    family, data = tiny_family("wan"), data_of(clips)
    late = LatentCache(tmp_path)
    todo, watched = todo_of(family, late, data), Watched(family)
    with (
        LatentCache(tmp_path).write_lock(),
        pytest.raises(VideotuneError, match=f"process {os.getpid()} on"),
    ):
        encode_missing(watched, late, todo, data.facts, data.seed, None, quiet)
    filled(family, tmp_path, data)
    encode_missing(watched, late, todo, data.facts, data.seed, None, quiet)
    assert (watched.captions, watched.pixels) == ([], [])


# ---- failures


def spoiled(clips: Path, folder: Path) -> Data:
    """The clips, one of which was cut short after it was probed."""
    data = data_of(shutil.copytree(clips, folder))
    path = Path(data.facts[data.takes[2][0].clip_id].path)
    path.write_bytes(path.read_bytes()[:900])
    return data


@pytest.mark.parametrize("in_workers", [False, True])
def test_a_clip_that_cannot_be_decoded_is_named_and_the_others_are_kept(
    clips: Path, tiny_family: Open, tmp_path: Path, workers: Workers, in_workers: bool
) -> None:
    family, data = tiny_family("wan"), spoiled(clips, tmp_path / "clips")
    with pytest.raises(
        VideotuneError, match=r"b/same\.mp4: (decode_error|unreadable|not_a_video)"
    ):
        filled(family, tmp_path / "cache", data, workers if in_workers else None)
    cache = LatentCache(tmp_path / "cache")
    assert sum(entry.kind == "latents" for entry in cache.entries()) == 2
    assert len(todo_of(family, cache, data).samples) == 2
    with cache.write_lock():
        pass  # the lock is free


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA"),
            "not enough memory to encode it. Fewer frames or a lower resolution",
        ),
        (
            RuntimeError("Given groups=1, weight of size"),
            "cannot be encoded: Given groups=1",
        ),
        (
            None,
            "cannot be encoded: the encoder's mean holds infinite or undefined numbers",
        ),
    ],
)
def test_a_vae_that_fails_names_the_clip_and_the_window(
    clips: Path, tiny_family: Open, tmp_path: Path, error: Exception | None, said: str
) -> None:
    family, data = Watched(tiny_family("wan")), data_of(clips)
    true, calls = family.encode_video, []

    def fail_at_third(frames: torch.Tensor) -> LatentDistribution:
        calls.append(1)
        if len(calls) < 3:
            return true(frames)
        if error is not None:
            raise error
        return LatentDistribution(true(frames).mean / 0)

    family.encode_video = fail_at_third  # type: ignore[method-assign]
    window = data.takes[2][0]
    cache = LatentCache(tmp_path)
    todo = todo_of(family, cache, data)
    with pytest.raises(VideotuneError) as caught:
        encode_missing(family, cache, todo, data.facts, data.seed, None, quiet)
    assert str(caught.value).startswith(
        f"{data.facts[window.clip_id].path}: window {window.id}: "
    )
    assert said in str(caught.value)
    assert len(todo_of(family, LatentCache(tmp_path), data).samples) == 2
    assert family.freed == ["text_encoder", "vae"]


# ---- reading ahead


class Instant:
    """Stands for worker processes that answer at once; it counts what they are asked."""

    count, limit, asked = 4, 60.0, 0

    def submit(self, task: str, words: dict[str, Any], limit: float) -> Future[Any]:
        assert (task, limit >= self.limit) == ("decode", True)
        future: Future[Any] = Future()
        future.set_result(
            np.zeros(
                (len(words["times"]), words["height"], words["width"], 3), np.uint8
            )
        )
        self.asked += 1
        return future


def test_no_memory_for_frames_is_no_fault_of_the_text_encoder(
    clips: Path, tiny_family: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would be streamed in a second try, and fail once more."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(decode_ahead, "frames_of", no_memory)
    with pytest.raises(VideotuneError, match="memory to decode"):
        filled(tiny_family("wan"), tmp_path, data_of(clips))


def many(count: int) -> list[Any]:
    return [
        draw_frames(Window("c" * 32, float(i), i + LENGTH, SHAPE), 0, 0)
        for i in range(count)
    ]


def facts_of_one(clips: Path) -> dict[str, MediaInfo]:
    return {"c" * 32: probe(next(clips.rglob("*.mp4")))}


def test_frames_wait_within_bounds_of_bytes_and_of_number(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of_one(clips)
    monkeypatch.setattr(decode_ahead, "GROUP_BYTES", 1)
    for bound, most in ((10**9, 16), (5 * 3 * 9 * 32 * 32, 5), (1, 1)):
        monkeypatch.setattr(decode_ahead, "DECODE_AHEAD_BYTES", bound)
        pool: Any = Instant()
        pulled = 0

        def source() -> Iterator[Any]:
            nonlocal pulled
            for shown in many(40):
                pulled += 1
                yield shown

        ahead = []
        for done, _ in enumerate(decode_ahead.decode_ahead(source(), facts, pool), 1):
            ahead.append(pool.asked - done + 1)
            assert pulled - done <= most + 1, "no list of all takes is made"
        assert len(ahead) == 40
        assert max(ahead) == most


def test_takes_of_one_clip_are_decoded_in_one_pass(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, takes = facts_of_one(clips), many(10)
    others = [
        replace(shown, window=replace(shown.window, resize="pad")) for shown in many(3)
    ]
    for bound, passes in ((10**9, 2), (4 * 3 * 9 * 32 * 32, 4), (1, 13)):
        monkeypatch.setattr(decode_ahead, "GROUP_BYTES", bound)
        pool: Any = Instant()
        got = list(decode_ahead.decode_ahead([*takes, *others], facts, pool))
        assert pool.asked == passes
        assert [shown for shown, _, _ in got] == [*takes, *others]
        assert {frames.shape for _, frames, _ in got} == {(9, 32, 32, 3)}
