"""Trackers: what the journal says, once more for Weights & Biases, Trackio, MLflow and TensorBoard.

The journal stays what counts: no tracker is read by the training, and one that fails ends no run. Each library finds its
server and its token in its own environment variables; without them it writes to the disk of this machine.
"""

import json
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
from typing import Any, NamedTuple

from videotune.config.load import flatten
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.runs.scalars import scalars
from videotune.runs.tensorboard import TensorBoardWriter

PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The packages that a tracker imports, where they are not its name alone."""

ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
ENVIRONMENT |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Settings of the libraries, unless the user has set them: a step waits for the answer, and their authors hear nothing."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run at its start.

    ``folder``: absolute; ``id``: the same for each process of the run; ``config``: its settings, without paths; ``first``:
    the first step to come.
    """

    folder: Path
    id: str
    project: str
    config: Mapping[str, Any]
    first: int


class PreviewVideo(NamedTuple):
    """A video file and the prompt that it was sampled for."""

    path: Path
    prompt: str


class TrackerClient:
    """A program that shows runs, whose library gets numbers, previews and results. Its methods may raise anything, once.

    ``last``: the newest step that it has already, by name.
    """

    def __init__(self, run: TrackedRun, last: int = -1) -> None:
        self.run = run
        self.last = defaultdict[str, int](lambda: last)

    def line(self, line: Mapping[str, Any]) -> None:
        """Write what it shows of a line of the journal; steps that it has from before a resume are left out."""
        values: dict[str, float | PreviewVideo] = dict(scalars(line))
        match line["kind"]:
            case "sample":
                values[f"samples/seed {line['seed']}"] = PreviewVideo(
                    self.run.folder / line["path"], line["prompt"]
                )
            case "verdict":
                self.result("verdict", line["verdict"] or "no verdict", line["reason"])
            case "end":
                self.result(
                    "recommended_checkpoint",
                    f"step {line['take']['step']}",
                    line["take"]["why"],
                )
        if new := {
            name: value for name, value in values.items() if line["step"] > self.last[name]
        }:
            self.log(line["step"], new)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """Write numbers and previews of a step."""

    def result(self, name: str, word: str, reason: str) -> None:
        """Write what is known of the run by now, in the place of what was known before."""

    def close(self) -> None:
        """Write what waits, and end the run there."""


