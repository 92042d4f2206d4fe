"""Host memory of streamed weights: each byte once, pinned if a CUDA device reads it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PIECE = 1 << 30
"""Bytes per pinned allocation, a multiple of ``ALIGNED``.

Drivers are more likely to refuse larger ones.
"""

ALIGNED = 256
"""Tensors begin at multiples of this many bytes, as in a device's own allocator."""


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in pinned memory.

    If the system refuses to pin more, the tensor is pageable and copies are slower.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(tuple(shape), dtype=dtype)


def to_host(values: Tensor) -> tuple[Tensor, torch.Event]:
    """Start copying a device tensor to the host; the device must have streams.

    Returns:
        The host tensor, and an event recorded behind the copy.
    """
    host = pinned(values.shape, values.dtype)
    arrived = torch.Event(values.device)
    host.copy_(values, non_blocking=True)
    arrived.record()
    return host, arrived


@dataclass(frozen=True)
class HostSlot:
    """The position and layout of one tensor in the host memory."""

    name: str

    begin: int
    """Offset in bytes."""

    size: int
    """Length in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    trains: bool
    """Whether an optimizer writes to the tensor."""

    def view(self, flat: Tensor, begin: int) -> Tensor:
        """Return the tensor stored in the bytes ``flat`` from offset ``begin``."""
        values = flat[begin : begin + self.size].view(self.dtype)
        return values.as_strided(self.shape, self.stride)


class HostWeights:
    """The weights of streamed blocks on the host, in block order, split into pieces.

    A tensor that trains never crosses a piece boundary and is exposed as an
    ``nn.Parameter``, so that an optimizer can write to it. The weights outlive their
    network: another network of the same shape can be streamed from them.
    """

    def __init__(
        self,
        blocks: Sequence[Mapping[str, Tensor]],
        pin: bool,
        echo: Callable[[str], None],
    ) -> None:
        self.piece = PIECE
        self._pin = pin
        self._echo = echo

        self.slots: list[list[HostSlot]] = []
        """The tensors of each block."""

        self.spans: list[tuple[int, int]] = []
        """Begin and end of each block in bytes."""

        end = 0
        for block in blocks:
            begin = end
            block_slots = []
            for name, tensor in block.items():
                slot = _slot_at(end, name=name, tensor=tensor, piece=self.piece)
                block_slots.append(slot)
                end = _round_up(slot.begin + slot.size, ALIGNED)
            self.slots.append(block_slots)
            self.spans.append((begin, end))
        self.size = end

        self.trains = False
        """Whether any tensor trains."""
        for block_slots in self.slots:
            self.trains |= any(slot.trains for slot in block_slots)

        self._pieces: dict[int, Tensor] = {}
        self._stored: set[str] = set()

        self.parameters: dict[str, nn.Parameter] = {}
        """The stored tensors that train, by name."""

    def filled(self, block: int) -> bool:
        """Return whether all weights of a block are stored."""
        return all(slot.name in self._stored for slot in self.slots[block])

    def store(self, slot: HostSlot, tensor: Tensor) -> None:
        """Copy a tensor into its slot.

        Pieces are allocated when first written, so that memory grows only as fast as
        the caller frees its own tensors.
        """
        values = tensor.detach()
        values = values.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        source = values.view(torch.uint8)

        parts = self.parts(slot.begin, slot.begin + slot.size)
        sources = source.split([len(part) for part in parts])
        for part, part_source in zip(parts, sources, strict=True):
            part.copy_(part_source)
        self._stored.add(slot.name)

        if slot.trains:
            number, offset = divmod(slot.begin, self.piece)
            parameter = nn.Parameter(slot.view(self._piece(number), offset))
            self.parameters[slot.name] = parameter

    def parts(self, begin: int, end: int) -> list[Tensor]:
        """Return the bytes from ``begin`` to ``end``, as one tensor per piece."""
        parts = []
        while begin < end:
            number, offset = divmod(begin, self.piece)
            length = min(end - begin, self.piece - offset)
            parts.append(self._piece(number)[offset : offset + length])
            begin += length
        return parts

    def _piece(self, number: int) -> Tensor:
        """Return a piece; allocate it on first use."""
        if number not in self._pieces:
            size = min(self.piece, self.size - number * self.piece)
            self._pieces[number] = self._allocate(size)
        return self._pieces[number]

    def _allocate(self, size: int) -> Tensor:
        if self._pin:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # the driver or the locked-memory limit
                self._pin = False
                reason = str(error).splitlines()[0][:120]
                self._echo(
                    f"warning: cannot pin more host memory ({reason}). The remaining "
                    "weights are pageable, which makes steps slower."
                )
        return torch.empty(size, dtype=torch.uint8)


def _slot_at(begin: int, *, name: str, tensor: Tensor, piece: int) -> HostSlot:
    """Return a tensor's slot at ``begin``, or at the next piece if it cannot cross."""
    size = tensor.numel() * tensor.element_size()
    trains = tensor.requires_grad

    # A parameter is one tensor, so it cannot be split over two pieces.
    crosses_pieces = begin // piece != (begin + size - 1) // piece
    if trains and crosses_pieces:
        begin = _round_up(begin, piece)
        assert size <= piece, name

    return HostSlot(
        name=name,
        begin=begin,
        size=size,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        trains=trains,
    )


def _round_up(offset: int, multiple: int) -> int:
    return -(-offset // multiple) * multiple


def dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills one range of memory without gaps or overlap.

    The order of its dimensions does not matter.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
