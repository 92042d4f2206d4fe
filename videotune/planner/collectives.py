"""What collectives send, in closed form, as rings of processes run them.

A ring cuts a tensor of T bytes into n parts. In each round every process sends one part to
the next one and receives one from the one before. An all-gather and a reduce-scatter take
n - 1 rounds, an all-reduce is a reduce-scatter and an all-gather. A process of a ring sends
over one link only, so a machine sends as many bytes to the next machine as a process to
the next process.
"""


def gathered(total: float, processes: int) -> float:
    """Return the bytes that a process sends in an all-gather.

    Args:
        total: bytes of the whole tensor, of which each process has a part.
        processes: of the ring.
    """
    return total * (processes - 1) / processes


def scattered(total: float, processes: int) -> float:
    """Return the bytes that a process sends in a reduce-scatter of a tensor of ``total``
    bytes.
    """
    return total * (processes - 1) / processes


def all_reduced(total: float, processes: int) -> float:
    """Return the bytes that a process sends in an all-reduce of a tensor of ``total``
    bytes.
    """
    return scattered(total, processes) + gathered(total, processes)


def exchanged(local: float, processes: int) -> float:
    """Return the bytes that a process sends in an all-to-all: of its tensor of ``local``
    bytes one part to each other process, directly.
    """
    return local * (processes - 1) / processes


def rounds_of_gather(processes: int) -> int:
    """Return the rounds of an all-gather, or of a reduce-scatter."""
    return processes - 1


def rounds_of_all_reduce(processes: int) -> int:
    """Return the rounds of an all-reduce."""
    return 2 * (processes - 1)
