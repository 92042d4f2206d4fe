"""What the tests of batches share: a job on a tiny Wan, its family, and its filled source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import fill
from videotune.latent_cache.batches import Source
from videotune.latent_cache.store import Store
from videotune.trainer.components import make_objective, make_source
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import Job, open_job

Make = Callable[..., tuple[Job, Any, Source]]


@pytest.fixture
def make(small_clips: Path, tiny_bases: Callable[..., Path], tiny_family: Callable[..., Any], tmp_path: Path) -> Make:
    """A job on a kind of Wan, its family, and its filled source."""

    def get(variant: str, *sets: str) -> tuple[Job, Any, Source]:
        words = (f"base_model_name={tiny_bases('wan', variant)}", f"cache_dir={tmp_path}", "resolution=32x32")
        sets = (*words, "batch_size=4", "seed=5", "dataloader_threads=0", *sets)
        job = open_job(*resolve_config(Overrides(data=str(small_clips), sets=sets)))
        family, store = tiny_family("wan", variant=variant), Store(tmp_path)
        fill(job, family, store)
        return job, family, make_source(job, family, store, make_objective(job.spec, job.config))

    return get