class WandbTracker(TrackerClient):
    """Weights & Biases, into ``wandb`` of the run's folder; without an API key offline."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb
        from requests.utils import get_netrc_auth

        known = get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        asked = known or {"WANDB_API_KEY", "WANDB_MODE"} & set(os.environ)
        if not asked:  # the library would ask for a key on the terminal
            echo(
                f"wandb: no WANDB_API_KEY, so the run is written offline. Send it: wandb sync {run.folder}/wandb/*"
            )
        self._run = wandb.init(
            project=run.project, id=run.id, name=run.folder.name, dir=run.folder, config=dict(run.config),
            mode=None if asked else "offline", resume="allow", reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True, x_disable_meta=True),
        )  # fmt: skip
        super().__init__(run, self._run.step - 1)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """As ``LoadedAdapter.log``; the library takes no earlier step, of which a save in the background is."""
        from wandb import Video

        own = {
            name: Video(str(x.path), x.prompt) if isinstance(x, PreviewVideo) else x
            for name, x in values.items()
        }
        self._run.log(own, step=max(step, self._run.step))

    def result(self, name: str, word: str, reason: str) -> None:
        """As ``LoadedAdapter.result``; another one than before is an alert too."""
        if self._run.summary.get(name, word) != word:
            self._run.alert(name, f"{word}: {reason}")
        self._run.summary.update({name: word, f"{name}_reason": reason})

    def close(self) -> None:
        """As ``LoadedAdapter.close``."""
        self._run.finish()


class TrackioTracker(TrackerClient):
    """Trackio, in its own database, which ``trackio show`` opens, or on the server or Space of its variables."""

    def __init__(self, run: TrackedRun) -> None:
        with raising_warnings():
            import trackio

            self._run = trackio.init(
                run.project, f"{run.folder.name}-{run.id[:8]}", config=dict(run.config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        super().__init__(run, self._run._next_step - 1)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """As ``LoadedAdapter.log``."""
        from trackio import Video

        with raising_warnings():
            own = {
                name: Video(x.path, x.prompt) if isinstance(x, PreviewVideo) else x
                for name, x in values.items()
            }
            self._run.log(own, step=step)

    def result(self, name: str, word: str, reason: str) -> None:
        """As ``LoadedAdapter.result``: an alert."""
        from trackio import AlertLevel

        with raising_warnings():
            self._run.alert(name, f"{word}: {reason}", AlertLevel.INFO)

    def close(self) -> None:
        """As ``LoadedAdapter.close``."""
        import trackio

        with raising_warnings():
            trackio.finish()


class MlflowTracker(TrackerClient):
    """MLflow, in ``mlflow.db`` and ``mlartifacts`` of the run's folder, or on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in (
            "mlflow",
            "alembic",
            "urllib3",
        ):  # their notes would break the progress bar
            logging.getLogger(name).setLevel(logging.ERROR)
        database = run.folder / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # the library tries a minute long to open a database that it cannot write
            database.open("ab").close()
        self._client = client = MlflowClient(uri or f"sqlite:///{database}")
        found = client.get_experiment_by_name(run.project)
        place = None if uri else (run.folder / "mlartifacts").as_uri()
        experiment = (
            found.experiment_id if found else client.create_experiment(run.project, place)
        )
        before = client.search_runs([experiment], f"tags.videotune = '{run.id}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            client.update_run(self._id, "RUNNING")
            for name in before[0].data.metrics:
                self.last[name] = max(
                    one.step for one in client.get_metric_history(self._id, name)
                )
            return
        self._id = client.create_run(
            experiment, run_name=run.folder.name, tags={"videotune": run.id}
        ).info.run_id
        settings = [Param(key, str(value)[:6000]) for key, value in flatten(run.config).items()]
        for start in range(0, len(settings), 100):  # the most that it takes at once
            client.log_batch(self._id, params=settings[start : start + 100])

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """As ``LoadedAdapter.log``."""
        from mlflow.entities import Metric

        now = round(time() * 1000)
        numbers = [(name, x) for name, x in values.items() if isinstance(x, float)]
        self._client.log_batch(
            self._id, [Metric(name, value, now, step) for name, value in numbers]
        )
        for preview in (x for x in values.values() if isinstance(x, PreviewVideo)):
            self._client.log_artifact(self._id, str(preview.path), f"samples/step-{step}")

    def result(self, name: str, word: str, reason: str) -> None:
        """As ``LoadedAdapter.result``."""
        self._client.set_tag(self._id, name, f"{word}: {reason}")

    def close(self) -> None:
        """As ``LoadedAdapter.close``."""
        self._client.set_terminated(self._id)


@contextmanager
def raising_warnings() -> Iterator[None]:
    """What Trackio prints is not shown, and what it warns of is raised: it reports no failure otherwise."""
    with warnings.catch_warnings(record=True) as seen, redirect_stdout(StringIO()):
        warnings.simplefilter("always", UserWarning)
        yield
    if failed := [str(one.message) for one in seen if "trackio" in str(one.message)]:
        raise OSError(failed[0])


ADAPTERS: Mapping[str, Any] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


class Trackers:
    """The trackers of a run, as one. The first failure of each is a warning, and ends it alone."""

    def __init__(
        self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]
    ) -> None:
        """``warn`` is told in a sentence of what failed."""
        os.environ.update(
            {key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()}
        )
        self._warn = warn
        self._open = dict[str, TrackerClient | TensorBoardWriter]()
        makers = {
            **ADAPTERS,
            "tensorboard": lambda run: TensorBoardWriter(run.folder, run.first, warn),
        }
        for name in dict.fromkeys(names):
            with self._dropping(name):
                self._open[name] = makers[name](run)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """A failure in this block ends a tracker."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            why = without_secrets(str(error).strip() or type(error).__name__).splitlines()[0][
                :300
            ]
            self._warn(
                f"{name} takes no more of this run, which goes on; the journal has all of it: {why}"
            )

    def line(self, line: Mapping[str, Any]) -> None:
        """Hand a line of the journal to each."""
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.line(line)

    def close(self) -> None:
        """Close each; a second time there is none."""
        for name in list(self._open):
            with self._dropping(name):
                self._open.pop(name).close()


def refuse_missing(names: Sequence[str]) -> None:
    """Raise VideotuneError where a package of a tracker is not installed."""
    if missing := [
        name for name in names if not all(map(find_spec, PACKAGES.get(name, (name,))))
    ]:
        remedy = f'pip install "videotune[{missing[0]}]", or leave {missing[0]} out'
        raise VideotuneError(f"trackers: {missing[0]} is not installed: {remedy}")


def without_secrets(text: str) -> str:
    """A library's message without the values of keys and tokens of the environment, and without those in addresses."""
    for name, value in os.environ.items():
        if re.search("(KEY|TOKEN|PASSWORD|SECRET)$", name) and len(value) > 3:
            text = text.replace(value, f"({name})")
    return re.sub(r"(//)[^/@\s]+@", r"\1", text)


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which of each path that is not relative to the working folder the last part is left."""
    return json.loads(re.sub(r'"(?:/|~/|\.\./)(?:[^"]*/)?(?=[^"])', '"', json.dumps(settings)))
