"""The cache: what is in it is what its key says, whole, and made once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from videotune.cache.encode import cut_captions, fill, missing
from videotune.cache.store import Store, latent_key, text_key
from videotune.errors import VideotuneError
from videotune.run.job import Job, Words, open_job, settle
from videotune.types import ClipShape, Window

WINDOW = Window("c" * 32, 0.5, 1.5, ClipShape(17, 64, 64, 16.0))


@pytest.mark.parametrize(
    "other",
    [
        replace(WINDOW, clip_id="d" * 32),
        replace(WINDOW, start=0.5625),
        replace(WINDOW, shape=ClipShape(13, 64, 64, 16.0)),
        replace(WINDOW, shape=ClipShape(17, 48, 64, 16.0)),
        replace(WINDOW, shape=ClipShape(17, 64, 48, 16.0)),
        replace(WINDOW, shape=ClipShape(17, 64, 64, 24.0)),
    ],
)
def test_whatever_decides_the_latents_is_in_their_name(other: Window) -> None:
    assert latent_key(WINDOW, "vae") == latent_key(replace(WINDOW), "vae")
    assert latent_key(other, "vae") != latent_key(WINDOW, "vae")
    assert latent_key(WINDOW, "another vae") != latent_key(WINDOW, "vae")


def test_whatever_decides_the_text_states_is_in_their_name() -> None:
    keys = {text_key("a", "e", 512), text_key("b", "e", 512), text_key("a", "f", 512), text_key("a", "e", 256)}
    assert len(keys) == 4


def test_an_entry_survives_and_a_damaged_one_does_not_count(tmp_path: Path) -> None:
    store, value = Store(tmp_path), {"mean": torch.randn(2, 3)}
    store.put("latents", "k", value, {"window": "w"})
    store.put("text", "k", {"text": torch.zeros(1, 2)}, {})
    again = Store(tmp_path)
    assert again.has("latents", "k")
    assert torch.equal(again.get("latents", "k")["mean"], value["mean"])
    path = again.path("latents", "k")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not again.has("latents", "k")
    with pytest.raises(VideotuneError, match="missing or damaged"):
        again.get("latents", "k")
    path.unlink()
    assert not again.has("latents", "k")
    assert again.has("text", "k")


def test_what_stays_in_memory_is_bounded_and_true(tmp_path: Path) -> None:
    writer = Store(tmp_path)
    for i in range(4):
        writer.put("latents", str(i), {"mean": torch.full((256,), float(i))}, {})
    store = Store(tmp_path, keep_bytes=2 * 1024)
    first = store.get("latents", "0")["mean"]
    store.get("latents", "1")
    for path in (tmp_path / "latents").iterdir():
        path.unlink()
    assert store.get("latents", "0")["mean"] is first
    writer.put("latents", "2", {"mean": torch.full((256,), 2.0)}, {})
    store.get("latents", "2")  # the third entry: the one asked for longest ago goes
    assert store.get("latents", "0")["mean"] is first
    with pytest.raises(VideotuneError, match="missing"):
        store.get("latents", "1")
    store.put("latents", "0", {"mean": torch.zeros(256)}, {})
    assert store.get("latents", "0")["mean"].sum() == 0, "an entry that is written anew is read anew"


def test_a_manifest_torn_by_a_kill_loses_its_last_line_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in ("a", "b"):
        store.put("latents", key, {"mean": torch.zeros(1)}, {})
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    again = Store(tmp_path)
    assert (again.has("latents", "a"), again.has("latents", "b")) == (True, False)
    again.put("latents", "c", {"mean": torch.zeros(1)}, {})
    last = Store(tmp_path)
    assert [last.has("latents", key) for key in "abc"] == [True, False, True]


def job_of(small_clips: Path, base: Path, cache: Path, *sets: str) -> Job:
    words = Words(
        data=str(small_clips), sets=(f"base_model_name={base}", f"cache_dir={cache}", "resolution=32x32", *sets)
    )
    return open_job(*settle(words))


def todo_of(job: Job, family: Any, store: Store) -> Any:
    captions = [caption for clip in job.library.clips for caption in clip.captions]
    return missing(store, family.fingerprints(), 512, [*captions, ""], job.library.windows)


def test_filling_again_makes_nothing_and_a_caption_edit_text_alone(
    small_clips: Path, tiny_bases: Callable[[str], Path], tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    data = tmp_path / "data"
    shutil.copytree(small_clips, data, ignore=shutil.ignore_patterns(".videotune-cache"))
    family, store = tiny_family("wan"), Store(tmp_path / "cache")
    job = job_of(data, tiny_bases("wan"), tmp_path / "cache")
    seen: list[tuple[str, int, int]] = []
    fill(family, store, todo_of(job, family, store), job.library.facts, 2, lambda *told: seen.append(told))
    assert seen[-1] == ("clips", 6, 6)
    assert not todo_of(job, family, Store(tmp_path / "cache"))
    caption = sorted((data / "captions").iterdir())[0]
    caption.write_text("something else")
    job = job_of(data, tiny_bases("wan"), tmp_path / "cache")
    todo = todo_of(job, family, Store(tmp_path / "cache"))
    assert todo.captions == ("something else",)
    assert todo.windows == ()


def test_the_cache_holds_what_the_vae_makes_of_the_decoded_window(
    small_clips: Path, tiny_bases: Callable[[str], Path], tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    from videotune.data.decode import decode
    from videotune.data.windows import window_times

    family, store = tiny_family("wan"), Store(tmp_path)
    job = job_of(small_clips, tiny_bases("wan"), tmp_path)
    fill(family, store, todo_of(job, family, store), job.library.facts, 0, lambda *told: None)
    window = job.library.windows[2]
    frames = decode(job.library.facts[window.clip_id], window_times(window), 32, 32)
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1
    cached = store.get("latents", latent_key(window, family.fingerprints()["vae"]))
    torch.testing.assert_close(cached["mean"], family.encode_video(pixels).mean, rtol=0, atol=1e-6)


def test_long_captions_are_counted(
    small_clips: Path, tiny_bases: Callable[[str], Path], tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family, store = tiny_family("wan"), Store(tmp_path)
    todo = missing(store, family.fingerprints(), 512, ["short", "long " * 300], ())
    fill(family, store, todo, {}, 0, lambda *told: None)
    prints = family.fingerprints()
    assert cut_captions(store, prints["text_encoder"], 512, ["short", "long " * 300]) == ["long " * 300]
    states = store.get("text", text_key("long " * 300, prints["text_encoder"], 512))
    assert states["text"].shape[0] == 512


def test_killed_and_run_again_it_goes_on(
    small_clips: Path, tiny_bases: Callable[[str], Path], tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    words = ["cache", "--data", str(small_clips), "--set", f"base_model_name={tiny_bases('wan')}"]
    words += ["--set", f"cache_dir={cache}", "--set", "resolution=32x32", "--set", "dataloader_threads=0"]
    command = [sys.executable, "-m", "videotune", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    manifest = cache / "manifest.jsonl"
    while process.poll() is None and not (manifest.is_file() and len(manifest.read_text().splitlines()) >= 2):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors") if not path.name.startswith(".")}
    assert made
    subprocess.run(command, check=True, capture_output=True)
    family = tiny_family("wan")
    job = job_of(small_clips, tiny_bases("wan"), cache)
    assert not todo_of(job, family, Store(cache))
    known = {json.loads(line)["key"] for line in manifest.read_text().splitlines() if line.endswith("}")}
    kept = [path for path in made if path.stem in known and path.stat().st_mtime_ns == made[path]]
    assert len(kept) >= len(made) - 1, "at most the entry whose manifest line was not written yet is made again"


def test_a_tear_inside_a_letter_and_odd_line_ends_lose_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key, caption in (("a", "one\u2028two\u0085three"), ("b", "schön")):
        store.put("text", key, {"text": torch.zeros(1)}, {"caption": caption})
    manifest = tmp_path / "manifest.jsonl"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: whole.rindex("ö".encode()) + 1])
    again = Store(tmp_path)
    assert (again.has("text", "a"), again.has("text", "b")) == (True, False)
    assert again.about("text", "a")["about"]["caption"] == "one\u2028two\u0085three"
