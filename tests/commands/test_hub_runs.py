"""A run whose checkpoints are uploaded while it trains, and that goes on elsewhere."""

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from jsonschema import Draft202012Validator

from tests.support.command_line import Patch
from tests.support.command_line import run as shell
from tests.support.damaged_files import limited
from tests.support.dripping_server import dripping
from tests.support.hub_runs import run_hub
from tests.support.run_processes import KILLED, Work, resume, start
from tests.support.run_results import (
    assert_same_run,
    complete,
    facts_of,
    state,
    warnings_of,
)
from videotune import http_limits
from videotune.commands.download_run import download_run, repo_of
from videotune.errors import DONE, VideotuneError
from videotune.files import hash_file, read_json, write_json
from videotune.runs import checkpoint_pusher
from videotune.runs.checkpoint_pusher import CheckpointPusher
from videotune.runs.hub_push import push
from videotune.runs.hub_run import ACCOUNT

ROOT = Path(__file__).parents[2]
SETS = ("steps=8", "save_every=2", "lora.dropout=0.1", "ema=0.7")
SCHEMA = read_json(ROOT / "docs" / "schemas" / "hub-run.schema.json")
PUSH = "push_checkpoints_to=user/run"


@pytest.fixture
def hub(monkeypatch: Patch) -> Iterator[Any]:
    with run_hub(monkeypatch) as server:
        yield server


def steps_there(hub: Any) -> set[int]:
    names = [name for name in hub.files if name.endswith("/COMPLETE")]
    return {int(name.split("/")[1].removeprefix("step-")) for name in names}


def die_when_uploaded(variables: dict[str, str], url: str) -> None:
    """Kill this process in its sixth step, once the Hub has a checkpoint."""
    os.environ.update(variables)
    from videotune.trainer import loop

    train_step = loop.train_step

    def is_uploaded() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/user/run/resolve/main/{ACCOUNT}"):
                return True
        except urllib.error.HTTPError:
            return False

    def step(settings: Any, net: Any, trainable: Any, batch: Any, *more: Any) -> Any:
        if batch.step == 6:
            while not is_uploaded():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(settings, net, trainable, batch, *more)

    loop.train_step = step


def test_a_run_goes_on_elsewhere_bit_for_bit(
    work: Work, hub: Any, tmp_path: Path
) -> None:
    straight = work.finished(*SETS)
    variables = {
        name: os.environ[name]
        for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_XET", "HF_TOKEN")
    }
    settings = work.overrides(*SETS, PUSH)
    killed = start(
        settings,
        work.run,
        first=die_when_uploaded,
        given=(variables, hub.url),
    )
    assert killed.ended() == KILLED, killed.stderr
    # The process that uploads may still be deleting files in it.
    work.run.rename(tmp_path / "gone")

    clips = shutil.copytree(str(settings.data), tmp_path / "other" / "my clips")
    shutil.rmtree(clips / ".videotune-cache", ignore_errors=True)
    (base,) = (text for text in settings.sets if text.startswith("base_model_name"))
    elsewhere = tmp_path / "other" / "run"
    code = shell("resume", "hf://user/run", data=clips, out=elsewhere, set=[base])
    assert code == DONE
    assert min(complete(elsewhere)) in (2, 4)
    assert_same_run(elsewhere, straight, 8)
    assert steps_there(hub) == {8}, "it uploads on from there"
    assert warnings_of(elsewhere) == []


@pytest.fixture
def uploaded(work: Work, hub: Any) -> Any:
    """The Hub with a finished run of the small clips."""
    push(work.finished(*SETS), "user/run", 1)
    return hub


def test_each_file_is_there_once_and_only_the_newest_stay(work: Work, hub: Any) -> None:
    run = work.copy(*SETS)
    removed = [run / "checkpoints" / f"step-{step}" for step in (6, 8)]
    for folder in removed:
        folder.rename(run / folder.name)
    assert push(run, "user/run", 2) == 4
    (run / "step-6").rename(removed[0])
    assert push(run, "user/run", 2) == 6
    assert steps_there(hub) == {4, 6}
    Draft202012Validator(SCHEMA).validate(json.loads(hub.files[ACCOUNT]))
    sent = sum(method == "PUT" for method, *_ in hub.asked)
    assert push(run, "user/run", 1) == 6
    assert steps_there(hub) == {6}
    puts = sum(method == "PUT" for method, *_ in hub.asked)
    assert puts == sent + 1, "the account alone"
    assert not list(run.glob(".push-*"))

    shutil.rmtree(removed[0])  # the run went back to step 4
    assert push(run, "user/run", 5) == 4
    assert steps_there(hub) == {4}


def make_public(hub: Any) -> None:
    hub.private = False


def of_another_run(hub: Any) -> None:
    account = json.loads(hub.files[ACCOUNT])
    hub.files[ACCOUNT] = json.dumps(account | {"run": "0" * 16}).encode()


