"""Settings of a run that takes a second, and finished runs of them."""

import shutil
from pathlib import Path

import pytest

from tests.support.command_line import Bases, train
from tests.support.run_processes import Finished, Make, Work
from videotune.errors import DONE
from videotune.job.overrides import Overrides


@pytest.fixture(scope="session")
def overrides(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    """Settings of a run on a tiny base (its family and variant) and the small clips (or
    others), over one cache.
    """
    cache = tmp_path_factory.getbasetemp() / "cache"
    quiet = (
        "sample_after=0",
        "validate_every=0",
        "sample_metrics.budget=0",
        "dataloader_threads=0",
        "warmup_steps=0",
    )
    fixed = (
        f"cache_dir={cache}",
        "resolution=32x32",
        "learning_rate=0.01",
        "lora.rank=2",
        *quiet,
    )

    def make(
        *sets: str, data: Path | None = None, base: tuple[str, ...] = ("wan",)
    ) -> Overrides:
        model = f"base_model_name={tiny_bases(*base)}"
        return Overrides(data=str(data or small_clips), sets=(model, *fixed, *sets))

    return make


@pytest.fixture(scope="session")
def finished(overrides: Make, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run folder of these settings, trained once in a session; a test that changes
    it copies it first.
    """
    runs: dict[object, Path] = {}

    def get(*sets: str, **more: tuple[str, ...]) -> Path:
        name = (sets, *more.items())
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp("finished") / "run"
            assert train(overrides(*sets, **more), runs[name]) == DONE
        return runs[name]

    return get


@pytest.fixture
def clips(small_clips: Path, tmp_path: Path) -> Path:
    """The small clips, for one test alone."""
    return shutil.copytree(
        small_clips,
        tmp_path / "data" / "clips",
        ignore=shutil.ignore_patterns(".videotune-cache"),
    )


@pytest.fixture
def work(overrides: Make, finished: Finished, tmp_path: Path) -> Work:
    return Work(overrides, finished, tmp_path)


@pytest.fixture(scope="session")
def server() -> None:
    """Processes of their own start at once: see forked."""
    from tests.support import fork_server

    fork_server.wake()
