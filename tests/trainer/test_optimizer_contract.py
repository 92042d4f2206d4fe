"""Optimizers by their class: each is tried like every other, and what a class fails is
refused with the reason.
"""

import json
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scripts import write_optimizers
from videotune.config.optimizer_classes import (
    NEEDED_FOR_ALL,
    table,
    usable_classes,
)
from videotune.config.optimizers import Optimizer, load_class
from videotune.config.resolve import resolve
from videotune.errors import VideotuneError
from videotune.trainer import optimizer_contract
from videotune.trainer.optimizer_bytes import (
    _bytes_of,
    _features,
    _tensor_bytes,
    _vector_features,
    state_bytes,
)
from videotune.trainer.optimizer_contract import (
    ALL_STEPS,
    PARTS,
    Fails,
    Trial,
    _equal,
    _moved,
    _set_gradients,
    _undisturbed,
    _why_not,
    failures,
    refuse_failing_optimizer,
)
from videotune.trainer.optimizer_state import load_optimizer_state, optimizer_state
from videotune.trainer.optimizers import make_optimizer, parts_of, step_if_finite

GOOD = torch.tensor(True)
COMPILED = {"pytorch_optimizer:Kron", "pytorch_optimizer:SpectralSphere"}
"""Classes that compile their steps, which takes seconds."""


def settings_of(name: str, args: dict[str, Any] | None = None) -> Optimizer:
    """Settings without the checks of the config."""
    return Optimizer.model_construct(
        name=name,
        args=args or {},
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
    )


def test_the_table_has_every_class_of_the_installed_libraries() -> None:
    entries = {
        name: write_optimizers.entry_of(name, value)
        for name, value in write_optimizers.classes().items()
    }
    listed = {
        name: {key: value for key, value in entry.items() if key != "fails"}
        for name, entry in table().items()
    }
    assert entries == listed, "python scripts/write_optimizers.py"


def test_the_page_lists_what_the_table_says() -> None:
    written = write_optimizers.PAGE.read_text(encoding="utf-8")
    assert written == write_optimizers.page(table())


@pytest.mark.parametrize("part", range(8))
def test_every_class_does_what_the_table_says(part: int) -> None:
    """The same contract for each: skipped steps, exact resume, rates, masters, device."""
    names = [name for name in table() if name not in COMPILED][part::8]
    for name in names:
        entry = table()[name]
        assert write_optimizers.with_fails(name, entry).get("fails", {}).keys() == (
            entry.get("fails", {}).keys()
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMPILED))
def test_classes_that_compile_do_what_the_table_says(name: str) -> None:
    entry = table()[name]
    fails = write_optimizers.with_fails(name, entry)["fails"]
    assert fails.keys() == entry["fails"].keys()


def test_most_classes_can_be_used() -> None:
    assert len(usable_classes()) > 120
    assert "pytorch_optimizer:Lamb" in usable_classes()
    assert "pytorch_optimizer:SAM" not in usable_classes()


class Broken(torch.optim.SGD):
    """What the contract is for: each test breaks one thing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(group, parameter)

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        raise NotImplementedError


class HiddenCounter(Broken):
    """It counts outside of its state."""

    count = 0

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self.count = self.count + 1
        parameter -= group["lr"] * parameter.grad / self.count


class Random(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= group["lr"] * torch.randn_like(parameter)


class FixedRate(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= 1e-3 * parameter.grad  # type: ignore[operator]


class FirstRate(Broken):
    """It keeps the rate of its first step."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        rate = self.state[parameter].setdefault("rate", group["lr"])
        parameter -= rate * parameter.grad