def of_something_else(hub: Any) -> None:
    hub.files = {"model.safetensors": b"x"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (make_public, "is public"),
        (of_another_run, "holds another run"),
        (of_something_else, r"holds model\.safetensors, and no run"),
    ],
)
def test_no_other_repository_is_written(
    change: Callable[[Any], None], match: str, work: Work, uploaded: Any
) -> None:
    change(uploaded)
    before = dict(uploaded.files)
    with pytest.raises(VideotuneError, match=match):
        push(work.finished(*SETS), "user/run", 1)
    assert uploaded.files == before


def link_config(run: Path) -> None:
    (run / "config.json").rename(run.parent / "secret.json")
    (run / "config.json").symlink_to(run.parent / "secret.json")


def name_other_file(run: Path) -> None:
    (run.parent / "secret.json").write_text("{}")
    marker = run / "checkpoints" / "step-8" / "COMPLETE"
    content = read_json(marker)
    content["files"]["../../../secret.json"] = {"bytes": 2, "hash": "0" * 32}
    write_json(marker, content)


def link_weights(run: Path) -> None:
    weights = run / "checkpoints" / "step-8" / "weights.safetensors"
    weights.rename(run.parent / "secret")
    weights.symlink_to(run.parent / "secret")


@pytest.mark.parametrize("change", [link_config, name_other_file, link_weights])
def test_no_file_outside_of_the_run_is_uploaded(
    change: Callable[[Path], None], work: Work, hub: Any
) -> None:
    run = work.copy(*SETS)
    change(run)
    with pytest.raises(VideotuneError, match=r"link|no file of a checkpoint"):
        push(run, "user/run", 1)
    assert hub.files == {}
    assert not list(run.glob(".push-*"))


