"""Pieces so small that a block's weights lie across several, and what a block leaves on
the device is made NaN.

A tensor that still points there, or a read of weights outside of their window, is then
a loss that is not a number.
"""

import pytest
import torch

from videotune.memory import host_weights
from videotune.memory.device_buffers import DeviceBuffers


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    own = DeviceBuffers._release

    def release(self: DeviceBuffers, block: int) -> None:
        own(self, block)
        slot = self._slot_of(block)
        flat = slot.flat.clone()
        slot.flat.fill_(255)  # a NaN in every floating dtype
        slot.flat = flat
        if self._stream is not None:
            slot.free.record(
                torch.accelerator.current_stream(self.device)
            )  # behind the clone too
            flat.record_stream(self._stream)

    monkeypatch.setattr(DeviceBuffers, "_release", release)
    monkeypatch.setattr(host_weights, "PIECE", 16 << 10)
