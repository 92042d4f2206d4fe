"""Where streamed weights live: on the host, every byte once, pinned in pieces where a CUDA device reads them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PIECE = 1 << 30
"""Bytes that are pinned at a time, a multiple of ``ALIGNED``; drivers refuse larger ones sooner."""

ALIGNED = 256
"""Tensors begin at multiples of so many bytes, as a device's own allocator would lay them."""


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in pinned memory; pageable, and copied more slowly, where the system refuses to pin more."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(tuple(shape), dtype=dtype)


def to_host(values: Tensor) -> tuple[Tensor, torch.Event]:
    """A copy of a device's tensor that is on its way to the host, and the event behind it; the device must have streams."""
    host = pinned(values.shape, values.dtype)
    arrived = torch.Event(values.device)
    host.copy_(values, non_blocking=True)
    arrived.record()
    return host, arrived


@dataclass(frozen=True)
class HostSlot:
    """A tensor's bytes: where they begin on the host, and how they are read. ``trains``: an optimizer writes to them."""

    name: str
    begin: int
    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trains: bool

    def view(self, flat: Tensor, begin: int) -> Tensor:
        """The tensor that lies in the bytes ``flat`` from ``begin`` on."""
        return (
            flat[begin : begin + self.size].view(self.dtype).as_strided(self.shape, self.stride)
        )


class HostWeights:
    """The weights of streamed blocks on the host, in the order of the blocks, in pieces.

    What trains lies within one piece and is an ``nn.Parameter`` by its name, so that an optimizer can write to it. They
    outlive their network: another one of the same shape can be streamed from them.
    """

    def __init__(
        self, blocks: Sequence[Mapping[str, Tensor]], pin: bool, echo: Callable[[str], None]
    ) -> None:
        self.piece = PIECE
        self._pin = pin
        self._echo = echo
        self.slots: list[list[HostSlot]] = []
        self.spans: list[tuple[int, int]] = []
        end = 0
        for block in blocks:
            entries = []
            begin = end
            for name, tensor in block.items():
                entries.append(_entry(name, tensor, end, self.piece))
                end = _up(entries[-1].begin + entries[-1].size)
            self.slots.append(entries)
            self.spans.append((begin, end))
        self.size = end
        self.trains = any(entry.trains for entries in self.slots for entry in entries)
        self._pieces: dict[int, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._taken: set[str] = set()

    def filled(self, block: int) -> bool:
        """Whether a block's weights are there."""
        return all(entry.name in self._taken for entry in self.slots[block])

    def store(self, entry: HostSlot, tensor: Tensor) -> None:
        """Copy a tensor's bytes in. Pieces are allocated as they fill, so that whoever gives weights up keeps no copy."""
        source = (
            tensor.detach()
            .as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            .view(torch.uint8)
        )
        parts = self.parts(entry.begin, entry.begin + entry.size)
        for part, values in zip(
            parts, source.split([len(part) for part in parts]), strict=True
        ):
            part.copy_(values)
        self._taken.add(entry.name)
        if entry.trains:
            number, at = divmod(entry.begin, self.piece)
            self.parameters[entry.name] = nn.Parameter(entry.view(self._at(number), at))

    def parts(self, begin: int, end: int) -> list[Tensor]:
        """The bytes between two places, in order, of one piece each."""
        parts = []
        while begin < end:
            number, at = divmod(begin, self.piece)
            length = min(end - begin, self.piece - at)
            parts.append(self._at(number)[at : at + length])
            begin += length
        return parts

    def _at(self, number: int) -> Tensor:
        if number not in self._pieces:
            self._pieces[number] = self._new(min(self.piece, self.size - number * self.piece))
        return self._pieces[number]

    def _new(self, size: int) -> Tensor:
        if self._pin:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # the driver, or the limit of locked memory, says no
                self._pin = False
                what = f"host memory cannot be pinned any further ({str(error).splitlines()[0][:120]})"
                self._echo(
                    f"warning: {what}: the rest is pageable, and steps wait for it longer"
                )
        return torch.empty(size, dtype=torch.uint8)


def _entry(name: str, tensor: Tensor, begin: int, piece: int) -> HostSlot:
    size = tensor.numel() * tensor.element_size()
    trains = tensor.requires_grad
    if trains and begin // piece != (begin + size - 1) // piece:
        begin = _up(
            begin, piece
        )  # a parameter is one tensor, so it must not lie across two pieces
        assert size <= piece, name
    return HostSlot(
        name, begin, size, tuple(tensor.shape), tensor.stride(), tensor.dtype, trains
    )


def _up(place: int, step: int = ALIGNED) -> int:
    return -(-place // step) * step


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie side by side, in whatever order of its dimensions, and each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0
