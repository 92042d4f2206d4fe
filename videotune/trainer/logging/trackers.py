"""Trackers: what the journal says, once more for Weights & Biases, Trackio, MLflow and TensorBoard.

The journal stays what counts: no tracker is read by the training, and one that fails ends no run. Each library finds its
server and its token in its own environment variables; without them it writes to the disk of this machine.
"""

import logging
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from time import time
from typing import Any, Protocol

from videotune.config.load import flatten
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.trainer.logging.scalars import scalars
from videotune.trainer.logging.tensorboard import TensorBoardWriter

PACKAGES = {
    "tensorboard": ("tensorboard",), "wandb": ("wandb",), "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}  # fmt: skip
"""The packages of each extra that the tracker imports."""

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false",  # nothing goes to the libraries' authors
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a step waits for the answer
}  # fmt: skip
"""Settings of the libraries, unless the user has set them."""

_SECRET = re.compile("(KEY|TOKEN|PASSWORD|SECRET)$")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run at its start.

    ``id``: the same for each process of the run; ``config``: its settings, without paths; ``first``: the first step to come.
    """

    folder: Path
    id: str
    project: str
    config: Mapping[str, Any]
    first: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """A program that shows runs. Its methods may raise anything, once."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Write what it shows of a line of the journal."""

    def close(self) -> None:
        """Write what waits, and end the run there."""


class Adapter:
    """Hands numbers, previews and results to a library; ``last``: the newest step that it has already, by name."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.last: Mapping[str, int] = defaultdict(lambda: -1)

    def line(self, line: Mapping[str, Any]) -> None:
        """As ``Tracker.line``; steps that the library has from before a resume are left out."""
        numbers = {tag: value for tag, value in scalars(line).items() if line["step"] > self.last[tag]}
        if numbers:
            self.numbers(line["step"], numbers)
        match line["kind"]:
            case "sample":
                name = f"samples/seed {line['seed']}"
                if line["step"] > self.last[name]:
                    self.preview(line["step"], name, self.run.folder / line["path"], line["prompt"])
            case "verdict":
                self.result("verdict", f"{line['verdict'] or 'no verdict'}: {line['reason']}")
            case "end":
                self.result("recommended_checkpoint", f"step {line['take']['step']}: {line['take']['why']}")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step."""
        raise NotImplementedError

    def preview(self, step: int, name: str, path: Path, prompt: str) -> None:
        """Write a video."""
        raise NotImplementedError

    def result(self, name: str, text: str) -> None:
        """Write what is known of the run by now, in the place of what was known before."""
        raise NotImplementedError


