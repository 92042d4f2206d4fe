"""What is shown while a cache is filled, and what a run reads from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainers import Lab, job_of
from videotune import console
from videotune.config.resolve import parse
from videotune.distributed import DistributedContext
from videotune.latent_cache.cache_items import CacheItems, items_by_entry
from videotune.latent_cache.encoder_failures import TextEncoderFull
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import LatentCache
from videotune.trainer import cache_filling
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import (
    _echo_masks_without_effect,
    _print_encoded,
    echo_truncated,
    echo_truncated_live,
    fill_cache,
    fill_cache_of_run,
    items_text,
    missing_of_run,
    reads_of,
    texts_of,
)
from videotune.types import DETERMINISTIC_VARIANT


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


def test_progress_is_shown_with_its_title_and_given_to_who_asks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    job = job_of(lab)
    family = open_models(job.spec, job.base, job.config)
    told: list[tuple[str, int, int]] = []
    fill_cache(
        job,
        family,
        LatentCache(job.cache),
        reads_of(job),
        on_progress=lambda *progress: told.append(progress),
    )
    shown = [line for line in capsys.readouterr().err.splitlines() if "/" in line]
    lines = [line for line in shown if line.startswith("encoding: ")]
    assert len(lines) == len(told) > 2
    for line, (subject, done, total) in zip(lines, told, strict=True):
        assert line.startswith(f"encoding: {done}/{total}  {subject}")


def items_of(
    captions: int, samples: int, masks: int = 0, conditions: int = 0
) -> CacheItems:
    parts: Any = [(None,) * count for count in (captions, samples, masks, conditions)]
    return CacheItems(*parts)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (items_of(1, 2), "1 caption and 2 windows"),
        (items_of(3, 1, masks=1), "3 captions, 1 window and 1 mask"),
        (items_of(0, 0, conditions=2), "0 captions, 0 windows and 2 conditions"),
        (
            items_of(2, 3, masks=4, conditions=1),
            "2 captions, 3 windows, 4 masks and 1 condition",
        ),
    ],
)
def test_what_is_encoded_is_counted_by_kind(items: CacheItems, text: str) -> None:
    assert items_text(items) == text


@pytest.mark.parametrize(
    ("seconds", "waited", "hint"),
    [(5.0, 5.0, None), (5.5, 1.1, None), (5.5, 1.65, "30%"), (100.0, 21.0, "21%")],
)
def test_long_waits_for_frames_are_told_with_their_remedy(
    seconds: float,
    waited: float,
    hint: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From five seconds, and a fifth of them, on."""
    store: Any = SimpleNamespace(folder="FOLDER")
    _print_encoded(store, items_of(1, 2), seconds=seconds, waited=waited)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("encoded 1 caption and 2 windows into FOLDER in ")
    assert ("dataloader_threads" in line) is (hint is not None)
    assert hint is None or f"; {hint} of it waiting" in line


