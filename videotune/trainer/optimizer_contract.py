"""What every optimizer must do before a run may depend on it, tried on tiny parameters.

The same trial decides on the classes that are listed (``scripts/write_optimizers.py``)
and, with the user's own arguments, at the start of a run.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from videotune.config.optimizer_classes import NEEDED_FOR_ALL, is_class
from videotune.config.optimizers import Optimizer, kind_of, load_class
from videotune.config.schema import Config
from videotune.config.validators import parts_needed
from videotune.errors import VideotuneError
from videotune.trainer.low_precision import update_each_rounded
from videotune.trainer.optimizer_state import load_optimizer_state, optimizer_state
from videotune.trainer.optimizers import (
    FALLBACK_RATE,
    AnyOptimizer,
    make_optimizer,
    parts_of,
    step_if_finite,
)

MATRICES = {"a.matrix": (64, 80), "a.narrow": (6, 40), "b.zeros": (40, 6)}
"""One large enough for 8 bits, two as an adapter has them."""

OTHERS = {"a.kernel": (4, 3, 2, 2), "b.vector": (70,)}

SAVED_AT = 6
RESUMED_STEPS = 6
"""Steps before the state is saved, and after it."""

ALL_STEPS = SAVED_AT + RESUMED_STEPS
"""Some classes leave the weights for some steps, while their means settle."""

Parameters = dict[str, nn.Parameter]


class Fails(Exception):
    """A part of the contract does not hold; the text says why."""


@dataclass(frozen=True)
class Trial:
    """An optimizer that is tried."""

    settings: Optimizer
    shapes: Mapping[str, tuple[int, ...]]
    rate: float

    def parameters(self, *, dtype: torch.dtype = torch.float32) -> Parameters:
        """Return the same parameters each time."""
        generator = torch.Generator().manual_seed(0)
        made = {}
        for name, shape in self.shapes.items():
            values = torch.randn(shape, generator=generator)
            if name.endswith("zeros"):
                values = torch.zeros(shape)
            made[name] = nn.Parameter(values.to(dtype))
        return made

    def optimizer(
        self, parameters: Parameters, *, one_per_parameter: bool = False
    ) -> AnyOptimizer:
        """Build the optimizer over two groups."""
        groups = {
            part: [value for key, value in parameters.items() if key.startswith(part)]
            for part in ("a", "b")
        }
        rates = dict.fromkeys(groups, self.rate)
        optimizer = make_optimizer(
            groups, self.settings, one_per_parameter=one_per_parameter, rates=rates
        )
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        return optimizer


def failures(settings: Optimizer, rate: float = FALLBACK_RATE) -> dict[str, str]:
    """Try an optimizer and return the parts of the contract that fail, with the reason.

    Nothing else is tried once a part fails that every training needs.
    """
    trial = Trial(settings, MATRICES | OTHERS, rate)
    fails: dict[str, str] = {}
    with _undisturbed():
        reason = _why_not(_steps, trial)
        if reason is not None:
            trial = Trial(settings, MATRICES, rate)
            reason_of_matrices = _why_not(_steps, trial)
            if reason_of_matrices is not None:
                return {_first_part(trial): reason_of_matrices}
            fails["vectors"] = f"it takes matrices only ({reason})"
        for part, check in PARTS.items():
            reason = _why_not(check, trial)
            if reason is not None:
                fails[part] = reason
            if part in NEEDED_FOR_ALL and reason is not None:
                break
    return fails


def refuse_failing_optimizer(config: Config) -> None:
    """Raise VideotuneError if the optimizer of a config, with its arguments, fails a
    part of the contract that this training needs.

    Those of the table have their own tests.
    """
    settings = config.optimizer
    if not is_class(settings.name):
        return
    load_class(settings.name)  # says by itself what is wrong with a name
    rate = kind_of(settings.name).learning_rate or FALLBACK_RATE
    for part, reason in _failures(settings.name, json.dumps(settings.args), rate):
        if part in NEEDED_FOR_ALL or part in parts_needed(config):
            raise VideotuneError(
                f"optimizer: {settings.name} with args {settings.args} cannot train here: {reason}. "
                "Choose another optimizer, or other optimizer.args"
            )


@cache
def _failures(name: str, args: str, rate: float) -> tuple[tuple[str, str], ...]:
    settings = Optimizer(name=name, args=json.loads(args))
    return tuple(failures(settings, rate).items())


def _why_not(check: Callable[[Trial], None], trial: Trial) -> str | None:
    """Return why a part of the contract does not hold, or None."""
    try:
        check(trial)
    except Fails as error:
        return str(error)
    except VideotuneError as error:
        return _in_short(error.__cause__ or error)
    except Exception as error:  # whatever a class of a library raises
        return _in_short(error)
    return None


IN_PLAIN_WORDS = {
    r"closure": "its step needs a closure that runs the model again",
    r"does not require grad": "it needs second derivatives of the loss",
    r"base_optimizer|need to pass `params` when you pass": "it wraps another optimizer",
    r"argument 'lr'": "it wraps another optimizer",
    r"named_parameters|attribute 'parameters'": "it needs the model itself, not its parameters",
    r"[Pp]rocess group": "it needs several processes",
    r"train mode": "its result is an average of the weights; see SCHEDULE_FREE",
    r"dense gradients": "it is for sparse gradients",
}
"""Reasons by what exceptions of libraries say."""


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    for pattern, reason in IN_PLAIN_WORDS.items():
        if re.search(pattern, text):
            return reason
    return f"{type(error).__name__}: {text[:150]}".rstrip(". ")


def _first_part(trial: Trial) -> str:
    """Return whether an optimizer that cannot step can at least be built."""
    reason = _why_not(_is_built, trial)
    return "step" if reason is None else "build"


def _is_built(trial: Trial) -> None:
    trial.optimizer(trial.parameters())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep warnings of a trial from the user, and its draws from the run."""
    state = random.getstate()
    state_of_numpy = np.random.get_state()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(state_of_numpy)


