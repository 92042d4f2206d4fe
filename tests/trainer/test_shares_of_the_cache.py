"""Processes that share a cache folder each encode a part of it; those of machines with
folders of their own each encode all.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.thread_processes import in_threads
from tests.support.trainers import Lab, job_of
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.store import LatentCache
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import fill_cache_of_run, missing_of_run
from videotune.trainer.cache_sharing import add_findings, processes_sharing
from videotune.validation.callbacks import cache_items_of

Caches = Callable[[DistributedContext], Path]


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


@dataclass(frozen=True)
class Filled:
    """What a process has after the cache was filled."""

    job: Job
    store: LatentCache
    encoded: int
    """Entries that it has encoded itself, by the progress that it has told."""


def filled_by(
    size: int, lab: Lab, cache_of: Caches, knobs: dict[str, Any]
) -> list[Filled]:
    """Fill the caches of ``size`` processes, each played by a thread."""
    # Two threads cannot load models at the same time.
    families = []
    for _ in range(size):
        job = job_of(lab, knobs)
        families.append(open_models(job.spec, job.base, job.config))
        families[-1].text_pipeline()
        families[-1].vae()

    def fill(dist: DistributedContext) -> Filled:
        own = Lab(lab.model, lab.clips, cache_of(dist), lab.tmp)
        job = job_of(own, knobs)
        family = families[dist.rank]
        progress: dict[str, tuple[int, int]] = {}

        def on_progress(subject: str, done: int, total: int) -> None:
            kind, *_ = subject.split()  # then the rate
            progress[kind.strip(",")] = (done, total)

        store = fill_cache_of_run(
            job,
            family,
            cache_items_of(job),
            dist,
            on_progress=on_progress,
        )
        assert not missing_of_run(job, family, store, cache_items_of(job))
        assert all(done == total for done, total in progress.values())
        encoded = sum(done for done, _ in progress.values())
        return Filled(job, store, encoded)

    return in_threads(size, fill)


def test_two_processes_encode_each_entry_once_and_the_leader_says_so(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone,) = filled_by(1, lab, lambda dist: lab.tmp / "alone", {})
    capsys.readouterr()
    first, second = filled_by(2, lab, lambda dist: lab.cache, {})
    assert sorted(first.store.names()) == sorted(alone.store.names())
    assert 0 < second.encoded <= first.encoded
    assert first.encoded + second.encoded == alone.encoded
    text = "".join(capsys.readouterr())
    captions = len(cache_items_of(alone.job).captions)
    windows = alone.encoded - captions
    assert len(re.findall(r"with 2 processes in \d+(\.\d+)? s$", text, re.M)) == 1
    assert f"{captions} captions and {windows} windows" in text
    assert list(lab.cache.glob(".here-*")) == []


def test_a_machine_with_a_folder_of_its_own_encodes_all_of_it(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = filled_by(2, lab, lambda dist: lab.tmp / str(dist.rank), {})
    assert sorted(first.store.names()) == sorted(second.store.names())
    assert first.encoded == second.encoded > 0
    assert "".join(capsys.readouterr()).count("with 1 process in") == 2

    # Once all is there, nothing is encoded.
    for again in filled_by(2, lab, lambda dist: lab.tmp / str(dist.rank), {}):
        assert again.encoded == 0
    assert "encoded" not in "".join(capsys.readouterr())


def test_an_entry_of_another_size_is_encoded_again(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that another model's cache has brought."""
    (alone,) = filled_by(1, lab, lambda dist: lab.cache, {})
    name = next(name for name in alone.store.names() if name[0] == "latents")
    alone.store.drop([name])
    with alone.store.write_lock():
        alone.store.put(*name, {"mean": torch.zeros(1, 1, 1, 1)}, {})
    capsys.readouterr()
    (again,) = filled_by(1, lab, lambda dist: lab.cache, {})
    assert again.encoded == 1
    text = "".join(capsys.readouterr())
    assert text.count("note: ") == 1
    assert "0 captions and 1 window" in text


def test_masks_without_effect_are_those_of_all_and_told_by_the_leader(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """At this size each drawn box reaches all cells."""
    mask = {"conditions": [{"type": "mask"}]}
    counts = {
        filled.store.masks_without_effect
        for filled in filled_by(3, lab, lambda dist: lab.cache, mask)
    }
    (count,) = counts
    assert count > 1
    text = " ".join("".join(capsys.readouterr()).split())
    assert text.count(f"{count} masks hide everything") == 1


def test_captions_that_are_cut_are_told_once_also_where_all_is_encoded(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = Path(shutil.copytree(lab.clips, lab.tmp / "clips"))
    caption = min(clips.rglob("*.txt"))
    caption.write_text("a word " * 500)
    own = Lab(lab.model, clips, lab.cache, lab.tmp)
    for _ in range(2):
        capsys.readouterr()
        filled_by(2, own, lambda dist: lab.cache, {})
        assert "".join(capsys.readouterr()).count("1 caption is cut") == 1


def test_what_members_found_is_told_once_and_what_others_found_is_not() -> None:
    """The folder has three of four processes; each of them has found it damaged."""

    def findings(dist: DistributedContext) -> Any:
        notes = ["damaged", f"only {dist.rank}"]
        share: Any = SimpleNamespace(notes=notes, masks_without_effect=10**dist.rank)
        store: Any = SimpleNamespace(notes=["damaged"], masks_without_effect=5)
        add_findings(store, share, [0, 1, 3], dist)
        return store

    for store in in_threads(4, findings):
        assert store.notes == ["damaged", "only 0", "only 1", "only 3"]
        assert store.masks_without_effect == 5 + 1 + 10 + 1000


def test_each_folder_has_the_processes_that_see_it(tmp_path: Path) -> None:
    """The even ones have one folder, the odd ones another, which is made."""

    def members(dist: DistributedContext) -> list[int]:
        return processes_sharing(tmp_path / "new" / str(dist.rank % 2), dist)

    assert in_threads(4, members) == [[0, 2], [1, 3]] * 2
    assert list(tmp_path.rglob(".here-*")) == []


def test_what_a_killed_process_has_left_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patching:
        patching.setattr(Path, "unlink", lambda *_: None)
        in_threads(2, lambda dist: processes_sharing(tmp_path, dist))
    assert len(list(tmp_path.glob(".here-*"))) == 2
    assert processes_sharing(tmp_path, DistributedContext()) == [0]


def test_a_folder_that_only_some_see_whole_is_refused(tmp_path: Path) -> None:
    """The second process's folder shows what the first one has written, and not the
    other way round.
    """
    other = tmp_path / "other"

    class Mirror(type(tmp_path)):  # type: ignore[misc]
        def glob(self, pattern: str, **more: Any) -> Any:
            yield from super().glob(pattern, **more)
            yield from (tmp_path / "first").glob(pattern)

    def members(dist: DistributedContext) -> str:
        folder = Mirror(other) if dist.rank else tmp_path / "first"
        try:
            processes_sharing(folder, dist)
        except VideotuneError as error:
            return str(error)
        return ""

    first, second = in_threads(2, members)
    assert first == ""
    assert "only some processes see" in second


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(VideotuneError, match=f"{file} cannot be written"):
        processes_sharing(file, DistributedContext())