def test_a_broken_network_costs_a_warning_and_the_next_try_succeeds(
    work: Work, hub: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(checkpoint_pusher, "TRY_AGAIN", 0.0)
    straight = facts_of(work.finished(*SETS))
    hub.status = {"create": 503}
    run = work.train(*SETS, PUSH)
    assert facts_of(run) == straight
    assert steps_there(hub) == set()

    hub.status = {}
    assert resume(run, "steps=9") == DONE
    assert steps_there(hub) == {9}
    assert not list(run.glob(".push-*"))


def test_an_upload_is_tried_again_and_a_hung_one_is_left(
    work: Work, hub: Any, monkeypatch: Patch
) -> None:
    run = work.copy(*SETS)
    warnings: list[str] = []
    pusher = CheckpointPusher(run, "user/run", 1)
    pusher.warn = warnings.append
    hub.status = {"create": 503}
    save, step = {"kind": "save"}, {"kind": "step"}

    def until(met: Callable[[], Any]) -> None:
        began = time.monotonic()
        while not met():
            pusher.line(step)
            assert time.monotonic() - began < 60
            time.sleep(0.02)

    monkeypatch.setattr(checkpoint_pusher, "TRY_AGAIN", 0.1)
    began = time.monotonic()
    pusher.line(save)
    assert time.monotonic() - began < 0.5, "no step waits"
    until(lambda: pusher._failures == 2)
    assert len(warnings) == 1
    hub.status = {}
    until(lambda: steps_there(hub) == {8} and not pusher._failures)

    hub.stored.clear()
    hub.files.clear()
    hub.hold = 1
    pusher.line(save)
    began = time.monotonic()
    pusher.close(2.0)
    assert time.monotonic() - began < 10
    assert hub.files == {}


def fetch(work: Work, **options: Any) -> Path:
    data = [str(work.overrides().data)]
    return download_run("user/run", data, work.tmp / "fetched", **options)


def test_what_is_fetched_names_nothing_of_the_other_machine(
    work: Work, uploaded: Any
) -> None:
    run = fetch(work)
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert settings["cache_dir"] is None
    assert settings["base_model_name"].startswith(str(run / "elsewhere"))
    assert settings["datasets"][0]["path"] == str(work.overrides().data)
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    account = json.loads(uploaded.files[ACCOUNT])
    assert names == set(account["files"])
    assert state(run, 8).keys() == state(work.finished(*SETS), 8).keys()
    with pytest.raises(VideotuneError, match="already holds a run"):
        fetch(work)


@pytest.mark.parametrize("where", ["headers", "body", "silent"])
def test_a_hub_that_never_finishes_its_answer_holds_no_run(
    where: str, work: Work, hub: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(http_limits, "HUB_SECONDS", 0.5)
    run = work.finished(*SETS)
    with dripping(where) as address, limited(60):
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(VideotuneError, match="user/run"):
            push(run, "user/run", 1)
        with pytest.raises(VideotuneError, match="user/run"):
            fetch(work)
    assert not list(run.glob(".push-*"))
    assert not (work.tmp / "fetched").exists()


def account_of(hub: Any, **files: Any) -> None:
    account = json.loads(hub.files[ACCOUNT])
    account["files"] |= files
    hub.files[ACCOUNT] = json.dumps(account).encode()


def settings_of(hub: Any, **settings: Any) -> None:
    """Change the config of the uploaded run, as somebody who sets a trap would."""
    config = json.loads(hub.files["config.json"])
    config["settings"] |= settings
    replace_file(hub, "config.json", json.dumps(config).encode())


def replace_file(hub: Any, name: str, content: bytes) -> None:
    """Replace a file, with its entry in the account."""
    folder = Path(os.environ["PYTEST_TMP"])
    (folder / "file").write_bytes(content)
    hub.files[name] = content
    entry = {"bytes": len(content), "hash": hash_file(folder / "file")}
    account_of(hub, **{name: entry})


OUTSIDE = {"bytes": 1, "hash": "0" * 32}
MARKER = "checkpoints/step-8/COMPLETE"


def marker_of(hub: Any) -> None:
    marker = json.loads(hub.files[MARKER])
    marker["files"]["../../../../etc/passwd"] = OUTSIDE
    replace_file(hub, MARKER, json.dumps(marker).encode())


TRAPS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a path outside": (
        lambda hub: account_of(hub, **{"../x.json": OUTSIDE}),
        "which no run has there",
    ),
    "a pickle": (
        lambda hub: account_of(hub, **{"checkpoints/step-8/optimizer.pt": OUTSIDE}),
        "which no run has there",
    ),
    "a file that is absent": (
        lambda hub: account_of(hub, **{"checkpoints/step-8/ema.index.json": OUTSIDE}),
        "is not there with the length",
    ),
    "a record of a terabyte": (
        lambda hub: account_of(
            hub, **{"config.json": {"bytes": 1 << 39, "hash": "0" * 32}}
        ),
        "has at most",
    ),
    "other bytes": (
        lambda hub: hub.swap.update(
            {
                "checkpoints/step-8/weights.safetensors": hub.files[
                    "checkpoints/step-8/weights.safetensors"
                ][::-1]
            }
        ),
        "weights.safetensors",
    ),
    "an account that is none": (
        lambda hub: hub.files.update({ACCOUNT: b"[]"}),
        "is not a run of videotune",
    ),
    "no account": (lambda hub: hub.files.pop(ACCOUNT), "holds no run"),
    "a marker that lists others": (marker_of, "COMPLETE|etc/passwd"),
    "code of a package": (
        lambda hub: settings_of(
            hub, optimizer={"name": "colorsys:rgb_to_hsv", "args": {}}
        ),
        "run code of a package",
    ),
    "two datasets": (
        lambda hub: settings_of(hub, datasets=[{"path": "/a"}, {"path": "/b/c"}]),
        r"2 datasets \(a, c\)",
    ),
    "a setting that is none": (lambda hub: settings_of(hub, nonsense=1), "nonsense"),
    "a journal that is torn": (
        lambda hub: replace_file(hub, "journal.jsonl", b"{}\n{}\n"),
        "journal",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_strangers_repository_is_refused_and_leaves_no_run(
    trap: str, work: Work, uploaded: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(work.tmp))
    change, match = TRAPS[trap]
    change(uploaded)
    with pytest.raises(VideotuneError, match=match):
        fetch(work)
    assert not (work.tmp / "fetched").exists()
    assert not (work.tmp / "x.json").exists()


def test_no_path_of_a_strangers_config_is_followed(
    work: Work, uploaded: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(work.tmp))
    settings_of(
        uploaded,
        base_model_name="/secret/base",
        base_loras=[{"file": "../../secret/a.safetensors"}],
        cache_dir="/secret/cache",
        output_model_destination="/secret/out",
        init_from="~/secret/w.safetensors",
        push_checkpoints_to="stranger/run",
        push_to="stranger/run",
        notify=["json://10.0.0.1/x"],
        trackers=["wandb"],
        samples=[{"prompt": "a cat", "image": "/secret/i.png"}],
        sample={"loras": ["/secret/l.safetensors"]},
        sample_metrics={"encoder": "/secret/encoder"},
        transformer={"file": "/secret/t.safetensors"},
    )
    text = (fetch(work) / "config.json").read_text()
    settings = json.loads(text)["settings"]
    assert "/secret" not in json.dumps(settings)
    assert "stranger/run" not in json.dumps(settings)
    assert settings["notify"] == []
    assert settings["trackers"] == []


def test_a_download_that_broke_goes_on(work: Work, uploaded: Any) -> None:
    uploaded.status = {"optimizer": 404}
    with pytest.raises(VideotuneError):
        fetch(work)
    uploaded.status = {}
    uploaded.asked.clear()
    fetch(work)
    assert complete(work.tmp / "fetched") == [8]
    assert not list(work.tmp.glob(".*.download"))


def test_the_address_of_a_run() -> None:
    assert repo_of("hf://user/run") == "user/run"
    assert repo_of("hf:/user/run") == "user/run"
    assert repo_of("runs/first") is None
    for text in ("hf://user", "hf://user/run/../x", "hf:x"):
        with pytest.raises(VideotuneError, match="write hf://USER/NAME"):
            repo_of(text)
