"""Runs the contract of optimizers on every class of the listed libraries and writes the
table and its page: python scripts/write_optimizers.py

The table is videotune/config/optimizer_classes.json, the page docs/optimizers.md.
"""

import inspect
import json
import sys
import types
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from videotune.config import optimizer_classes
from videotune.config.optimizers import Optimizer
from videotune.trainer.optimizer_contract import failures
from videotune.trainer.optimizers import CONTRACT_RATE

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "videotune" / "config" / "optimizer_classes.json"
PAGE = ROOT / "docs" / "optimizers.md"

SET_BY_THE_RUN = ("self", "params", "model", "lr", "args", "kwargs", "maximize")
"""Parameters of constructors that no config sets."""

TRIAL_VALUES = {"num_iterations": 1000, "num_data": 100}
"""What required arguments are in the trial."""

FINDS_A_RATE = 0.5
"""A default rate from here on multiplies one that the optimizer finds."""

ANNOTATIONS = {bool: "flag", int: "whole", float: "number", str: "text"}


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of the libraries, by module:Class."""
    named = {}
    for library in optimizer_classes.LIBRARIES:
        module = import_module(library)
        for name, value in sorted(vars(module).items()):
            is_optimizer = inspect.isclass(value) and issubclass(
                value, torch.optim.Optimizer
            )
            if is_optimizer and value is not torch.optim.Optimizer:
                named[f"{library}:{name}"] = value
    return named


def kind_of(parameter: inspect.Parameter) -> optimizer_classes.Kind:
    """What an argument takes, by its annotation or else its default."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return kind_of_default(parameter.default)

    members = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = list(typing.get_args(annotation))
    kinds = {
        json.dumps(kind_of_annotation(member))
        for member in members
        if member not in (type(None), torch.Tensor)
    }
    if kinds == {'"whole"', '"number"'}:
        return "number"
    return json.loads(kinds.pop()) if len(kinds) == 1 else "any"


def kind_of_annotation(annotation: Any) -> optimizer_classes.Kind:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        values = typing.get_args(annotation)
        return list(values) if all(isinstance(v, str) for v in values) else "any"
    if origin in (tuple, list):
        inner = [x for x in typing.get_args(annotation) if x is not Ellipsis]
        is_numeric = all(kind_of_member(x) for x in inner)
        return "numbers" if is_numeric else "any"
    return ANNOTATIONS.get(annotation, "any")


def kind_of_member(annotation: Any) -> bool:
    """Whether a member of a tuple is a number."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return float in typing.get_args(annotation)
    return annotation in (int, float)


def kind_of_default(default: Any) -> optimizer_classes.Kind:
    if isinstance(default, bool):
        return "flag"
    if isinstance(default, int | float):
        return "number"
    if isinstance(default, str):
        return "text"
    if isinstance(default, tuple | list):
        return "numbers"
    return "any"


def entry_of(name: str, optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """What the table has of a class."""
    signature = inspect.signature(optimizer)
    entry: dict[str, Any] = {"arguments": {}}
    required = []
    for key, parameter in signature.parameters.items():
        is_variable = parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if key in SET_BY_THE_RUN or is_variable:
            continue
        if parameter.default is parameter.empty and key not in TRIAL_VALUES:
            continue  # another optimizer or the model, which no config holds
        entry["arguments"][key] = kind_of(parameter)
        if parameter.default is parameter.empty:
            required.append(key)
    if required:
        entry["required"] = required

    rate = signature.parameters.get("lr")
    default_rate = getattr(rate, "default", None)
    if isinstance(default_rate, float) and default_rate >= FINDS_A_RATE:
        entry["rate"] = default_rate
    if any(base.__name__ == "MuonBase" for base in optimizer.__mro__):
        entry["flag"] = "use_muon"
    return entry


def with_fails(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with the parts of the contract that fail."""
    arguments = {
        key: TRIAL_VALUES[key]
        for key in entry.get("required", ())
        if key in TRIAL_VALUES
    }
    settings = Optimizer.model_construct(
        name=name, args=arguments, beta1=0.9, beta2=0.99, weight_decay=0.01
    )
    fails = failures(settings, entry.get("rate", CONTRACT_RATE))
    return {**entry, "fails": fails} if fails else entry


def new_table() -> dict[str, dict[str, Any]]:
    """The table as the installed libraries are today."""
    entries = {name: entry_of(name, value) for name, value in classes().items()}
    # The builder reads its flags from the table.
    optimizer_classes.table.cache_clear()
    optimizer_classes.table = lambda: entries  # type: ignore[assignment]
    sys.modules["videotune.config.optimizers"].table = lambda: entries  # type: ignore[attr-defined]
    return {name: with_fails(name, entry) for name, entry in entries.items()}


def main() -> None:
    entries = new_table()
    lines = [
        f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}"
        for name, entry in entries.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
