"""Copy the journal to Weights & Biases, Trackio, MLflow and TensorBoard.

The journal stays the record: the training reads no tracker, and a tracker that fails
does not end the run. Each library finds its server and its token in its own environment
variables; without them it writes to the disk of this machine.
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

from videotune.config.nested_keys import flatten
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.runs.journal import shown_verdict
from videotune.runs.scalars import scalars
from videotune.runs.tensorboard import TensorBoardWriter
from videotune.sqlite_files import refuse_leading_files

PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The packages that a tracker imports, if they are more than its name."""

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
ENVIRONMENT |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Settings of the libraries, unless the user has set them: short waits, because a step
waits for the answer, and no telemetry.
"""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets of a run at its start."""

    folder: Path
    """The run folder, absolute."""
    id: str
    """The same for each process of the run."""
    project: str
    config: Mapping[str, Any]
    """The run's settings, without paths."""
    first: int
    """The first step to come."""


class PreviewVideo(NamedTuple):
    """A video file and the prompt that it was sampled for."""

    path: Path
    prompt: str


class TrackerClient:
    """Send numbers, previews and results to the library of a program that shows runs.

    Methods may raise anything, once.
    """

    def __init__(self, run: TrackedRun, last: int = -1) -> None:
        self.run = run
        self.last = defaultdict[str, int](lambda: last)
        """The newest step that the program has, by name of the value."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Send what the program shows of a line of the journal.

        Steps that it has from before a resume are left out.
        """
        values: dict[str, float | PreviewVideo] = dict(scalars(line))
        match line["kind"]:
            case "sample":
                values[f"samples/seed {line['seed']}"] = PreviewVideo(
                    self.run.folder / line["path"], line["prompt"]
                )
            case "verdict":
                self.result("verdict", shown_verdict(line), line["reason"])
            case "end":
                self.result(
                    "recommended_checkpoint",
                    f"step {line['take']['step']}",
                    line["take"]["why"],
                )
        step = line.get("step", 0)
        new = {name: value for name, value in values.items() if step > self.last[name]}
        if new:
            self.log(step, new)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """Send numbers and previews of a step."""

    def result(self, name: str, value: str, reason: str) -> None:
        """Send a result of the run, in place of the one before."""

    def close(self) -> None:
        """Send what waits, and end the run there."""


