"""What the tests of offloading share: tiny networks with several blocks, a few real
steps, and what they leave.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from videotune.adapters.layers import add_full
from videotune.adapters.lora import add_lora
from videotune.config.schema import Optimizer
from videotune.config.sections import Lora
from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.block_offload import BlockOffload, stream_blocks
from videotune.trainer.low_precision import MasterWeights
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import make_optimizer
from videotune.trainer.step import train_step
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import Clock
from videotune.types import Batch, ClipShape, Conditioning

CPU = torch.device("cpu")
BLOCKS = 8


def deepen(base: Path, folder: Path, blocks: int = BLOCKS, **wider: int) -> Path:
    """The same checkpoint with so many blocks in its transformers, every weight drawn
    anew, biases and norms too.

    ``wider``: other numbers of the transformers' configs.
    """
    import diffusers

    shutil.copytree(base, folder)
    for part in sorted(path for path in folder.glob("transformer*") if path.is_dir()):
        config = json.loads((part / "config.json").read_text())
        is_kandinsky = "num_visual_blocks" in config
        config["num_visual_blocks" if is_kandinsky else "num_layers"] = blocks
        config |= wider
        if "llama_layers" in config:  # one for each block
            config["llama_layers"] = [0] * (blocks + config["num_single_layers"])
        cls = getattr(diffusers, config["_class_name"])
        with torch.random.fork_rng():
            torch.manual_seed(5)
            net = cls.from_config(config)
            for parameter in net.parameters():
                nn.init.normal_(parameter, std=0.1)
        for path in part.glob("*.safetensors"):
            path.unlink()
        net.save_pretrained(part)
    return folder


def batch_of(family: Any, count: int = 2, seed: int = 0) -> Batch:
    """Noise for latents, text and whatever else the checkpoint is told, of the smallest
    shape of several frames.
    """
    rules, generator = family.spec.rules, torch.Generator().manual_seed(seed)
    shape = ClipShape(
        rules.frame_step + rules.frame_rest,
        2 * rules.side_multiple,
        2 * rules.side_multiple,
        rules.fps,
    )

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x0 = draw(count, family.spec.latent_channels, *rules.latent_size(shape))
    states = family.encode_text(["a red circle", "a blue square moves up"][:count])
    clip = (
        torch.randint(
            256, (3, shape.frames, shape.height, shape.width), generator=generator
        )
        / 127.5
        - 1
    )
    extras = (
        family.encode_video(clip).extras
        if family.spec.image_conditioning != "none"
        else {}
    )
    if family.spec.control_channels:
        size = (family.spec.control_channels, *rules.latent_size(shape))
        extras = {**extras, "control": draw(*size)}
    clean = torch.zeros(count, 1, x0.shape[2], 1, 1, dtype=torch.bool)
    clean[0, :, 0] = family.spec.image_conditioning == "replace"
    conditioning: Conditioning = family.collate_states(
        [{**state, **extras} for state in states]
    )
    return Batch.of(
        x0,
        conditioning,
        conditioning_mask=clean,
        loss_mask=(~clean).float(),
        window_ids=("w",) * count,
    )


@dataclass
class Rig:
    """A network with what trains in it, streamed or plain, and what its steps have
    measured.
    """

    family: Any
    net: nn.Module
    trainable: TrainableState
    streams: BlockOffload | None
    losses: list[tuple[float, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def steps(
        self, batch: Batch, count: int = 3, parts: int = 1, prior: bool = False
    ) -> Rig:
        """Take real steps; gradients are those that the optimizer is given."""

        def keep(*_: Any) -> None:
            given = {
                n: p.grad.clone()
                for n, p in self.trainable.parameters.items()
                if p.grad is not None
            }
            self.gradients.append(given)

        handle = self.trainable.optimizer.register_step_pre_hook(keep)
        self.net.train()
        spec = self.family.spec
        loss = objective_for_prediction(
            spec.prediction, spec.prediction_constants, TimestepSampler()
        )
        for step in range(1, count + 1):
            generator = torch.Generator().manual_seed(step)
            t = torch.rand(len(batch), generator=generator)
            noise = torch.randn(batch.x0.shape, generator=generator)
            shown = (
                replace(
                    batch,
                    prior_preservation=tuple(i % 2 == 1 for i in range(len(batch))),
                )
                if prior
                else batch
            )
            prepared = StepBatch(
                step, batch.window_ids, batch.captions, t, 0, shown, noise
            )
            context = StepContext(self.family, loss, parts, 1.0, 7, None)
            record = train_step(
                context, self.net, self.trainable, prepared, Clock(CPU), step
            ).read()
            self.losses.append((record["loss"], record["grad_norm"]))  # type: ignore[arg-type]
        handle.remove()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().clone()
            for name, parameter in self.trainable.parameters.items()
        }


def rig(
    family: Any,
    settings: Any,
    method: str = "LORA",
    dropout: float = 0.0,
    isolate: bool = False,
    layers: list[str] | None = None,
    **how: Any,
) -> Rig:
    """A network of the family with an adapter that already does something, or all of it
    training, or some of its ``layers``.

    ``settings``: what fraction of its blocks is streamed and how it is checkpointed;
    ``how``: more for ``stream_blocks``.
    """
    net = family.denoiser(family.spec.experts[-1].name)
    family.isolate_frames(net, isolate)
    if method == "LORA":
        held = add_lora(
            net, family.spec, Lora(rank=4, dropout=dropout, targets="linear"), 0
        )
        generator = torch.Generator().manual_seed(1)
        for name, parameter in held.items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1, generator=generator)
    else:
        held = add_full(net, family.spec, layers)
    streams = None
    if settings is not None:
        resident = held.values() if method == "LORA" else ()
        streams = stream_blocks(
            net, family.spec.blocks, CPU, *settings, list(resident), **how
        )
        held = streams.parameters(held)
    masters = MasterWeights(held)
    optimizer = make_optimizer(
        {"transformer": list(masters.parameters.values())}, Optimizer()
    )
    rates = {
        "transformer": LRSchedule(1e-2 if method == "LORA" else 1e-3, "CONSTANT", 0, 10)
    }
    trainable = TrainableState(
        masters.parameters, optimizer, rates, masters if masters.has_copies else None
    )
    return Rig(family, net, trainable, streams)


def assert_same_bits(one: Rig, other: Rig) -> None:
    """Losses, gradients and weights are equal to the bit."""
    assert one.losses == other.losses
    assert all(loss == loss and norm > 0 for loss, norm in one.losses)
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def resident_bytes(streams: BlockOffload) -> int:
    """What the network's own weights and the buffers take on the device."""
    buffers = streams.buffers
    streamed = (
        {id(tensor) for tensors in buffers.tensors for tensor in tensors}
        if buffers
        else set()
    )
    own = [
        t
        for t in (*streams.net.parameters(), *streams.net.buffers())
        if id(t) not in streamed
    ]
    return sum(t.nbytes for t in own) + sum(
        slot.flat.numel() for slot in (buffers.slots if buffers else ())
    )


@contextmanager
def no_host_sync() -> Iterator[None]:
    """An error where the host waits for the device within."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