class Still(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        pass


class Exploding(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter /= 0 * parameter.grad  # type: ignore[operator]


class OnDefaultDevice(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self.state[parameter]["mean"] = torch.zeros(3)
        parameter -= group["lr"] * parameter.grad


class Replacing(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter.data = parameter.data - group["lr"] * parameter.grad


class Unsaveable(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self.state[parameter]["helper"] = object()
        parameter -= group["lr"] * parameter.grad


class Closure(Broken):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Together(Broken):
    """It forms a number over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        total = sum(parameter.grad.norm() for parameter in parameters)
        for parameter in parameters:
            parameter -= self.param_groups[0]["lr"] * parameter.grad / total


class OnlyMatrices(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.ndim == 2, "only matrices"
        parameter -= group["lr"] * parameter.grad


class HalfState(Broken):
    """It keeps what it needs in bfloat16."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        mean = self.state[parameter].setdefault("mean", parameter.grad.bfloat16())
        parameter -= group["lr"] * (mean.float() + parameter.grad)


class Damaging(Broken):
    """It breaks weights that bfloat16 can hold, as rounded ones are."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        is_rounded = torch.equal(parameter, parameter.bfloat16().float())
        parameter -= group["lr"] * parameter.grad
        if is_rounded and parameter.numel() == 70:
            parameter.fill_(torch.nan)


class Averaging(Broken):
    """Its averaged weights, the result, differ from those that it trains."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= group["lr"] * parameter.grad

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class Unbuildable(Broken):
    def __init__(self, params: Any, base_optimizer: Any, **more: Any) -> None:
        super().__init__(params, **more)


FAULTS = {
    HiddenCounter: ("resume", "a resumed run takes other steps"),
    Random: ("resume", "draws random numbers"),
    Unsaveable: ("resume", "helper is a object"),
    FixedRate: ("rates", "does not follow the rate of a group"),
    FirstRate: ("rates", "rate that falls over the steps"),
    Still: ("moves", "leaves a parameter where it was"),
    Exploding: ("moves", "not finite after a few steps"),
    OnDefaultDevice: ("device", "not on the device of the weights"),
    Replacing: ("masters", "replaces the weights"),
    Averaging: ("average", "an average of the weights; see SCHEDULE_FREE"),
    Closure: ("step", "needs a closure"),
    Unbuildable: ("build", "wraps another optimizer"),
    Together: ("apart", "numbers over all parameters together"),
    HalfState: ("apart", "a state in bfloat16"),
    Damaging: ("apart", "rounded updates damage vector"),
    OnlyMatrices: ("vectors", "matrices only (AssertionError: only matrices"),
}
"""The part that each fails, and what the reason says."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module's classes count as those of an installed package."""
    monkeypatch.setattr(
        "videotune.config.optimizers.refuse_what_is_not_installed", lambda *_: None
    )
    optimizer_contract._failures.cache_clear()


@pytest.mark.parametrize("optimizer_class", FAULTS)
def test_the_contract_finds_what_is_broken(
    installed: None, optimizer_class: type[Broken]
) -> None:
    name = f"{__name__}:{optimizer_class.__name__}"
    part, reason = FAULTS[optimizer_class]
    fails = failures(settings_of(name))
    assert fails.keys() == {part}
    assert reason in fails[part]


def test_moves_are_measured_by_the_rate_of_each_group_and_step() -> None:
    """Of plain SGD: the sum of each step's rate times its gradient."""
    trial = Trial(settings_of("torch.optim:SGD"), {"a.x": (2, 3), "b.y": (4,)}, 0.5)

    def factor(group: str, step: int) -> float:
        return (1.0 if group == "a" else 3.0) * (step + 1)

    moves = _moved(trial, factor)
    expected = {name: torch.zeros(shape) for name, shape in trial.shapes.items()}
    for step in range(ALL_STEPS):
        parameters = trial.parameters()
        _set_gradients(parameters, step)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            expected[name] -= 0.5 * factor(name[0], step) * parameter.grad
    assert moves.keys() == expected.keys()
    for name, move in moves.items():
        torch.testing.assert_close(move, expected[name], rtol=1e-4, atol=1e-4)


class SharedRate(Broken):
    """It steps by the rate of the step before, of whichever group."""

    rate: ClassVar[float] = 0.0

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= (group["lr"] + self.rate) * parameter.grad
        type(self).rate = group["lr"]


class OnlyInTraining(Broken):
    """It has a training mode alone, and no average."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= group["lr"] * parameter.grad

    def train(self) -> None:
        pass


class FromPython(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= group["lr"] * random.random()


class FromNumpy(Broken):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter -= group["lr"] * np.random.rand()


class Overflowing(Broken):
    """Its weights are the largest float32, which is none of bfloat16."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter.fill_(torch.finfo(torch.float32).max)


class IgnoresTheFlag(Broken):
    """Its kernel is said to skip steps by itself, and does not."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.defaults["fused"] = True

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        parameter += 1


class CountsSkippedSteps(IgnoresTheFlag):
    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1


def trial_of(optimizer_class: type[Broken], rate: float = 0.5) -> Trial:
    settings = settings_of(f"{__name__}:{optimizer_class.__name__}")
    return Trial(settings, {"a.x": (2, 3), "a.y": (5,), "b.zeros": (4,)}, rate)


PARTS_BY_CLASS: list[tuple[type[Broken], str, str | None]] = [
    (SharedRate, "rates", "the rate of a group changes the steps of another"),
    (FixedRate, "rates", "it does not follow the rate of a group"),
    (FirstRate, "rates", "it does not follow a rate that falls over the steps"),
    (OnlyInTraining, "average", None),
    (Averaging, "average", "its result is an average of the weights; see "),
    (IgnoresTheFlag, "skip", "a step that is not finite changes weights or state"),
    (CountsSkippedSteps, "skip", "a step that is not finite changes weights"),
    (FromPython, "resume", "it draws random numbers"),
    (FromNumpy, "resume", "it draws random numbers"),
    (Overflowing, "apart", "rounded updates damage x"),
    (Together, "apart", "it forms numbers over all parameters together"),
    (HalfState, "apart", "it keeps a state in bfloat16"),
    (OnDefaultDevice, "device", "its state is not on the device"),
    (Replacing, "masters", "it replaces the weights"),
    (Still, "moves", "it leaves a parameter where it was"),
    (Exploding, "moves", "its weights are not finite"),
]


@pytest.mark.parametrize(("optimizer_class", "part", "reason"), PARTS_BY_CLASS)
def test_each_part_says_what_is_broken(
    installed: None, optimizer_class: type[Broken], part: str, reason: str | None
) -> None:
    trial = trial_of(optimizer_class)
    if reason is None:
        PARTS[part](trial)
        return
    with pytest.raises(Fails, match=f"^{reason}"):
        PARTS[part](trial)


def test_a_trial_has_the_same_parameters_each_time() -> None:
    trial = Trial(settings_of("ADAMW"), {"a.x": (2, 3), "b.zeros": (4,)}, 0.5)
    first, second = trial.parameters(), trial.parameters()
    assert list(first) == ["a.x", "b.zeros"]
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert first["a.x"].shape == (2, 3)
    assert first["a.x"].count_nonzero() == 6
    assert torch.equal(first["b.zeros"], torch.zeros(4))
    assert {value.dtype for value in first.values()} == {torch.float32}
    half = trial.parameters(dtype=torch.bfloat16)
    assert torch.equal(half["a.x"], first["a.x"].bfloat16())


@pytest.mark.parametrize("name", ["ADAMW", "torch.optim:SGD"])
def test_a_trial_has_two_groups_with_its_rate(name: str) -> None:
    shapes = {"a.x": (2, 3), "b.y": (4,), "a.z": (1,)}
    trial = Trial(settings_of(name), shapes, 0.25)
    parameters = trial.parameters()
    for one_per_parameter in (False, True):
        optimizer = trial.optimizer(parameters, one_per_parameter=one_per_parameter)
        groups = [
            (group["name"], [id(p) for p in group["params"]], group["lr"])
            for group in optimizer.param_groups
        ]
        x, y, z = (id(value) for value in parameters.values())
        if one_per_parameter:
            assert groups == [("a", [x], 0.25), ("a", [z], 0.25), ("b", [y], 0.25)]
        else:
            assert groups == [("a", [x, z], 0.25), ("b", [y], 0.25)]


class Learner(Broken):
    """It notes the rate with which it is built."""

    rates: ClassVar[list[float]] = []

    def __init__(self, params: Any, **more: Any) -> None:
        params = list(params)
        self.rates += [group["lr"] for group in params]
        super().__init__(params, **more)


def test_a_class_is_built_with_the_rate_of_the_trial(installed: None) -> None:
    Learner.rates.clear()
    trial = trial_of(Learner, 0.25)
    trial.optimizer(trial.parameters())
    assert Learner.rates == [0.25, 0.25]


def test_gradients_differ_between_steps_and_parameters() -> None:
    trial = Trial(settings_of("ADAMW"), {"a.x": (2, 3), "b.y": (2, 3)}, 0.5)
    seen = []
    for step in (0, 1, 0):
        parameters = trial.parameters(dtype=torch.bfloat16)
        _set_gradients(parameters, step)
        seen += [parameter.grad for parameter in parameters.values()]
    kept = [gradient for gradient in seen if gradient is not None]
    assert len(kept) == 6
    assert {gradient.dtype for gradient in kept} == {torch.bfloat16}
    for gradient, other in combinations(kept[:4], 2):
        assert not torch.equal(gradient, other)
    assert torch.equal(kept[0], kept[4])
    assert torch.equal(kept[1], kept[5])


ZEROS = {"w": torch.zeros(2, 3)}
NAN = {"w": torch.tensor([torch.nan])}


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ({"w": torch.zeros(2, 3)}, True),
        ({"w": torch.zeros(3, 2)}, False),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, False),
        ({"w": torch.zeros(2, 3, dtype=torch.int32).T}, False),
        ({"w": -torch.zeros(2, 3)}, False),
        ({"v": torch.zeros(2, 3)}, False),
        ({}, False),
        ({"w": torch.zeros(2, 3), "v": torch.zeros(1)}, False),
    ],
)
def test_tensors_are_equal_to_the_bit(other: dict[str, Tensor], equal: bool) -> None:
    assert _equal(ZEROS, other) is equal
    assert _equal(other, ZEROS) is equal
    more = {"a": torch.ones(1)}
    assert _equal(more | ZEROS, more | other) is equal


def test_what_is_no_number_is_equal_to_itself() -> None:
    assert _equal(NAN, {"w": torch.tensor([torch.nan])})
    strided = torch.arange(6.0).view(2, 3)
    assert _equal({"w": strided.T}, {"w": strided.T.contiguous()})
    assert not _equal({"w": strided.T}, {"w": strided.T + 1})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("step() missing: 'closure'"), "its step needs a closure that runs"),
        (
            RuntimeError("element 0 does not require grad"),
            "it needs second derivatives",
        ),
        (TypeError("no base_optimizer"), "it wraps another optimizer"),
        (ValueError("you need to pass `params` when you pass x"), "it wraps another"),
        (TypeError("unexpected keyword argument 'lr'"), "it wraps another optimizer"),
        (TypeError("missing named_parameters"), "it needs the model itself"),
        (AttributeError("no attribute 'parameters'"), "it needs the model itself"),
        (ValueError("Default process group has"), "it needs several processes"),
        (RuntimeError("Process group"), "it needs several processes"),
        (Exception("not in train mode"), "its result is an average of the weights"),
        (RuntimeError("dense gradients, please"), "it is for sparse gradients"),
        (KeyError("x\n   y. . "), "KeyError: 'x\\n y. . '"),
        (ValueError("x\n  y. . "), "ValueError: x y"),
        (ValueError("x" * 200), "ValueError: " + "x" * 150),
        (ValueError(""), "ValueError:"),
    ],
)
def test_errors_of_libraries_are_said_in_short(error: Exception, reason: str) -> None:
    def check(_: Trial) -> None:
        raise error

    said = _why_not(check, trial_of(Still))
    assert said is not None
    is_plain = not said.startswith(type(error).__name__)
    assert said.startswith(reason) if is_plain else said == reason

    def wrapped(_: Trial) -> None:
        raise VideotuneError("cannot be built") from error

    assert _why_not(wrapped, trial_of(Still)) == said


def test_errors_of_videotune_and_of_the_contract_are_said_as_they_are() -> None:
    def refuse(_: Trial) -> None:
        raise VideotuneError("no such device")

    def fail(_: Trial) -> None:
        raise Fails("it has a closure")

    assert _why_not(refuse, trial_of(Still)) == "VideotuneError: no such device"
    assert _why_not(fail, trial_of(Still)) == "it has a closure"
    assert _why_not(lambda _: None, trial_of(Still)) is None


class OnlySmallRates(Broken):
    """Its weights overflow where the rate is large."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if group["lr"] > 0.9:
            parameter.fill_(torch.nan)
        parameter -= group["lr"] * parameter.grad


def test_a_class_is_tried_with_the_rate_of_the_run(installed: None) -> None:
    settings = settings_of(f"{__name__}:OnlySmallRates")
    assert failures(settings) == {}
    assert failures(settings, 1.0) == {
        "moves": "its weights are not finite after a few steps"
    }


class MatricesThatStay(Broken):
    """It takes matrices only, and leaves them."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.ndim == 2, "only matrices"


def test_what_takes_matrices_only_is_tried_with_them(installed: None) -> None:
    fails = failures(settings_of(f"{__name__}:MatricesThatStay"))
    assert list(fails) == ["vectors", "moves"]
    assert "only matrices" in fails["vectors"]


def test_what_only_some_runs_need_is_refused_there(installed: None) -> None:
    """Numbers over all parameters matter within backward, vectors where all trains."""
    for name, settings in (
        ("Together", {"step_in_backward": True}),
        ("OnlyMatrices", None),
    ):
        optimizer: dict[str, Any] = {"name": f"{__name__}:{name}"}
        refuse_failing_optimizer(resolve({"optimizer": optimizer}, {}, None).config)
        config: dict[str, Any] = {"optimizer": optimizer | (settings or {})}
        if settings is None:
            config["training_method"] = "FINE_TUNE"
        with pytest.raises(VideotuneError, match=f":{name} with args {{}} cannot"):
            refuse_failing_optimizer(resolve(config, {}, None).config)


def test_arguments_of_a_user_are_tried(installed: None) -> None:
    config = resolve(
        {"optimizer": {"name": f"{__name__}:Still", "args": {"momentum": 0.5}}},
        {},
        None,
    ).config
    with pytest.raises(VideotuneError, match="leaves a parameter where it was"):
        refuse_failing_optimizer(config)
    negative = {"optimizer": {"name": "torch.optim:SGD", "args": {"momentum": -1}}}
    with pytest.raises(VideotuneError, match="Invalid momentum"):
        refuse_failing_optimizer(resolve(negative, {}, None).config)
    for name in ("torch.optim:SGD", "ADAMW"):
        refuse_failing_optimizer(resolve({"optimizer": name}, {}, None).config)


def test_a_trial_leaves_the_draws_of_the_run_alone() -> None:
    before = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    with _undisturbed(), warnings.catch_warnings(record=True) as seen:
        failures(settings_of("pytorch_optimizer:Gravity"))
        torch.rand(1)
        random.random()
        np.random.rand()
        warnings.warn("of a library", stacklevel=1)
    assert seen == []
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == str(np.random.get_state())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:PathLike", "no installed package has a module 'os'"),
        ("no_such_package_at_all:X", "no installed package"),
        ("numpy:ndarray", "numpy has no optimizer 'ndarray'"),
        ("prodigyopt:Prodigal", "prodigyopt has no optimizer 'Prodigal'"),
        ("prodigyopt.nothing:X", "cannot be imported"),
    ],
)
def test_only_classes_of_installed_packages_are_imported(
    name: str, message: str
) -> None:
    with pytest.raises(VideotuneError, match=message):
        load_class(name)
    assert load_class("prodigyopt:Prodigy").__name__ == "Prodigy"


@pytest.mark.parametrize("module", ["stray_optimizers", "prodigyopt"])
def test_no_file_of_the_current_folder_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Also none that hides an installed package."""
    (tmp_path / f"{module}.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(VideotuneError, match="no installed package"):
        load_class(f"{module}:Optimizer")
    assert module not in sys.modules


NAMES = [
    ("Lamb", "pytorch_optimizer:Lamb"),
    ("lamb", "pytorch_optimizer:Lamb"),
    ("PYTORCH_OPTIMIZER:LAMB", None),
    ("pytorch_optimizer:LAMB", "pytorch_optimizer:Lamb"),
    ("pytorch-optimizer:Lamb", "pytorch_optimizer:Lamb"),
    ("RAdam", "torch.optim:RAdam"),
    ("torch:RAdam", "torch.optim:RAdam"),
    ("bitsandbytes:lion8bit", "bitsandbytes.optim:Lion8bit"),
    ("AdamW", "ADAMW"),
    ("adamw8bit", "ADAMW_8BIT"),
    ("torch.optim:AdamW", "torch.optim:AdamW"),
    ("package.module:Class", "package.module:Class"),
]


@pytest.mark.parametrize(("text", "name"), NAMES)
def test_names_are_read_in_any_case(text: str, name: str | None) -> None:
    settings = Optimizer(name=text)
    assert settings.name == (name or text)
    assert Optimizer(name=settings.name) == settings


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "Lam"}, "did you mean 'pytorch_optimizer:Lamb'"),
    ({"name": "torch.optim:AdamV"}, "did you mean 'torch.optim:Adam"),
    ({"name": "a b:C"}, "module:Class"),
    ({"name": "SAM"}, "wraps another optimizer"),
    ({"name": "AdaHessian"}, "second derivatives"),
    ({"name": "torch.optim:LBFGS"}, "closure"),
    ({"name": "Lamb", "args": {"beta": 1}}, "no argument 'beta'; did you mean 'betas'"),
    ({"name": "Lamb", "args": {"lr": 1}}, "no argument 'lr'"),
    ({"name": "Lamb", "args": {"eps": "x"}}, "eps of .* takes a number, not 'x'"),
    ({"name": "Lamb", "args": {"eps": True}}, "takes a number, not True"),
    ({"name": "Lamb", "args": {"eps": float("nan")}}, "takes a number, not nan"),
    ({"name": "Lamb", "args": {"betas": 0.9}}, "takes a list of numbers"),
    ({"name": "Lamb", "args": {"adam": 1}}, "takes true or false"),
    ({"name": "SOAP", "args": {"precondition_frequency": 0.5}}, "a whole number"),
    ({"name": "SOAP", "args": {"data_format": "x"}}, "'channels_first' or"),
    ({"name": "BSAM"}, "closure"),
    ({"name": "BSAM", "args": {"rho": 1}}, "needs num_data"),
    ({"name": "Ranger21"}, "a resumed run takes other steps"),
    ({"name": "ADAMW", "args": {"eps": 1e-6}}, "optimizer.args: it is for"),
    ({"name": "Lamb", "beta1": 0.5}, "optimizer.beta1: an optimizer that is named"),
    ({"name": "Lamb", "weight_decay": 0.5}, "optimizer.weight_decay"),
    ({"name": "AvaGrad", "step_in_backward": True}, "over all parameters together"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_read(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(VideotuneError, match=message) as error:
        resolve({"optimizer": settings}, {}, None)
    assert "\n" not in str(error.value)


def test_a_class_for_matrices_trains_adapters_alone() -> None:
    settings = {"optimizer": "torch.optim:Muon"}
    resolve(settings, {}, None)
    with pytest.raises(VideotuneError, match="takes matrices only"):
        resolve(settings | {"training_method": "FINE_TUNE"}, {}, None)


def test_the_rate_of_a_class_that_finds_its_own_is_1() -> None:
    settings = {"optimizer": "DAdaptLion"}
    assert resolve(settings, {}, None).config.learning_rate == 1.0
    with pytest.raises(VideotuneError, match="Set learning_rate=1"):
        resolve(settings, {"learning_rate": 1e-4}, None)
    assert resolve({"optimizer": "Lamb"}, {}, None).config.learning_rate == 1e-4


def test_numbers_of_a_preset_are_no_arguments_of_a_class() -> None:
    preset = {"optimizer": {"weight_decay": 0.5, "beta2": 0.95}}
    config = resolve({"optimizer": "Lamb"}, preset, None).config
    assert config.optimizer.weight_decay == 0.01
    assert resolve({}, preset, None).config.optimizer.weight_decay == 0.5


class Nested(Broken):
    """It keeps all kinds of values."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        queue = state.setdefault("queue", deque(maxlen=3))
        queue.append(parameter.grad.clone())  # type: ignore[union-attr]
        state["pair"] = (len(queue), {"mean": torch.stack(list(queue)).mean(0)})
        state["words"] = [None, True, "text", 0.1]
        shared: Any = self.state
        shared["count"] = {"steps": shared.get("count", {"steps": 0})["steps"] + 1}
        group["seen"] = group.get("seen", 0.0) + 0.1
        parameter -= group["lr"] * state["pair"][1]["mean"]


def test_nested_states_are_kept_bit_for_bit(installed: None) -> None:
    name = f"{__name__}:Nested"
    assert failures(settings_of(name)) == {}
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = make_optimizer({"all": [weight]}, settings_of(name))
    for _ in range(4):
        weight.grad = torch.rand(2, 3)
        step_if_finite(optimizer, GOOD)
    flat = optimizer_state(optimizer, {"w": weight})
    assert {"w.queue%", "w.queue%0", "w.@seen~", "w.@@count%"} <= set(flat)

    second = make_optimizer({"all": [weight]}, settings_of(name))
    load_optimizer_state(second, {"w": weight}, flat)
    (part,) = second.parts  # type: ignore[union-attr]
    state = part.state[weight]
    assert isinstance(state["queue"], deque)
    assert state["queue"].maxlen == 3
    assert state["words"] == [None, True, "text", 0.1]
    assert state["pair"][0] == 3
    assert part.state["count"] == {"steps": 4}
    assert part.param_groups[0]["seen"] == pytest.approx(0.4)


def test_a_number_on_the_host_stays_there() -> None:
    """torch counts steps on the host, and looks at them there."""
    weight = nn.Parameter(torch.ones(2, device="meta"))
    state = {"step": torch.tensor(3.0), "mean": torch.ones(2, device="meta")}
    for name, kept in (("torch.optim:Adam", {"w.step&", "w.mean"}), ("ADAMW", None)):
        optimizer = make_optimizer({"all": [weight]}, settings_of(name))
        part = parts_of(optimizer)[0]
        part.state[weight] = dict(state)
        flat = optimizer_state(optimizer, {"w": weight})
        names = {key for key in flat if "@" not in key}
        assert names == (kept or {"w.step", "w.mean"})
        load_optimizer_state(optimizer, {"w": weight}, flat)
        device = "cpu" if kept else "meta"
        assert part.state[weight]["step"].device.type == device
        assert part.state[weight]["mean"].device.type == "meta"


def described(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        ["object", 1],
        ["tensor", 7],
        ["float", "x"],
        ["dict", [1]],
        ["dict", [[["list", []], 1]]],
        ["deque", [], "x"],
        {"a": 1},
        1.5,
    ],
    ids=str,
)
def test_a_damaged_description_is_a_fault_of_the_checkpoint(value: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer({"all": [weight]}, settings_of("torch.optim:SGD"))
    with pytest.raises(ValueError, match=r".") as error:
        load_optimizer_state(optimizer, {"w": weight}, {"w.queue%": described(value)})
    assert type(error.value) is not UnicodeDecodeError


def test_a_description_that_is_no_json_is_a_fault_too() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer({"all": [weight]}, settings_of("torch.optim:SGD"))
    for tensor in (torch.tensor([300]), torch.tensor([1.5]), torch.tensor([123])):
        with pytest.raises(ValueError, match=r"."):
            load_optimizer_state(optimizer, {"w": weight}, {"w.queue%": tensor})


def held_bytes(settings: Optimizer, shape: tuple[int, ...]) -> int:
    """The bytes of the state after two steps at full size."""
    weight = nn.Parameter(torch.full(shape, 0.1))
    optimizer = make_optimizer({"all": [weight]}, settings)
    for step in range(2):
        random = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(shape, generator=random)
        step_if_finite(optimizer, GOOD)
    flat = optimizer_state(optimizer, {"w": weight})
    return sum(tensor.nbytes for key, tensor in flat.items() if "@" not in key)


def sampled() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in (
        "torch.optim:Adam",
        "torch.optim:SGD",
        "torch.optim:Adafactor",
        "bitsandbytes.optim:Lion8bit",
        "pytorch_optimizer:Lamb",
        "pytorch_optimizer:SOAP",
        "pytorch_optimizer:Shampoo",
        "pytorch_optimizer:SM3",
        "pytorch_optimizer:AggMo",
        "pytorch_optimizer:AdEMAMix",
    ):
        yield name, {}
    yield "torch.optim:Adam", {"amsgrad": True}
    yield "torch.optim:SGD", {"momentum": 0.9}


@pytest.mark.parametrize(("name", "args"), list(sampled()), ids=str)
def test_the_bytes_of_a_plan_are_those_of_real_shapes(
    name: str, args: dict[str, Any]
) -> None:
    """Shapes that are not measured: an adapter's two matrices, a square, a vector."""
    settings = settings_of(name, args)
    for shape in ((16, 640), (640, 16), (256, 256), (300,)):
        planned = state_bytes(settings, [shape])
        assert planned == pytest.approx(held_bytes(settings, shape), rel=0.02, abs=200)


def test_the_bytes_of_an_optimizer_of_the_table_are_those_of_its_numbers() -> None:
    shapes = ((n, 3) for n in (4, 6))
    assert state_bytes(Optimizer(name="ADAMW"), shapes) == 8 * 30
    assert state_bytes(Optimizer(name="ADAMW"), [(5,), ()]) == 8 * 6
    assert state_bytes(Optimizer(name="ADAMW"), []) == 0


def test_the_bytes_of_a_class_add_up() -> None:
    """torch counts the steps of each parameter in a float32."""
    settings = settings_of("torch.optim:Adam")
    shapes = [(64, 32), (8, 4, 2), (100,)]
    expected = sum(2 * 4 * n + 4 for n in (2048, 64, 100))
    assert state_bytes(settings, shapes) == expected
    assert state_bytes(settings, []) == 0
    assert state_bytes(settings_of("torch.optim:SGD"), shapes) == 0


def test_bytes_may_grow_with_numbers_sides_and_their_squares() -> None:
    assert _features(3, 5).tolist() == [15, 3, 5, 9, 25, 9, 1]
    assert _features(5, 3).tolist() == [15, 5, 3, 25, 9, 9, 1]
    assert _vector_features(4).tolist() == [4, 16, 1]


def test_all_tensors_within_a_state_count() -> None:
    four, eight = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    assert _tensor_bytes(four) == 4
    state = {"a": four, "b": [eight, (four, {"c": eight})], "d": 3, "e": None}
    assert _tensor_bytes(state) == 4 + 8 + 4 + 8
    assert _tensor_bytes("text") == 0


class Late(Broken):
    """Its state begins with its second step."""

    def update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 2:
            state["mean"] = parameter.grad


def test_bytes_are_measured_after_two_steps(installed: None) -> None:
    """A vector that a class does not take has none; other errors are its own."""
    before = torch.get_rng_state()
    assert _bytes_of(settings_of(f"{__name__}:Late"), (3, 2)) == 24
    only_matrices = settings_of(f"{__name__}:OnlyMatrices")
    assert _bytes_of(only_matrices, (3, 2)) == 0
    assert _bytes_of(only_matrices, (3,)) == 0
    with pytest.raises(AssertionError, match="only matrices"):
        _bytes_of(only_matrices, (3, 2, 2))
    with pytest.raises(TypeError, match="closure"):
        _bytes_of(settings_of(f"{__name__}:Closure"), (3, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_classes_that_are_needed_for_all_are_named() -> None:
    parts = {part for entry in table().values() for part in entry.get("fails", {})}
    assert parts <= {*NEEDED_FOR_ALL, "apart", "vectors"}
