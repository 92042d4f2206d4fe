"""What the steps of a run's journal say together, in little memory: some 70 bytes a step."""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

Curve = tuple["array[int]", "array[float]"]
"""Steps and their values, in order."""

NINTHS = 9
"""Parts of the noise levels of [0, 1] by which the error is told."""

RECENT = 50
"""So many of the latest steps' lines are kept whole."""


def clip_of(window: str) -> str:
    """The beginning of a window's id is its clip's."""
    return window.partition("@")[0]


def regularization(check: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """The rows of check.json of regularization clips that are used, by the beginning of the clip's id, as windows name it.

    Empty where the account gives no kinds: then all clips count as training clips.
    """
    rows = (check or {}).get("clips", ())
    used = (
        row
        for row in rows
        if row.get("used") and row.get("kind") == "regularization" and row.get("id")
    )
    return {str(row["id"])[:12]: row for row in used}


class Steps:
    """The steps so far.

    ``at``: their numbers; ``mse``, ``by_noise`` (of nine ninths of the noise levels) and ``norms``: the error and the length
    of the gradient, where they were finite; ``alone``: steps that showed ``aside`` clips alone, which the errors leave out.
    ``skipped``: the windows of each step that was not applied. ``windows``: how often each was shown; ``seconds``: of all
    steps by what was done; ``first`` and ``recent``: lines.
    """

    def __init__(self, aside: Collection[str] = ()) -> None:
        """``aside``: regularization clips, as ``clip_of`` names them."""
        self.aside = frozenset(aside)
        self.at = array("I")
        self.alone = array("I")
        self.mse = _curve()
        self.norms = _curve()
        self.by_noise = [_curve() for _ in range(NINTHS)]
        self.skipped: dict[int, tuple[str, ...]] = {}
        self.windows = Counter[str]()
        self.seconds = dict[str, float]()
        self.first: Mapping[str, Any] | None = None
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)

    @property
    def last(self) -> int:
        """The last step; 0 where there is none."""
        return self.at[-1] if self.at else 0

    @property
    def clips(self) -> Counter[str]:
        """How often each clip was shown, over all of its windows."""
        seen = Counter[str]()
        for window, count in self.windows.items():
            seen[clip_of(window)] += count
        return seen

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a step's line of the journal, as ``records.parse_line`` checks it."""
        step = line["step"]
        windows = line["window_ids"]
        shown = self.windows
        seconds = self.seconds
        self.at.append(step)
        for name in windows:  # Counter.update asks first what it was given, which takes longer
            shown[name] = shown.get(name, 0) + 1
        for name, spent in line["seconds"].items():
            seconds[name] = seconds.get(name, 0.0) + spent
        if line.get("skipped"):
            self.skipped[step] = tuple(windows)
        _put(self.norms, step, line["grad_norm"])
        if self.aside and windows and all(clip_of(name) in self.aside for name in windows):
            self.alone.append(step)
        else:
            _put(self.mse, step, line["mse"])
            for place, value in enumerate(line["by_t"][:NINTHS]):
                if value is not None:
                    _put(self.by_noise[place], step, value)
        if self.first is None:
            self.first = line
        self.recent.append(line)


def _curve() -> Curve:
    return array("I"), array("d")


def _put(curve: Curve, step: int, value: float | None) -> None:
    if value is not None and -inf < value < inf:
        curve[0].append(step)
        curve[1].append(value)