class WandbTracker(TrackerClient):
    """Weights & Biases, into ``wandb`` of the run's folder; without an API key offline."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb
        from requests.utils import get_netrc_auth

        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        is_configured = get_netrc_auth(server) or {"WANDB_API_KEY", "WANDB_MODE"} & set(
            os.environ
        )
        if not is_configured:  # the library would ask for a key on the terminal
            echo(
                "wandb: there is no WANDB_API_KEY, so the run is written offline. "
                f"Send it with: wandb sync {run.folder}/wandb/*"
            )
        self._run = wandb.init(
            project=run.project, id=run.id, name=run.folder.name, dir=run.folder, config=dict(run.config),
            mode=None if is_configured else "offline", resume="allow", reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True, x_disable_meta=True),
        )  # fmt: skip
        super().__init__(run, self._run.step - 1)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """Send values.

        The library takes no earlier step, as that of a save in the background is.
        """
        from wandb import Video

        converted: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, PreviewVideo):
                converted[name] = Video(str(value.path), value.prompt)
            else:
                converted[name] = value
        self._run.log(converted, step=max(step, self._run.step))

    def result(self, name: str, value: str, reason: str) -> None:
        """Send a result. If it differs from the one before, send an alert, too."""
        if self._run.summary.get(name, value) != value:
            self._run.alert(name, f"{value}: {reason}")
        self._run.summary.update({name: value, f"{name}_reason": reason})

    def close(self) -> None:
        """Send what waits, and end the run there."""
        self._run.finish()


class TrackioTracker(TrackerClient):
    """Trackio, in its own database, which ``trackio show`` opens, or on the server or
    Space of its variables.
    """

    def __init__(self, run: TrackedRun) -> None:
        with raising_warnings():
            import trackio

            self._run = trackio.init(
                run.project, f"{run.folder.name}-{run.id[:8]}", config=dict(run.config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        super().__init__(run, self._run._next_step - 1)

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """Send values."""
        from trackio import Video

        with raising_warnings():
            converted: dict[str, Any] = {}
            for name, value in values.items():
                if isinstance(value, PreviewVideo):
                    converted[name] = Video(value.path, value.prompt)
                else:
                    converted[name] = value
            self._run.log(converted, step=step)

    def result(self, name: str, value: str, reason: str) -> None:
        """Send a result as an alert."""
        from trackio import AlertLevel

        with raising_warnings():
            self._run.alert(name, f"{value}: {reason}", AlertLevel.INFO)

    def close(self) -> None:
        """Send what waits, and end the run there."""
        import trackio

        with raising_warnings():
            trackio.finish()


class MlflowTracker(TrackerClient):
    """MLflow, in ``mlflow.db`` and ``mlartifacts`` of the run's folder, or on the
    server of MLFLOW_TRACKING_URI.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Their notes would break the progress bar.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)

        database = run.folder / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None
        if not uri:
            refuse_leading_files(database)
            # The library would try for a minute to open a database that it cannot
            # write.
            database.open("ab").close()
            artifacts = (run.folder / "mlartifacts").as_uri()
        client = MlflowClient(uri or f"sqlite:///{database}")
        self._client = client

        experiment = client.get_experiment_by_name(run.project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = client.create_experiment(run.project, artifacts)

        # 1. Continue a run that an earlier process has begun.
        earlier_runs = client.search_runs(
            [experiment_id], f"tags.videotune = '{run.id}'", max_results=1
        )
        if earlier_runs:
            self._id = earlier_runs[0].info.run_id
            client.update_run(self._id, "RUNNING")
            for name in earlier_runs[0].data.metrics:
                history = client.get_metric_history(self._id, name)
                self.last[name] = max(metric.step for metric in history)
            return

        # 2. Or begin one, with at most 100 settings at a time.
        new_run = client.create_run(
            experiment_id, run_name=run.folder.name, tags={"videotune": run.id}
        )
        self._id = new_run.info.run_id
        settings = [
            Param(key, str(value)[:6000]) for key, value in flatten(run.config).items()
        ]
        for start in range(0, len(settings), 100):
            client.log_batch(self._id, params=settings[start : start + 100])

    def log(self, step: int, values: Mapping[str, float | PreviewVideo]) -> None:
        """Send values."""
        from mlflow.entities import Metric

        now = round(time() * 1000)
        metrics = []
        videos = []
        for name, value in values.items():
            if isinstance(value, PreviewVideo):
                videos.append(value)
            else:
                metrics.append(Metric(name, value, now, step))
        self._client.log_batch(self._id, metrics)
        for video in videos:
            self._client.log_artifact(self._id, str(video.path), f"samples/step-{step}")

    def result(self, name: str, value: str, reason: str) -> None:
        """Send a result as a tag."""
        self._client.set_tag(self._id, name, f"{value}: {reason}")

    def close(self) -> None:
        """Send what waits, and end the run there."""
        self._client.set_terminated(self._id)


@contextmanager
def raising_warnings() -> Iterator[None]:
    """Hide what Trackio prints and raise what it warns of, because it reports failures
    in no other way.
    """
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()):
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if "trackio" in str(warning.message):
            raise OSError(str(warning.message))


CLIENTS: Mapping[str, Any] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


class Trackers:
    """The trackers of a run, as one.

    The first failure of a tracker is a warning, and ends only that tracker.
    """

    def __init__(
        self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]
    ) -> None:
        """Open the trackers. ``warn`` is called with a sentence on each failure."""
        os.environ.update(
            {key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()}
        )
        self._warn = warn
        self._open = dict[str, TrackerClient | TensorBoardWriter]()
        makers = {
            **CLIENTS,
            "tensorboard": lambda run: TensorBoardWriter(run.folder, run.first, warn),
        }
        for name in dict.fromkeys(names):
            with self._dropping(name):
                self._open[name] = makers[name](run)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """End a tracker if the block fails."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            message = str(error).strip() or type(error).__name__
            reason = without_secrets(message).splitlines()[0][:300]
            self._warn(
                f"{name} gets nothing more of this run, which continues; the journal has all of it: {reason}"
            )

    def line(self, line: Mapping[str, Any]) -> None:
        """Send a line of the journal to each."""
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.line(line)

    def close(self) -> None:
        """Close each, once."""
        for name in list(self._open):
            with self._dropping(name):
                self._open.pop(name).close()


def refuse_missing(names: Sequence[str]) -> None:
    """Raise VideotuneError if a package of a tracker is not installed."""
    for name in names:
        packages = PACKAGES.get(name, (name,))
        if not all(find_spec(package) for package in packages):
            raise VideotuneError(
                f"trackers: {name} is not installed. Install it from a checkout with "
                f'`.venv/bin/pip install -c .venv/constraints.txt -e ".[{name}]"`, or leave {name} out'
            )


def without_secrets(text: str) -> str:
    """Remove the values of keys and tokens of the environment, and those in addresses,
    from a library's message.
    """
    for name, value in os.environ.items():
        if re.search("(KEY|TOKEN|PASSWORD|SECRET)$", name) and len(value) > 3:
            text = text.replace(value, f"({name})")
    return re.sub(r"(//)[^/@\s]+@", r"\1", text)


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which only the last part is left of each path that leads out
    of the working folder.
    """
    return json.loads(
        re.sub(r'"(?:/|~/|\.\./)(?:[^"]*/)?(?=[^"])', '"', json.dumps(settings))
    )
