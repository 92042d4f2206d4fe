"""The stand-in card finds faults that are planted into a streamed training: what the
other tests here rest on.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.simcuda import card
from tests.simcuda.child import on_card
from tests.simcuda.lab import Lab, faults
from videotune.memory.activation_offload import ActivationOffload
from videotune.trainer import network_pass

Plant = Callable[[], AbstractContextManager[Any]]


def given_t(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> AbstractContextManager[Any]:
    """The step computes its loss with what ``change`` makes of t."""
    own = network_pass.denoising_loss

    def loss(
        family: Any, net: Any, objective: Any, batch: Any, t: torch.Tensor, *more: Any
    ) -> Any:
        return own(family, net, objective, batch, change(t), *more)

    return patch.object(network_pass, "denoising_loss", loss)


def recorded(stream: int | None) -> AbstractContextManager[Any]:
    """record_stream names this stream whatever it is told; None: it does nothing."""
    own = torch.Tensor.record_stream

    def record(tensor: torch.Tensor, _: torch.Stream) -> None:
        if stream is not None:
            own(tensor, card.stream(stream))

    return patch.object(torch.Tensor, "record_stream", record)


def host_noise(t: torch.Tensor) -> torch.Tensor:
    """Draw on the card with the host's generator."""
    return t + 0 * torch.rand(t.shape, device=t.device, generator=torch.Generator())


STREAMED = ("layer_offload_fraction=0.5", "gradient_checkpointing=ON")
OFFLOADED = ("layer_offload_fraction=0", "gradient_checkpointing=CPU_OFFLOADED")
FINE_TUNE = ("layer_offload_fraction=1", "training_method=FINE_TUNE")
PLANTS: dict[str, tuple[tuple[str, ...], Plant, str]] = {
    "no wait for loaded weights": (
        STREAMED,
        lambda: card.planted("the default stream does not wait"),
        "race: .* reads .* what copy writes",
    ),
    "a slot is filled too early": (
        STREAMED,
        lambda: card.planted("other streams do not wait"),
        "race: copy writes .* reads on stream 0",
    ),
    "no wait for offloaded inputs": (
        OFFLOADED,
        lambda: card.planted("the default stream does not wait"),
        "race: .* reads .* what copy writes",
    ),
    "what leaves is not kept": (
        OFFLOADED,
        lambda: patch.object(
            ActivationOffload, "_wait_for_sent", lambda self, _: self._leaving.clear()
        ),
        "freed while copy .* record_stream is missing",
    ),
    "a wrong record_stream": (
        FINE_TUNE,
        lambda: recorded(0),
        "freed while copy .* record_stream is missing",
    ),
    "no record_stream of a gradient": (
        FINE_TUNE,
        lambda: recorded(None),
        "freed while copy .* record_stream is missing",
    ),
    "t on the host": (
        STREAMED,
        lambda: given_t(lambda t: t.cpu()),
        "cuda:0 and (on the )?cpu",
    ),
    "a number of the host": (
        STREAMED,
        lambda: given_t(lambda t: t * torch.tensor(1.0).to(t.device)),
        "copy to the card",
    ),
    "the host's generator": (
        STREAMED,
        lambda: given_t(host_noise),
        "device type for generator",
    ),
    "item": (
        STREAMED,
        lambda: given_t(lambda t: t * float((t.max() > -1).item())),
        "the host waits .*item",
    ),
    "a record is read too early": (
        STREAMED,
        lambda: card.planted("the host does not wait"),
        "NaN",
    ),
    "gradients are read too early": (
        FINE_TUNE,
        lambda: card.planted("the host does not wait"),
        "NaN",
    ),
}
"""The settings, the fault, and what the card says of it."""


def planted(folder: str) -> dict[str, Any]:
    """What the card sees of a run with each fault, and of runs without one."""
    lab = Lab(Path(folder))
    found = {}
    for name, (sets, plant, _) in PLANTS.items():
        words = lab.words("wan", "train_dtype=FLOAT_32", *sets, blocks=6)
        found[name] = lab.steps(name.replace(" ", "-"), words, plant())
    return found


def test_each_is_found(tmp_path: Path) -> None:
    """The runs without a fault are the other tests of this folder."""
    seen = on_card(planted, tmp_path)
    told = {
        name: faults(seen[name], waits=2 if sets is FINE_TUNE else 0)
        for name, (sets, *_) in PLANTS.items()
    }
    missed = {
        name: told[name]
        for name, (*_, words) in PLANTS.items()
        if not re.search(words, "\n".join(told[name]))
    }
    assert missed == {}
