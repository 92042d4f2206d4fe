"""What happens beside the encoder: the next frames are fetched, the last entry is written."""

import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.latent_cache.test_encode import SHAPE
from videotune.data.frame_sampling import draw_frames
from videotune.errors import VideotuneError
from videotune.latent_cache.entry_writer import PENDING_ENTRIES, EntryWriter
from videotune.latent_cache.pixels import to_model
from videotune.latent_cache.stage_ahead import stage_ahead
from videotune.latent_cache.store import LatentCache
from videotune.types import Window

CPU = torch.device("cpu")
CARD = torch.device("mps")
"""A device that only tells the code that it is a card; no tensor is put on it."""


def put(writer: EntryWriter, number: int) -> None:
    writer.put("latents", f"k{number}", {"mean": torch.full((999,), number)}, {})


def put_all(
    store: LatentCache,
    count: int,
    error: Exception | None = None,
    device: torch.device = CARD,
) -> None:
    """Hand entries over, and fail if there is an error to fail with."""
    with EntryWriter(store, device) as writer:
        for number in range(count):
            put(writer, number)
        if error is not None:
            raise error


def written(folder: Path) -> list[int]:
    """The numbers of the entries on the disk; each is read with its check."""
    store = LatentCache(folder)
    names = sorted(store.names(), key=lambda name: int(name[1][1:]))
    for kind, key in names:
        assert store.get(kind, key)["mean"].unique().tolist() == [int(key[1:])]
    return [int(key[1:]) for _, key in names]


def test_everything_is_on_the_disk_at_the_end_also_of_a_block_that_fails(
    tmp_path: Path,
) -> None:
    put_all(LatentCache(tmp_path / "whole"), 5)
    assert written(tmp_path / "whole") == [0, 1, 2, 3, 4]

    with pytest.raises(KeyError):
        put_all(LatentCache(tmp_path / "failed"), 2, KeyError())
    assert written(tmp_path / "failed") == [0, 1]


def test_few_entries_wait_for_the_disk(tmp_path: Path) -> None:
    class SlowDisk(LatentCache):
        opened = threading.Event()

        def put(self, *arguments: Any) -> None:
            assert self.opened.wait(30)
            super().put(*arguments)

    store = SlowDisk(tmp_path)
    handed_over: list[int] = []

    def hand_over() -> None:
        with EntryWriter(store, CARD) as writer:
            for number in range(4):
                put(writer, number)
                handed_over.append(number)

    thread = threading.Thread(target=hand_over)
    thread.start()
    thread.join(0.5)
    assert handed_over == list(range(PENDING_ENTRIES))
    store.opened.set()
    thread.join(30)
    assert written(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("device", [CPU, CARD], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_disk_that_cannot_be_written_ends_the_filling(
    tmp_path: Path, count: int, device: torch.device
) -> None:
    """Also if the last entry was handed over before the failure is known."""
    store = LatentCache(tmp_path)
    (tmp_path / "latents").write_text("a file in the place of the folder")
    with pytest.raises(VideotuneError, match="cannot be written"):
        put_all(store, count, device=device)


def test_a_kill_leaves_whole_entries_in_their_order(tmp_path: Path) -> None:
    for least in (1, 7, 20):
        folder = tmp_path / str(least)
        child = os.fork()
        if child == 0:
            put_all(LatentCache(folder), 10**6)
            os._exit(1)
        latents = folder / "latents"
        while not latents.is_dir() or len(os.listdir(latents)) < least:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL

        numbers = written(folder)
        assert len(numbers) >= least - 1
        assert numbers == list(range(len(numbers)))
        with LatentCache(folder).write_lock():
            pass
        assert LatentCache(folder).parts() == set()


class Frames:
    """Decoded samples whose fetching is watched."""

    def __init__(self) -> None:
        self.fetched = 0
        self.is_closed = False

    def __call__(self, count: int, fails_at: int = -1) -> Generator[Any, None, None]:
        sample = draw_frames(Window("c" * 32, 0.0, 1.0, SHAPE), 0, 0)
        try:
            for number in range(count):
                self.fetched += 1
                if number == fails_at:
                    raise VideotuneError("b.mp4: decode_error")
                yield sample, np.full((9, 32, 32, 3), number, np.uint8), 0.0
        finally:
            self.is_closed = True


@pytest.mark.parametrize("device", [CPU, CARD], ids=str)
def test_one_sample_is_fetched_ahead_and_an_error_comes_in_its_turn(
    device: torch.device,
) -> None:
    source = Frames()
    seen: list[int] = []

    def look_at_all() -> None:
        for _, frames, waited in stage_ahead(source(5, fails_at=3), device):
            seen.append(int(frames[0, 0, 0, 0]))
            assert waited >= 0
            assert source.fetched <= len(seen) + 1

    with pytest.raises(VideotuneError, match="decode_error"):
        look_at_all()
    assert seen == [0, 1, 2]
    assert source.is_closed


def test_a_fetching_that_is_given_up_closes_its_source() -> None:
    source = Frames()
    staged = stage_ahead(source(5), CARD)
    next(staged)
    staged.close()
    assert source.is_closed
    assert source.fetched <= 2


def test_all_values_of_a_pixel_are_exactly_rounded() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, 3)
    exact = np.arange(256, dtype=np.float32) / np.float32(127.5) - np.float32(1)
    pixels = to_model(values)
    assert pixels.shape == (3, 1, 16, 16)
    assert torch.equal(pixels[2].flatten(), torch.from_numpy(exact))
