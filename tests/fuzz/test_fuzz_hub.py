"""Damaged files of a run that was fetched from the Hub, and of one that is bundled:
each is refused in a sentence, or read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import train
from tests.support.damaged_files import COUNT, try_each
from videotune.commands.bundle import write_bundle
from videotune.commands.download_run import _check, _make_local
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.hub_push import _account_of, _records, run_id
from videotune.runs.hub_run import ACCOUNT, read_account

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(
    small_clips: Path,
    tiny_bases: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of two steps with a validation."""
    home = tmp_path_factory.mktemp("fuzz hub")
    sets = (
        f"base_model_name={tiny_bases('wan')}",
        f"cache_dir={home / 'cache'}",
        *("resolution=32x32", "lora.rank=2", "steps=2", "validate_every=2"),
        *("sample_after=0", "sample_metrics.budget=0", "dataloader_threads=0"),
        'notify=["ntfy://topic"]',
        'notify_on=["failed"]',
    )
    assert train(Overrides(data=str(small_clips), sets=sets), home / "run") == DONE
    return home / "run"


def test_accounts(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    (checkpoint,) = complete_checkpoints(run)
    records = _records(run, folder)
    identity = run_id(records["journal.jsonl"].read_bytes())
    _, account = _account_of(checkpoint, records, {}, identity, 1)
    path = tmp_path / ACCOUNT
    path.write_text(json.dumps(account))

    def read() -> None:
        read_account(path, "user/run")

    read()
    assert try_each([path], read)["refused"] > 0


def test_fetched_runs(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "new"))
    files = [copy / f"{name}.json" for name in ("config", "check", "plan")]
    files += [copy / "journal.jsonl"]
    files += sorted((copy / "checkpoints" / "step-2").iterdir())

    def read() -> None:
        _check(copy, 2, "user/run")
        _make_local(copy, tmp_path / "run", "user/run", ["clips"])

    assert try_each(files, read)["refused"] > 0


def test_bundles(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    out = tmp_path / "bundle.zip"
    names = ("config", "check", "plan", "heartbeat")
    files = [copy / f"{name}.json" for name in names] + [copy / "journal.jsonl"]

    def read() -> None:
        out.unlink(missing_ok=True)
        write_bundle(out, copy)

    read()
    assert try_each(files, read, COUNT // 4)["read"] > 0
