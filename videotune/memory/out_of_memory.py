"""Recognise the errors with which libraries report that memory ran out."""

import torch

NO_MEMORY_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the out-of-memory messages of the driver, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if any(message in str(error) for message in NO_MEMORY_MESSAGES):
        return True

    # accelerate recognises torch's other messages; it accepts only string arguments.
    if not isinstance(error, Exception):
        return False
    if not all(isinstance(argument, str) for argument in error.args):
        return False
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error)
