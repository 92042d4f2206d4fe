"""Whether a disk has room for a run is checked to the byte, before the run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from videotune.console import size
from videotune.errors import DoesNotFit
from videotune.trainer.saving import SPARE, refuse_small_disk

CHECKPOINT = 3000
NEEDED = 2 * CHECKPOINT + SPARE
WHOLE_RUN = NEEDED + 5000


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that the disk has this many free bytes."""

    def set_bytes(free: int) -> None:
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

    return set_bytes


def test_two_checkpoints_need_their_room_to_the_byte(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    disk = {"checkpoint_bytes": CHECKPOINT, "checkpoints": 9, "run_bytes": WHOLE_RUN}
    set_free(NEEDED)
    refuse_small_disk(tmp_path / "run", disk)
    set_free(NEEDED - 1)
    sizes = f"two checkpoints need {size(NEEDED)}, and {size(NEEDED - 1)} are free"
    with pytest.raises(DoesNotFit, match=f"^{tmp_path / 'run'}: {sizes}"):
        refuse_small_disk(tmp_path / "run", disk)


def test_room_for_some_checkpoints_of_a_run_is_a_warning(
    tmp_path: Path,
    set_free: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = {"checkpoint_bytes": CHECKPOINT, "checkpoints": 9, "run_bytes": WHOLE_RUN}
    set_free(WHOLE_RUN)
    refuse_small_disk(tmp_path / "run", disk)
    assert "".join(capsys.readouterr()) == ""
    set_free(WHOLE_RUN - 1)
    refuse_small_disk(tmp_path / "run", disk)
    needed = f"9 checkpoints and the export need {size(WHOLE_RUN)}"
    free = f"{size(WHOLE_RUN - 1)} are free in {tmp_path}"
    line = "".join(capsys.readouterr())
    assert line.startswith(f"warning: {needed}, and {free}: ")


def test_a_plan_that_does_not_know_the_run_s_size_refuses_nothing(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    set_free(0)
    refuse_small_disk(tmp_path, {"checkpoint_bytes": CHECKPOINT})
