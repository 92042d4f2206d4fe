"""Configs of small runs, and the same run in one process that nothing disturbs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import train
from tests.support.elastic import Work, write_config
from videotune.errors import DONE
from videotune.job.overrides import Overrides

WorkOf = Callable[..., Work]
Undisturbed = Callable[[int, int], Path]


@pytest.fixture(scope="session")
def elastic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture
def work_of(
    elastic_folder: Path,
    small_clips: Path,
    tiny_bases: Callable[[str], Path],
    tmp_path: Path,
) -> WorkOf:
    """The number of steps, those between checkpoints, and the processes that share a sample
    -> a run of one sample in each such group.
    """

    def get(steps: int, save_every: int = 5, context: int = 1) -> Work:
        config = write_config(
            elastic_folder,
            small_clips,
            tiny_bases("wan"),
            steps=steps,
            save_every=save_every,
            context=context,
        )
        return Work(config, tmp_path / "run")

    return get


@pytest.fixture(scope="session")
def undisturbed(
    elastic_folder: Path, small_clips: Path, tiny_bases: Callable[[str], Path]
) -> Undisturbed:
    """Steps and samples a step -> a run of one process, made once."""

    def get(steps: int, samples: int) -> Path:
        run = elastic_folder / f"undisturbed-{steps}-{samples}"
        if not run.exists():
            config = write_config(
                elastic_folder,
                small_clips,
                tiny_bases("wan"),
                steps=steps,
                samples=samples,
            )
            assert train(Overrides(config=config), run) == DONE
        return run

    return get
