"""Repeat a step's passes in a plainer way if compiled blocks or CUDA graphs fail."""

from __future__ import annotations

from collections.abc import Callable

from videotune.errors import VideotuneError
from videotune.memory.compiling import CompiledBlocks, describe_failure
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.process_watch import is_lost_connection
from videotune.trainer.captured_passes import CapturedPasses


def run_with_fallbacks(
    all_passes: Callable[[], None],
    start_again: Callable[[], None],
    compiled: CompiledBlocks | None,
    captured: CapturedPasses | None,
) -> None:
    """Run a step's passes. If compiled blocks fail, repeat the passes without compiling;
    if memory runs out beside CUDA graphs, free the graphs and repeat without them.

    Graphs keep the memory of a pass to themselves, and a pass of the base model or of
    another shape takes its own.

    Args:
        all_passes: runs all passes of the step, one for each micro-batch.
        start_again: undoes what ``all_passes`` has done so far.
        compiled: the blocks, if they are compiled.
        captured: the graphs, if passes are captured.
    """
    if captured is None:
        _run_compiled(all_passes, start_again, compiled)
        return

    try:
        _run_compiled(all_passes, start_again, compiled)
        return
    except (MemoryError, RuntimeError) as error:
        if len(captured) == 0 or not is_out_of_memory(error):
            raise

    # Outside of the handler, nothing holds the tensors of the failed pass.
    start_again()
    captured.give_up("the device has no room for them beside the rest of a step")
    _run_compiled(all_passes, start_again, compiled)


def _run_compiled(
    all_passes: Callable[[], None],
    start_again: Callable[[], None],
    compiled: CompiledBlocks | None,
) -> None:
    """Run a step's passes; if compiled blocks fail, repeat them without compiling.

    Backward graphs are compiled within the backward pass, so an error of the compiler
    may come from anywhere. What fails without compiling too is the model's own error.
    """
    if compiled is None or compiled.failure is not None:
        all_passes()
        return

    try:
        all_passes()
        return
    except Exception as error:
        is_no_failure_of_compiler = (
            isinstance(error, VideotuneError)
            or is_out_of_memory(error)
            or is_lost_connection(error)
        )
        if is_no_failure_of_compiler:
            raise
        reason = describe_failure(error)

    # Outside of the handler, nothing holds the tensors of the failed pass.
    start_again()
    with compiled.given_up(reason):
        all_passes()