def _take_steps(parameters: Parameters, optimizer: AnyOptimizer, steps: range) -> None:
    for step in steps:
        _set_gradients(parameters, step)
        step_if_finite(optimizer, torch.tensor(True))


def _set_gradients(parameters: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = values.to(parameter.dtype)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _equal(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    if set(tensors) != set(others):
        return False
    for name, value in tensors.items():
        is_same_kind = (
            value.dtype == others[name].dtype and value.shape == others[name].shape
        )
        # NaN is equal to itself here: a state may hold it until its first use
        if not is_same_kind or not torch.equal(_bytes(value), _bytes(others[name])):
            return False
    return True


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _steps(trial: Trial) -> None:
    """It can be stepped after one backward pass, without a closure."""
    parameters = trial.parameters()
    _take_steps(parameters, trial.optimizer(parameters), range(2))


def _moves(trial: Trial) -> None:
    """Every parameter moves, and stays finite."""
    parameters = trial.parameters()
    before = _copies(parameters)
    _take_steps(parameters, trial.optimizer(parameters), range(ALL_STEPS))
    for name, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise Fails("its weights are not finite after a few steps")
        if torch.equal(parameter, before[name]):
            raise Fails("it leaves a parameter where it was")


def _skips(trial: Trial) -> None:
    """A step that is not finite leaves weights and state as they are."""
    parameters = trial.parameters()
    optimizer = trial.optimizer(parameters)
    _take_steps(parameters, optimizer, range(2))
    before = _copies(parameters)
    state = _state_of(optimizer, parameters)

    _set_gradients(parameters, 2)
    first = next(iter(parameters.values()))
    assert first.grad is not None
    first.grad[0, 0] = float("nan")
    step_if_finite(optimizer, torch.tensor(False))
    is_unchanged = _equal(before, parameters) and _equal(
        state, _state_of(optimizer, parameters)
    )
    if not is_unchanged:
        raise Fails("a step that is not finite changes weights or state")


def _state_of(optimizer: AnyOptimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Return the state; an empty one if it cannot be saved, which ``_resumes`` finds."""
    with suppress(ValueError):
        return _copies(optimizer_state(optimizer, parameters))
    return {}


def _resumes(trial: Trial) -> None:
    """Saved and loaded, it takes the same steps to the bit."""
    parameters = trial.parameters()
    optimizer = trial.optimizer(parameters)
    if _draws(lambda: _take_steps(parameters, optimizer, range(SAVED_AT))):
        raise Fails("it draws random numbers, so a resumed run takes other steps")

    saved = _copies(parameters)
    try:
        state = _copies(optimizer_state(optimizer, parameters))
    except ValueError as error:
        raise Fails(str(error)) from error
    resumed = {name: nn.Parameter(value.clone()) for name, value in saved.items()}
    second = trial.optimizer(resumed)
    with_state = {key.rpartition(".")[0] for key in state if ".@" not in key}
    load_optimizer_state(second, resumed, state, set(resumed) - with_state)
    if not _equal(state, optimizer_state(second, resumed)):
        raise Fails("its state is another one after it was saved and loaded")

    steps = range(SAVED_AT, ALL_STEPS)
    _take_steps(parameters, optimizer, steps)
    _take_steps(resumed, second, steps)
    if not _equal(parameters, resumed):
        raise Fails("a resumed run takes other steps than one that goes on")


def _draws(take_steps: Callable[[], None]) -> bool:
    """Return whether steps use a generator of the process, whose state no run saves."""
    before = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    take_steps()
    is_same_torch = torch.equal(before[0], torch.get_rng_state())
    is_same_python = before[1] == random.getstate()
    return not (
        is_same_torch and is_same_python and before[2] == repr(np.random.get_state())
    )


def _has_rates(trial: Trial) -> None:
    """Groups have rates of their own, and the rate of each step counts."""
    plain = _moved(trial, lambda group, step: 1.0)
    twice = _moved(trial, lambda group, step: 2.0 if group == "b" else 1.0)
    for name, move in plain.items():
        is_same = torch.equal(move, twice[name])
        if name.startswith("a") and not is_same:
            raise Fails("the rate of a group changes the steps of another")
        if name.startswith("b") and is_same:
            raise Fails("it does not follow the rate of a group")

    falling = _moved(trial, lambda group, step: 1.0 if step < SAVED_AT else 0.1)
    for name, move in plain.items():
        if torch.equal(move, falling[name]):
            raise Fails("it does not follow a rate that falls over the steps")


def _moved(trial: Trial, factor: Callable[[str, int], float]) -> dict[str, Tensor]:
    """Return how far each parameter moves, by a factor of the rate for group and step."""
    parameters = trial.parameters()
    before = _copies(parameters)
    optimizer = trial.optimizer(parameters)
    for step in range(ALL_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = trial.rate * factor(group["name"], step)
        _take_steps(parameters, optimizer, range(step, step + 1))
    return {key: value.detach() - before[key] for key, value in parameters.items()}


def _keeps_masters(trial: Trial) -> None:
    """The float32 weights that it updates stay float32, in place."""
    parameters = trial.parameters()
    places = {name: value.data_ptr() for name, value in parameters.items()}
    _take_steps(parameters, trial.optimizer(parameters), range(2))
    for name, value in parameters.items():
        if value.dtype != torch.float32 or value.data_ptr() != places[name]:
            raise Fails("it replaces the weights by other tensors")


def _stays_on_device(trial: Trial) -> None:
    """Its state is where its parameters are, whatever torch's default device; a number
    may be on the host.
    """
    parameters = trial.parameters()
    optimizer = trial.optimizer(parameters)
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    with torch.device("meta"), suppress(RuntimeError):
        # A number that it makes on the host is on "meta" here, and cannot be read.
        for part in parts_of(optimizer):
            part.step()

    for part in parts_of(optimizer):
        for parameter in parameters.values():
            for value in part.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.ndim and value.is_meta:
                    raise Fails("its state is not on the device of the weights")


def _has_no_average(trial: Trial) -> None:
    """What it trains is what is sampled and exported."""
    for part in parts_of(trial.optimizer(trial.parameters())):
        if hasattr(part, "eval") and hasattr(part, "train"):
            raise Fails("its result is an average of the weights; see SCHEDULE_FREE")


def _works_apart(trial: Trial) -> None:
    """One optimizer for each parameter takes the same steps, and rounded ones too."""
    whole = trial.parameters()
    _take_steps(whole, trial.optimizer(whole), range(3))
    separate = trial.parameters()
    _take_steps(separate, trial.optimizer(separate, one_per_parameter=True), range(3))
    if not _equal(whole, separate):
        raise Fails("it forms numbers over all parameters together")

    rounded = trial.parameters(dtype=torch.bfloat16)
    optimizer = trial.optimizer(rounded, one_per_parameter=True)
    for step in range(3):
        _set_gradients(rounded, step)
        update_each_rounded(optimizer, rounded, torch.tensor(True), 0, step, {})
    for part in parts_of(optimizer):
        for state in part.state.values():
            values = state.values() if isinstance(state, Mapping) else ()
            if any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in values):
                raise Fails("it keeps a state in bfloat16 for weights in bfloat16")
    for name, parameter in rounded.items():
        if parameter.dtype != torch.bfloat16 or not parameter.isfinite().all():
            raise Fails(f"rounded updates damage {name.rpartition('.')[2]}")


PARTS: Mapping[str, Callable[[Trial], None]] = {
    "moves": _moves,
    "skip": _skips,
    "resume": _resumes,
    "rates": _has_rates,
    "masters": _keeps_masters,
    "device": _stays_on_device,
    "average": _has_no_average,
    "apart": _works_apart,
}
"""Parts of the contract, after those of ``failures`` itself."""