class WandbTracker(Adapter):
    """Weights & Biases, into ``wandb`` of the run's folder; without an API key offline."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        import wandb
        from requests.utils import get_netrc_auth

        address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        asked = {"WANDB_API_KEY", "WANDB_MODE"} & set(os.environ) or get_netrc_auth(address)
        if not asked:  # the library would ask for a key on the terminal
            echo(
                f"wandb: no WANDB_API_KEY, so the run is written offline; send it with: wandb sync {run.folder}/wandb/*"
            )
        quiet = {"silent": True, "console": "off", "save_code": False, "disable_git": True, "x_disable_meta": True}
        self._run = wandb.init(
            project=run.project, id=run.id, name=run.name, dir=run.folder, config=dict(run.config), resume="allow",
            mode=None if asked else "offline", reinit="create_new", settings=wandb.Settings(**quiet),
        )  # fmt: skip
        begun = self._run.step - 1
        self.last = defaultdict(lambda: begun)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """As ``Adapter.numbers``."""
        self._log(step, values)

    def preview(self, step: int, name: str, path: Path, prompt: str) -> None:
        """As ``Adapter.preview``."""
        from wandb import Video

        self._log(step, {name: Video(str(path), caption=prompt, format="mp4")})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """A save that was written in the background is of an earlier step; the library takes none."""
        self._run.log(dict(values), step=max(step, self._run.step))

    def result(self, name: str, text: str) -> None:
        """As ``Adapter.result``; a verdict that has changed is an alert too."""
        if name == "verdict" and self._run.summary.get(name, text).split(":")[0] != text.split(":")[0]:
            self._run.alert(name, text)
        self._run.summary[name] = text

    def close(self) -> None:
        """As ``Tracker.close``."""
        self._run.finish()


class TrackioTracker(Adapter):
    """Trackio, in its own database, which ``trackio show`` opens, or on the server or Space of its variables."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        with raising_warnings():
            import trackio

            self._run = trackio.init(
                run.project, name=f"{run.name}-{run.id[:8]}", config=dict(run.config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        begun = self._run._next_step - 1
        self.last = defaultdict(lambda: begun)
        self._verdict = ""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """As ``Adapter.numbers``."""
        with raising_warnings():
            self._run.log(dict(values), step=step)

    def preview(self, step: int, name: str, path: Path, prompt: str) -> None:
        """As ``Adapter.preview``."""
        from trackio import Video

        with raising_warnings():
            self._run.log({name: Video(path, caption=prompt)}, step=step)

    def result(self, name: str, text: str) -> None:
        """As ``Adapter.result``: an alert, where it is another than the one before."""
        if text.split(":")[0] != self._verdict:
            self._verdict = text.split(":")[0]
            with raising_warnings():
                self._run.alert(name, text)

    def close(self) -> None:
        """As ``Tracker.close``."""
        import trackio

        with raising_warnings():
            trackio.finish()


class MlflowTracker(Adapter):
    """MLflow, in ``mlflow.db`` and ``mlartifacts`` of the run's folder, or on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "alembic", "urllib3"):  # their notes would break the progress bar
            logging.getLogger(name).setLevel(logging.ERROR)

        folder, uri = run.folder.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # the library tries a minute long to open a database that it cannot write
            (folder / "mlflow.db").open("ab").close()
        self._client = client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        found = client.get_experiment_by_name(run.project)
        place = None if uri else (folder / "mlartifacts").as_uri()
        experiment = found.experiment_id if found else client.create_experiment(run.project, place)
        before = client.search_runs([experiment], f"tags.`videotune.run` = '{run.id}'", max_results=1)
        tags = {"videotune.run": run.id}
        self._id = (before[0] if before else client.create_run(experiment, run_name=run.name, tags=tags)).info.run_id
        if before:
            client.update_run(self._id, "RUNNING")
            history = {name: client.get_metric_history(self._id, name) for name in before[0].data.metrics}
            self.last = defaultdict(lambda: -1, {name: max(one.step for one in own) for name, own in history.items()})
        settings = [] if before else [Param(key, str(value)[:6000]) for key, value in flatten(run.config).items()]
        for start in range(0, len(settings), 100):  # the most that it takes at once
            client.log_batch(self._id, params=settings[start : start + 100])

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """As ``Adapter.numbers``."""
        from mlflow.entities import Metric

        now = round(time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def preview(self, step: int, name: str, path: Path, prompt: str) -> None:
        """As ``Adapter.preview``."""
        self._client.log_artifact(self._id, str(path), f"samples/step-{step}")

    def result(self, name: str, text: str) -> None:
        """As ``Adapter.result``."""
        self._client.set_tag(self._id, name, text)

    def close(self) -> None:
        """As ``Tracker.close``."""
        self._client.set_terminated(self._id)


@contextmanager
def raising_warnings() -> Iterator[None]:
    """What Trackio prints is not shown, and what it warns of is raised: it reports no failure otherwise."""
    with warnings.catch_warnings(record=True) as seen, redirect_stdout(StringIO()):
        warnings.simplefilter("always", UserWarning)
        yield
    if failed := [str(one.message) for one in seen if "trackio" in str(one.message)]:
        raise OSError(failed[0])


ADAPTERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker, "trackio": TrackioTracker, "mlflow": MlflowTracker,
}  # fmt: skip


class Trackers:
    """The trackers of a run, as one. The first failure of each is a warning, and ends it alone."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]) -> None:
        """``warn`` is told in a sentence of what failed."""
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self._warn, self._open = warn, dict[str, Tracker]()
        for name in dict.fromkeys(names):
            self._try(name, lambda name=name: self._open.update({name: self._made(name, run)}))  # type: ignore[misc]

    def _made(self, name: str, run: TrackedRun) -> Tracker:
        return TensorBoardWriter(run.folder, run.first, self._warn) if name == "tensorboard" else ADAPTERS[name](run)

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._open.pop(name, None)
            why = without_secrets(str(error).strip() or type(error).__name__).splitlines()[0][:300]
            self._warn(f"{name} takes no more of this run, which goes on; the journal has all of it: {why}")

    def line(self, line: Mapping[str, Any]) -> None:
        """Hand a line of the journal to each."""
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.line(line))  # type: ignore[misc]

    def close(self) -> None:
        """Close each; a second time there is none."""
        for name in list(self._open):
            self._try(name, self._open.pop(name).close)


def refuse_missing(names: Sequence[str]) -> None:
    """Raise VideotuneError where a package of a tracker is not installed."""
    for name in names:
        if missing := [package for package in PACKAGES[name] if find_spec(package) is None]:
            raise VideotuneError(
                f'trackers: {name} needs the package {missing[0]}, which is not installed: pip install "videotune[{name}]", '
                f"or leave {name} out"
            )


def without_secrets(text: str) -> str:
    """A library's message without the values of keys and tokens of the environment, and without those in addresses."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) > 3:
            text = text.replace(value, f"({name})")
    return re.sub(r"(//)[^/@\s]+@", r"\1", text)


def without_paths(value: Any, shared: Callable[[str], str]) -> Any:
    """Settings with ``shared`` of each text, which leaves of a local path what others may see."""
    if isinstance(value, Mapping):
        return {key: without_paths(inner, shared) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_paths(inner, shared) for inner in value]
    return shared(value) if isinstance(value, str) else value
