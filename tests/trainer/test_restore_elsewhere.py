"""What processes and devices other than the first one get: the count of skipped steps
on a resume, and a second try for a text encoder that does not fit.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.run_parts import fill
from tests.support.trainers import Lab, job_of
from videotune.distributed import DistributedContext
from videotune.errors import DoesNotFit
from videotune.latent_cache.store import LatentCache
from videotune.trainer.build import open_models
from videotune.trainer.restoring import restore


@dataclass(frozen=True)
class SecondOfTwo(DistributedContext):
    """A second process whose main process sends 3."""

    rank: int = 1
    size: int = 2

    def all_gather(self, value: Any) -> list[Any]:
        return [3, value]


def test_a_second_process_counts_skipped_steps_from_the_main_one_s_journal() -> None:
    """Its own history is not cut to the checkpoint; all must give up at one step."""
    trainer: Any = SimpleNamespace(
        run=Path("run"),
        dist=SecondOfTwo(),
        journal=SimpleNamespace(history=SimpleNamespace(skipped_at_the_end=7)),
        skipped_in_a_row=0,
    )
    opened: Any = SimpleNamespace(checkpoint=None)
    restore(trainer, opened, branch=False)
    assert (trainer.first_step, trainer.skipped_in_a_row) == (1, 3)


@pytest.mark.parametrize("fits_streamed", [True, False])
def test_a_text_encoder_without_room_to_encode_is_streamed(
    tiny_bases: Any,
    small_clips: Path,
    tmp_path: Path,
    fits_streamed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Loading it fits here; its pass over the first caption does not."""
    lab = Lab(tiny_bases("wan"), small_clips, tmp_path / "cache", tmp_path)
    job = replace(job_of(lab), notes=())
    family: Any = open_models(job.spec, job.base, job.config)
    encode = family.encode_text
    tries = []

    def encode_text(captions: list[str]) -> Any:
        tries.append(family.stream_text is not None)
        if not tries[-1] or not fits_streamed:
            raise torch.OutOfMemoryError("no room")
        return encode(captions)

    family.encode_text = encode_text
    free = family.free
    freed: list[str] = []

    def free_part(part: str) -> None:
        if family.stream_text is None and tries == [False]:
            freed.append(part)
        free(part)

    family.free = free_part
    store = LatentCache(lab.cache)
    if fits_streamed:
        fill(job, family, store)
        assert sum(entry.kind == "text" for entry in store.entries()) == len(tries) - 1
    else:
        with pytest.raises(DoesNotFit):
            fill(job, family, store)
        assert tries == [False, True]
    assert freed[-2:] == ["text_encoder", "vae"], "their memory is for the second try"
    assert tries[0] is False
    assert all(tries[1:])
    assert family.stream_text is None
    assert "streamed from host memory" in capsys.readouterr().err
