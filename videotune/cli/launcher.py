"""Run a ``videotune`` command in several processes of this machine, one a GPU:
``python -m videotune.cli.launcher NUMBER ARGUMENTS``.

torchrun does the same and always ends with 1. Here the exit code is that of the command,
so the queue knows an interrupted run from a failed one. The processes are those of
torch's own launcher; this module only hands on signals and reads how they ended.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from videotune.cli.main import set_up_libraries
from videotune.errors import DONE, FAILED, INTERRUPTED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ENDINGS = (DONE, INTERRUPTED)
"""Exit codes of a process that the others need not be ended for."""

NO_KEEP_ALIVE = 30 * 24 * 3600
"""Seconds between the launcher's signs of life. Nobody needs them on one machine, and a
launcher that was paused would otherwise be struck off.
"""


def run_rank(arguments: Sequence[str]) -> int:
    """Run the command in this process, one of several, and return its exit code.

    A code that is not in ``ENDINGS`` ends this process, and the launcher then ends the
    others. After the others the launcher waits for all: the main process may still
    upload what it has saved.
    """
    from torch import multiprocessing as torch_multiprocessing

    from videotune.cli.main import main

    # If the launcher is killed, the queue starts the run again. Linux ends this process
    # with it; elsewhere the watch of the processes notices within a minute.
    if sys.platform == "linux":
        torch_multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    sys.argv = ["videotune", *arguments]
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    else:
        code = DONE
    if code not in ENDINGS:
        sys.exit(code)
    return code


class Launcher:
    """Starts the processes of a command and waits for their end."""

    def __init__(self, processes: int, arguments: Sequence[str]) -> None:
        self._processes = processes
        self._arguments = list(arguments)
        self._has_handed_on = False

    def run(self) -> int:
        """Run the command to its end and return its exit code."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)  # Windows has two of them
            if number is not None:
                signal.signal(number, self._hand_on)
        # torch's messages would stand behind the run's own last sentence.
        logging.disable(logging.ERROR)

        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        launch = elastic_launch(self._config(), run_rank)
        try:
            code_by_rank = launch(self._arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return self._code_of_failure(rank, failure)
        return INTERRUPTED if INTERRUPTED in code_by_rank.values() else DONE

    def _config(self) -> Any:
        """Return the settings of torch's launcher: one machine, and no second try."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            rdzv_configs={"keep_alive_interval": NO_KEEP_ALIVE},
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            # It must name one. The others stay ours: torch would end the processes by
            # its own time limit, and forget how they ended.
            signals_to_handle="SIGQUIT",
        )

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to the processes, which save and end by themselves."""
        children = multiprocessing.active_children()
        if not children:
            raise SystemExit(INTERRUPTED)
        self._has_handed_on = True
        for child in children:
            if child.pid is not None:
                with suppress(ProcessLookupError):  # it ended a moment ago
                    os.kill(child.pid, number)

    def _code_of_failure(self, rank: int, failure: ProcessFailure) -> int:
        """Return the exit code of a command of which a process has failed.

        A process that a signal has killed prints nothing, so this does.
        """
        code = failure.exitcode
        if code > 0:
            return code
        is_stop = -code in (signal.SIGINT, signal.SIGTERM)
        if self._has_handed_on and is_stop:
            return INTERRUPTED
        print(
            f"videotune: process {rank} of {self._processes} was killed by signal {-code}, "
            "so the others have ended too. A resume continues from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        return FAILED


def launch() -> int:
    """Run the command that this process was started with."""
    processes, *arguments = sys.argv[1:]
    set_up_libraries()  # the processes inherit the environment
    return Launcher(int(processes), arguments).run()


if __name__ == "__main__":
    sys.exit(launch())
