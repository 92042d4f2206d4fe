"""The command that comes next, as a line that can be run: the same clips, model,
settings, card and run folder in every command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

CONFIG_NAME = "config.yaml"
"""The file that ``init`` writes."""

USUAL_RUNS = ("runs/first", "runs/second", "runs/third")
"""The run folders that are proposed beside clips and other configs."""

_CARD_LINE = "# card: "
_HEADING_LINES = 40
"""First lines of a config, among which the card is looked for."""


def next_command(name: str, overrides: Overrides, *further_options: str) -> str:
    """Return a command with the clips, the model and the settings of this one."""
    return command_line(["videotune", *_arguments(name, overrides), *further_options])


def command_line(arguments: Iterable[str]) -> str:
    """Return arguments as one line for a shell."""
    return " ".join(map(_quoted, arguments))


def train_command(
    overrides: Overrides, facts: Mapping[str, Any], *further_options: str
) -> str:
    """Return the command that trains what was planned, in as many processes.

    Args:
        overrides: The config of the plan.
        facts: The plan.
        further_options: Options of ``train``.
    """
    processes = facts["processes"]
    arguments = [*_arguments("train", overrides), *further_options]
    if not processes or processes["count"] == 1:
        return command_line(["videotune", *arguments])

    group = processes["context_parallel"]
    if group > 1 and not _sets(overrides, "context_parallel"):
        arguments += ["--set", f"context_parallel={group}"]
    machines = processes["machines"]["count"] if processes["machines"] else 1
    launcher = ["torchrun"]
    if machines > 1:
        launcher += ["--nnodes", str(machines), "--node-rank", "RANK"]
    launcher += ["--nproc-per-node", str(processes["count"] // machines)]
    if machines > 1:
        launcher += ["--master-addr", "ADDRESS", "--master-port", "29500"]
    return command_line([*launcher, "-m", "videotune", *arguments])


def proposed_run(config: object) -> str:
    """Return the run folder that is proposed, the first that does not exist yet: in the
    folder of a config that ``init`` wrote, with its name, which the run's files then have.
    """
    folders: Iterator[str]
    if isinstance(config, Path) and config.name == CONFIG_NAME:
        name = config.absolute().parent.name
        folders = (str(config.parent / f"{name}-{number}") for number in count(1))
    else:
        later = (f"runs/run-{number}" for number in count(len(USUAL_RUNS) + 1))
        folders = chain(USUAL_RUNS, later)
    return next(folder for folder in folders if not Path(folder).exists())


def card_line(card: str) -> str:
    """Return the comment of a config that names the card it was written for."""
    return f"{_CARD_LINE}{card}"


def card_options(config: object) -> list[str]:
    """Return the option --card with the card that ``init`` wrote a config for; empty if
    it names none.
    """
    if not isinstance(config, Path) or not config.is_file():
        return []
    with config.open(encoding="utf-8", errors="replace") as file:
        heading = list(islice(file, _HEADING_LINES))
    for line in heading:
        if line.startswith(_CARD_LINE):
            card = line.removeprefix(_CARD_LINE).strip()
            return ["--card", card] if card else []
    return []


def _arguments(name: str, overrides: Overrides) -> list[str]:
    """Return a command's name with the arguments of another command."""
    arguments = [name]
    if isinstance(overrides.config, Path):
        arguments.append(str(overrides.config))
    if overrides.data is not None:
        arguments += ["--data"] if len(arguments) > 1 else []
        arguments.append(overrides.data)

    options = {
        "--preset": overrides.preset,
        "--family": overrides.family,
        "--base": overrides.base,
        "--held-out": overrides.held_out,
    }
    for option, value in options.items():
        if value is not None:
            arguments += [option, value]
    for setting in overrides.sets:
        arguments += ["--set", setting]
    return arguments


def _sets(overrides: Overrides, key: str) -> bool:
    """Return whether the user has set a key."""
    from videotune.job.overrides import user_keys

    return key in user_keys(overrides)


def _quoted(argument: str) -> str:
    """Quote an argument as every shell takes it, Windows' too, if it needs that."""
    if re.fullmatch(r"[\w@%+=:,./~-]+", argument):
        return argument
    if not re.search(r'["$`\\!]', argument):
        return f'"{argument}"'
    return shlex.quote(argument)
