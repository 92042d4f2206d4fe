"""Sum up the steps of a run's journal in little memory: some 70 bytes a step."""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

Curve = tuple["array[int]", "array[float]"]
"""Steps and their values, in order."""

NINTHS = 9
"""Parts of the noise levels [0, 1] by which the error is averaged."""

RECENT = 50
"""How many of the latest steps' lines are kept whole."""

CLIP_DIGITS = 12
"""Digits of a clip's id in the ids of its windows."""


def clip_of(window_id: str) -> str:
    """Return the beginning of a window's id, which names its clip."""
    return window_id.partition("@")[0]


def regularization(check: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the rows of check.json of regularization clips that are used, by the
    beginning of the clip's id.

    Empty if the account gives no kinds: then all clips count as training clips.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for row in (check or {}).get("clips", ()):
        is_regularization = row.get("used") and row.get("kind") == "regularization"
        if is_regularization and row.get("id"):
            rows[str(row["id"])[:CLIP_DIGITS]] = row
    return rows


@dataclass
class StepErrors:
    """The error of what is learnt, by step, where it was finite."""

    mse: Curve = field(default_factory=lambda: _new_curve())
    """The error as a whole."""
    by_noise: list[Curve] = field(
        default_factory=lambda: [_new_curve() for _ in range(NINTHS)]
    )
    """The error in each ninth of the noise levels."""

    def add(self, step: int, errors: Mapping[str, Any]) -> None:
        """Add "mse" and "by_t" of a step."""
        _append(self.mse, step, errors["mse"])
        for ninth, value in enumerate(errors["by_t"][:NINTHS]):
            _append(self.by_noise[ninth], step, value)


class Steps:
    """The steps so far."""

    def __init__(self, aside: Collection[str] = ()) -> None:
        """Begin without a step.

        Args:
            aside: regularization clips, as ``clip_of`` names them. Errors leave out
                steps that show only these.
        """
        self.aside = frozenset(aside)
        self.at = array("I")
        """Numbers of all steps."""
        self.alone = array("I")
        """Steps that showed only regularization clips."""
        self.errors = StepErrors()
        """The error of what is learnt; of the video if the sound is learnt too."""
        self.sound_errors = StepErrors()
        """The error of the sound if both are learnt, else empty."""
        self.norms = _new_curve()
        """The norm of the gradient, where it was finite."""
        self.skipped: dict[int, tuple[str, ...]] = {}
        """Windows of each step that was not applied."""
        self.scale_searches: set[int] = set()
        """Those of them in which float16's loss scale was too large."""
        self.windows: Counter[str] = Counter()
        """How often each window was shown."""
        self.seconds: dict[str, float] = {}
        """Seconds of all steps, by phase."""
        self.first: Mapping[str, Any] | None = None
        """The first step's line."""
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        """The latest steps' lines."""

    @property
    def mse(self) -> Curve:
        """The error of what is learnt, or of the video."""
        return self.errors.mse

    @property
    def by_noise(self) -> list[Curve]:
        """The same in each ninth of the noise levels."""
        return self.errors.by_noise

    @property
    def last(self) -> int:
        """The last step, 0 if there is none."""
        return self.at[-1] if self.at else 0

    @property
    def num_samples(self) -> int:
        """How many samples were shown. Steps may differ in theirs."""
        return self.windows.total()

    @property
    def clips(self) -> Counter[str]:
        """How often each clip was shown, over all of its windows."""
        views: Counter[str] = Counter()
        for window_id, count in self.windows.items():
            views[clip_of(window_id)] += count
        return views

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a step's line of the journal, as ``schemas.parse_line`` checks it."""
        step = line["step"]
        window_ids = line["window_ids"]
        self.at.append(step)
        views = self.windows
        for window_id in (
            window_ids
        ):  # faster than Counter.update, which first asks what it was given
            views[window_id] = views.get(window_id, 0) + 1
        for phase, spent in line["seconds"].items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        if line.get("skipped"):
            self.skipped[step] = tuple(window_ids)
        if is_loss_scale_overflow(line):
            self.scale_searches.add(step)

        _append(self.norms, step, line["grad_norm"])
        if self._shows_only_regularization(window_ids):
            self.alone.append(step)
        else:
            self.errors.add(step, line)
            if "sound" in line:
                self.sound_errors.add(step, line["sound"])

        if self.first is None:
            self.first = line
        self.recent.append(line)

    def _shows_only_regularization(self, window_ids: Collection[str]) -> bool:
        if not self.aside or not window_ids:
            return False
        return all(clip_of(window_id) in self.aside for window_id in window_ids)


def is_loss_scale_overflow(line: Mapping[str, Any]) -> bool:
    """Return whether a step was skipped only because float16's loss scale was too large.

    Its loss was finite, and the scale can still fall. Such a step says nothing against
    the run.
    """
    loss = line["loss"]
    if not line.get("skipped") or loss is None or not isfinite(loss):
        return False
    return line.get("loss_scale", 0.0) > 1


def _new_curve() -> Curve:
    return array("I"), array("d")


def _append(curve: Curve, step: int, value: float | None) -> None:
    """Append a value if it is finite."""
    if value is not None and -inf < value < inf:
        steps, values = curve
        steps.append(step)
        values.append(value)