def test_captions_that_are_cut_are_counted_and_the_first_is_shown(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(lab)
    echo_truncated(job, [])
    _echo_masks_without_effect(0)
    assert capsys.readouterr().err == ""
    echo_truncated(job, ["x" * 59 + "yz", "other"])
    warning, first = capsys.readouterr().err.splitlines()
    tokens = f"{job.spec.text_tokens} tokens that {job.spec.title} reads"
    assert warning.startswith("warning: 2 captions are cut: ")
    assert tokens in warning
    assert first == f"  the first begins '{'x' * 59}y'"
    _echo_masks_without_effect(1)
    assert "mask: 1 mask hide" in capsys.readouterr().err


def test_a_run_reads_its_captions_and_each_variant_of_what_varies(
    lab: Lab, small_clips: Path
) -> None:
    plain = job_of(lab, {"video_config.variants": 3})
    window = plain.library.windows[0]
    reads = reads_of(plain, ["a prompt", "a prompt"], [window])
    captions = list(dict.fromkeys(c for x in plain.library.clips for c in x.captions))
    assert (
        reads.captions == (*captions, "", "a prompt") == texts_of(plain, ["a prompt"])
    )
    samples = [(each, 0) for each in plain.library.windows]
    assert list(reads.samples) == [*samples, (window, DETERMINISTIC_VARIANT)]

    mirrored = [{"path": str(small_clips), "flip": "always"}]
    varied = job_of(lab, {"datasets": mirrored, "video_config.variants": 3})
    assert list(reads_of(varied).samples) == [
        (each, variant) for each in varied.library.windows for variant in range(3)
    ]


@pytest.mark.parametrize(("threads", "is_share"), [(0, False), (2, False), (2, True)])
def test_what_is_missing_is_encoded_as_the_job_says(
    threads: int,
    is_share: bool,
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a share, another process holds the lock, prints and uploads the rest."""
    job = job_of(lab, {"dataloader_threads": threads, "seed": 5})
    family = open_models(job.spec, job.base, job.config)
    store = LatentCache(job.cache)
    store.notes.append("found damaged")
    reads = reads_of(job)
    share = CacheItems(reads.captions[:1], ()) if is_share else None
    calls: list[tuple[Any, ...]] = []
    uploads: list[Any] = []

    def encode(*arguments: Any, **more: Any) -> float:
        calls.append((*arguments, more))
        return 0.0

    monkeypatch.setattr(cache_filling, "encode_missing", encode)
    monkeypatch.setattr(LatentCache, "finish_uploads", lambda _, of: uploads.append(of))
    fill_cache(job, family, store, reads, share=share)
    todo = share or missing_of_run(job, family, store, reads)
    ((*given, more),) = calls
    assert given == [family, store, todo, job.library.media]
    assert more["seed"] == 5
    assert (more["workers"] is not None) is (threads > 0)
    assert more["lock_is_held"] is is_share

    entries = items_by_entry(CacheKeys.of(family, 5), reads)
    assert [set(names) for names in uploads] == [set() if is_share else set(entries)]
    lines = capsys.readouterr().err.splitlines()
    assert ("note: found damaged" in lines) is not is_share
    text = f"encoded {items_text(todo)} into {job.cache} in 0"
    assert any(line.startswith(text) for line in lines) is not is_share


def test_a_second_try_is_of_the_same_share(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(lab)
    family = open_models(job.spec, job.base, job.config)
    store = LatentCache(job.cache)
    share = CacheItems(("a caption",), ())
    tries: list[tuple[Any, ...]] = []
    freed: list[str] = []

    def encode(
        of: Any, into: Any, todo: Any, *_: Any, progress: Any, **more: Any
    ) -> float:
        tries.append((of, into, todo, more["lock_is_held"], family.stream_text))
        progress("captions", 1, 1)
        if len(tries) == 1:
            raise TextEncoderFull
        return 0.0

    told: list[Any] = []
    monkeypatch.setattr(cache_filling, "encode_missing", encode)
    monkeypatch.setattr(family, "free", freed.append)
    fill_cache(
        job,
        family,
        store,
        reads_of(job),
        share=share,
        on_progress=lambda *progress: told.append(progress),
    )
    first, second = tries
    assert first == (family, store, share, True, None)
    assert second[:4] == first[:4]
    assert second[4] is not None
    assert family.stream_text is None
    assert freed == ["text_encoder", "vae"]
    assert told == [("captions", 1, 1)] * 2


def test_a_cache_keeps_as_much_in_memory_as_is_asked_for(lab: Lab) -> None:
    job = job_of(lab)
    family = open_models(job.spec, job.base, job.config)
    one = DistributedContext()
    reads = CacheItems(("a caption",), ())
    for more, kept in (({}, 0), ({"keep_bytes": 123}, 123)):
        store = fill_cache_of_run(job, family, reads, one, **more)
        assert store._keep_bytes == kept
        assert store.folder == job.cache


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [(4, []), (3, ["four words of text"]), (2, ["four words of text"])],
)
def test_captions_that_are_encoded_in_the_step_are_cut_beyond_the_model_s_tokens(
    tokens: int, cut: list[str], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of the run's own counts as often as its vectors do."""
    shown: list[Any] = []
    monkeypatch.setattr(
        cache_filling, "echo_truncated", lambda job, cut: shown.append((job, cut))
    )
    clip = SimpleNamespace(captions=("four words of text", "two"))
    family: Any = SimpleNamespace(text_length=lambda text: len(text.split()))

    def job_with(method: str) -> Any:
        config = parse({"training_method": method})
        return SimpleNamespace(
            config=config,
            spec=SimpleNamespace(text_tokens=tokens),
            library=SimpleNamespace(clips=[clip]),
        )

    echo_truncated_live(job_with("LORA"), family, ["a prompt"])
    assert shown == []
    job = job_with("EMBEDDING")
    echo_truncated_live(job, family, ["five words of a prompt"])
    assert shown == [(job, [*cut, "five words of a prompt"])]
