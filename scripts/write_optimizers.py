"""Runs the contract of optimizers on every class of the listed libraries and writes the
table and its page: python scripts/write_optimizers.py

The table is videotune/config/optimizer_classes.json, the page docs/optimizers.md.
"""

import inspect
import json
import sys
import textwrap
import types
import typing
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from videotune.config import optimizer_classes
from videotune.config.optimizer_classes import NEEDED_FOR_ALL
from videotune.config.optimizers import Optimizer
from videotune.trainer.optimizer_contract import failures
from videotune.trainer.optimizers import FALLBACK_RATE

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
    fails = failures(settings, entry.get("rate", FALLBACK_RATE))
    return {**entry, "fails": fails} if fails else entry


def new_table() -> dict[str, dict[str, Any]]:
    """The table as the installed libraries are today."""
    entries = {name: entry_of(name, value) for name, value in classes().items()}
    # The builder reads its flags from the table.
    optimizer_classes.table.cache_clear()
    optimizer_classes.table = lambda: entries  # type: ignore[assignment]
    sys.modules["videotune.config.optimizers"].table = lambda: entries  # type: ignore[attr-defined]
    return {name: with_fails(name, entry) for name, entry in entries.items()}


HEAD = """\
# Optimizers by class

`optimizer.name` takes the names of the table in [Training](train.md), or a class: of torch.optim, pytorch_optimizer or
bitsandbytes, or `module:Class` of any other installed package.
`optimizer.args` are its arguments; all others keep the class's own defaults:

```yaml
optimizer: {name: "pytorch_optimizer:Lamb", args: {betas: [0.9, 0.95], weight_decay: 0.02}}
```

The case of listed classes does not matter. Without a module a class is looked up among the names in capitals, then in
torch.optim, pytorch_optimizer and bitsandbytes: `optimizer=lamb`. Names and types of arguments are checked when the
config is read, values when a run or a plan begins. The rate is `learning_rate`, whose default suits AdamW: another
class may need another one. Where a class has a default rate of 0.5 or more ("rate 1" below), it multiplies one that it
finds, and the default of `learning_rate` is 1.

Each class was tried by the same contract on tiny parameters (`videotune/trainer/optimizer_contract.py`). A step whose
gradient is not finite changes nothing. A run that is saved and resumed takes the same steps bit for bit. Groups have
rates of their own, and a rate may change with each step. Weights are updated in place in float32. The state is on the
weights' device. A step needs one backward pass and no closure. The same contract runs with your arguments when a run
begins, and for a class of another package. One optimizer is built for each group of parameters (LoRA+, the text encoder
…), so what a class computes over all parameters it computes for each group.

A class of another package runs the code of that package. It must be installed: no file of the current folder, or beside
a config, is imported. In the studio only a user on the server itself can name one, and an imported project cannot.

The memory of a plan is measured. The bytes of state that a class keeps for small matrices and vectors are told apart by
what they grow with (numbers, rows, columns, their squares) and summed over the shapes that train.

This page is written by `scripts/write_optimizers.py`, with the versions {versions}.

## Classes that train

"not apart": not with `optimizer.step_in_backward` or STOCHASTIC_ROUNDING, where each tensor has an optimizer of its own.
"matrices": not with FINE_TUNE or DORA, which train vectors too.

"""

REFUSED_HEAD = """
## Classes that do not

With their own defaults. A class that only needs another argument, such as SGD of bitsandbytes its `momentum`, is tried again
with `optimizer.args` when a run begins.

| class | why |
|---|---|
"""

LIMITS = """
## Limits

- The contract takes twelve steps on a CPU. What a class does first after hundreds of steps has not been seen.
- Bytes on CUDA, and classes with kernels of their own, have not been measured there.
- With `sharding: FULL`, FINE_TUNE takes only ADAMW or LION; weights that wait on the host only ADAMW.
"""


def page(entries: dict[str, dict[str, Any]]) -> str:
    """The page: what can be used, library by library, and what cannot and why."""
    lines = []
    refused = []
    for library in optimizer_classes.LIBRARIES:
        usable = []
        for name, entry in entries.items():
            module, _, class_name = name.partition(":")
            fails = entry.get("fails", {})
            needed = [fails[part] for part in fails if part in NEEDED_FOR_ALL]
            if module == library and needed:
                refused.append(f"| `{name}` | {needed[0]} |")
            elif module == library:
                limits = [LIMITED[part] for part in fails]
                if entry.get("rate"):
                    limits.append("rate 1")
                remark = f" ({', '.join(limits)})" if limits else ""
                usable.append(f"{class_name}{remark}")
        text = f"**{library}**: {', '.join(usable)}."
        lines.append(textwrap.fill(text, 120, break_on_hyphens=False) + "\n")
    versions = ", ".join(
        f"{package} {version(package)}"
        for package in ("torch", "pytorch_optimizer", "bitsandbytes")
    )
    head = HEAD.replace("{versions}", versions.replace("+cpu", ""))
    return head + "\n".join(lines) + REFUSED_HEAD + "\n".join(refused) + "\n" + LIMITS


LIMITED = {"apart": "not apart", "vectors": "matrices"}
"""Parts of the contract that only some trainings need, in short."""


def main() -> None:
    entries = new_table()
    lines = [
        f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}"
        for name, entry in entries.items()
    ]
    PAGE.write_text(page(entries), encoding="utf-8")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
