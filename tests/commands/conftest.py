"""Words of a run that takes a second."""

from collections.abc import Callable
from pathlib import Path

import pytest

from videotune.trainer.resolve_config import Overrides


@pytest.fixture
def said(
    small_clips: Path, tiny_bases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Overrides]:
    """Words of a run on the tiny base and the small clips, over one cache; ``data`` may be other clips."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def make(*sets: str, data: Path | None = None) -> Overrides:
        fixed = (
            f"base_model_name={tiny_bases('wan')}",
            f"cache_dir={cache}",
            "resolution=32x32",
            "learning_rate=0.01",
            "lora.rank=2",
            "sample_after=0",
            "validate_every=0",
            "sample_metrics.budget=0",
            "dataloader_threads=0",
            "warmup_steps=0",
        )
        return Overrides(data=str(data or small_clips), sets=(*fixed, *sets))

    return make


@pytest.fixture(scope="session")
def server() -> None:
    """Processes of their own start at once: see forked."""
    from tests import forked

    forked.wake()
