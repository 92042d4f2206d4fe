"""Bytes that a step would hold, by part and phase: the real code, run on tensors that have shapes and no memory.

The tensors lie on a fake *CPU*. A fake CUDA device ends the process where torch was built without CUDA, and "meta" takes
attention's path of plain matrices; the CPU's fused attention keeps what CUDA's keeps, its output and a float32 number a row.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from videotune.config.schema import Config
from videotune.diffusion.loss import Objective
from videotune.files import Count, Number
from videotune.job.experts import trained
from videotune.latent_cache.batches import StepBatch
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.models.base import DiffusersModel
from videotune.models.pipelines import in_tiles
from videotune.trainer import build, optimizers
from videotune.trainer.step import Clock, StepSettings, TrainableState, train_step
from videotune.trainer.trainable import attach, make_trainable
from videotune.types import Batch, ClipShape

PIECE = 512
"""CUDA's caching allocator hands memory out in multiples of so many bytes."""

CountsByPart = Mapping[str, Count]
"""Bytes by part."""


@dataclass(frozen=True)
class Reading:
    """Of each phase the bytes of each part at the moment when most were held; and the floating-point operations done."""

    phases: Mapping[str, CountsByPart]
    flops: Number

    def extrapolated(self, one: Reading, other: Reading, times: float) -> Reading:
        """This reading plus ``times`` the difference between two others, phase by phase.

        Phases are extrapolated apart because the maximum of several straight lines is no straight line.
        """
        grown = {name: plus(other.phases[name], one.phases[name], -1) for name in self.phases}
        phases = {name: plus(parts, grown[name], times) for name, parts in self.phases.items()}
        return Reading(phases, self.flops + (other.flops - one.flops) * times)


def plus(parts: CountsByPart, more: CountsByPart, times: float = 1) -> dict[str, int]:
    """``times`` the bytes of ``more`` added to the bytes of ``parts``, part by part, in alphabetical order."""
    return {
        part: parts.get(part, 0) + round(more.get(part, 0) * times)
        for part in sorted({*parts, *more})
    }


Depths = tuple[tuple[str, int], ...]
"""The number of blocks of each list of blocks, by the list's path."""

FEW = 2
MORE = 4
"""Blocks of a list in the shallow networks. With one block, the first and the last block would be the same."""


def deep(read: Callable[[Depths], Reading], blocks: Mapping[str, int]) -> Reading:
    """The reading of a network with so many ``blocks`` of each list, from a shallow network and one more for each list.

    Blocks of a list are alike, so every number is affine in how many there are. Shallow networks are read as they are.
    """
    few = {path: min(FEW, count) for path, count in blocks.items()}
    result = base = read(tuple(few.items()))
    for path, count in blocks.items():
        more = min(MORE, count)
        if more > few[path]:
            other = read(tuple({**few, path: more}.items()))
            result = result.extrapolated(base, other, (count - few[path]) / (more - few[path]))
    return result


class Ledger(TorchDispatchMode):
    """While entered, counts the bytes of live storages. What nobody has named is "activations".

    torch's own MemTracker cannot: it puts a hook on every parameter, which a frozen one refuses.
    """

    def __init__(self, piece: int = PIECE) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        self.phases: dict[str, dict[str, int]] = {}
        self.flops = 0.0
        self._piece = piece
        self._phase = ""
        self._most = -1
        self._entries: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> [part, bytes]

    def phase(self, *names: str) -> None:
        """What is held from now on belongs to this phase; of several, to the last, and what is held now to each."""
        for self._phase in names:
            self._most = (
                sum(self.phases[self._phase].values()) if self._phase in self.phases else -1
            )
            self._look()

    def name(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """The storages of these tensors belong to a part, whether they were seen before or not."""
        for tensor in tensors:
            if tensor is not None:
                entry = self._entry(tensor.untyped_storage(), part)
                self.held[entry[0]] -= entry[1]
                self.held[part] += entry[1]
                entry[0] = part
        self._look()

    def reading(self) -> Reading:
        """What was seen so far."""
        return Reading({name: dict(parts) for name, parts in self.phases.items()}, self.flops)

    def _entry(self, storage: Any, part: str) -> list[Any]:
        """The entry of a storage; it belongs to ``part`` if it was not seen before."""
        if storage not in self._entries:
            self._entries[storage] = entry = [
                part,
                -(-storage.nbytes() // self._piece) * self._piece,
            ]
            self.held[part] += entry[1]
            weakref.finalize(storage, self._freed, entry)
        return self._entries[storage]

    def _freed(self, entry: list[Any]) -> None:
        self.held[entry[0]] -= entry[1]

    def _look(self) -> None:
        total = sum(self.held.values())
        if self._phase and total > self._most:
            self._most = total
            self.phases[self._phase] = {part: size for part, size in self.held.items() if size}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._entry(leaf.untyped_storage(), "activations")
        self._look()
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out


_ATEN = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
_FLOPS: dict[Any, Callable[..., float]] = dict(flop_registry)
for _way in ("", "_backward"):
    _FLOPS[getattr(_ATEN, f"{_FLASH}_for_cpu{_way}")] = flop_registry[
        getattr(_ATEN, f"{_FLASH}{_way}")
    ]
"""torch's own counts, of matrix products, convolutions and attention; FlopCounterMode itself keeps activations alive."""


def to_fake(net: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Replace each parameter and buffer by a fake tensor of the same shape and dtype on the fake CPU.

    Returns the new tensors by the ``id`` of the old ones; a tensor that stands in two places stays one.
    """
    made: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        own = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = (
            nn.Parameter(fake, requires_grad=tensor.requires_grad) if own else fake
        )
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update(
                {
                    name: made[id(tensor)]
                    for name, tensor in tensors.items()
                    if tensor is not None
                }
            )
    return made


def fake_mode() -> FakeTensorMode:
    """The mode under which a step runs without memory; real tensors that it meets (constants, tables) are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


KEPT = "kept"
PHASES = {
    "start": ["forward"],
    "forward": [KEPT, "backward"],
    "backward": ["optimizer"],
    "optimizer": ["end"],
}
"""What comes after each mark of a step's clock; KEPT is the moment between two."""


FIRST = "first block"
PASSES = ("forward", "backward", FIRST)
"""Phases of a micro-batch: "backward" is that of what comes after the blocks and of the last block, FIRST the first block's
and what comes before it. The blocks between them are calculated: their moments lie on a straight line."""


@dataclass
class FakeNetwork:
    """A network with a few of its blocks, fake, and what of it trains with its optimizer. ``warm``: a step was made."""

    net: nn.Module
    held: Mapping[str, nn.Parameter]
    trainable: TrainableState
    warm: bool = False


class FakeRun:
    """A family whose parts are shapes. Networks and the readings of steps are kept between calls.

    ``piece``: memory is counted in multiples of so many bytes, as CUDA hands it out.
    """

    def __init__(self, family: DiffusersModel, config: Config, piece: int = PIECE) -> None:
        self.family = family
        self.config = config
        self.mode = fake_mode()
        self.piece = piece
        self.objective: Objective = build.make_objective(
            family.spec, config
        )  # with real tables
        self._nets: dict[Depths, FakeNetwork] = {}
        self._readings: dict[Any, Reading] = {}

    def denoiser(self) -> nn.Module:
        """The whole network, without adapters."""
        experts = self.family.spec.experts
        return self.family.denoiser(
            experts[0].name if len(experts) > 1 else None, fill=lambda net: None
        )

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Bytes of the weights of each block of the whole network, by list of blocks; without adapters."""
        net = self.denoiser()
        paths = self.family.spec.blocks
        return {
            path: [weight_bytes(block) for block in net.get_submodule(path).children()]
            for path in paths
        }

    @property
    def depths(self) -> dict[str, int]:
        """The number of blocks of each list of the whole network."""
        return {path: len(sizes) for path, sizes in self.blocks.items()}

    def network(self, depths: Depths) -> FakeNetwork:
        """The network with so many blocks of each list, adapters in it."""
        if depths not in self._nets:
            net = self.denoiser()
            for path, count in depths:
                above, _, last = path.rpartition(".")
                kept = list(net.get_submodule(path))[:count]  # type: ignore[call-overload]
                setattr(net.get_submodule(above), last, nn.ModuleList(kept))
            self.family.isolate_frames(net, not self.config.video_config.use_temporal_attention)
            held = dict(attach(net, self.family.spec, self.config))
            new = to_fake(net, self.mode)
            net.train()
            for (
                module
            ) in net.modules():  # LoHa and LoKr ask a random number whether they take part
                if hasattr(module, "module_dropout"):
                    module.eval()
            held = {name: new[id(p)] for name, p in held.items()}
            with self.mode:
                self._nets[depths] = FakeNetwork(net, held, self.trainable(held))
        return self._nets[depths]

    def step(
        self, shape: ClipShape, samples: int, checkpointing: str, depths: Depths
    ) -> Reading:
        """A training step with one micro-batch of ``samples`` of this shape, the optimizer's state already there."""
        key = (shape, samples, checkpointing, depths)
        if key not in self._readings:
            net = self.network(depths)
            ledger = Ledger(self.piece)
            checkpoint_blocks(net.net, checkpointing)
            with self.mode:
                prepared = self.prepared(shape, samples)
                if not net.warm:
                    self._train(net, prepared, Ledger(self.piece))
                    net.warm = True
                self._train(net, prepared, ledger)
            self._readings[key] = ledger.reading()
        return self._readings[key]

    def deep_step(self, shape: ClipShape, samples: int, checkpointing: str) -> Reading:
        """``step`` of the whole network, calculated from shallow ones."""
        return deep(
            lambda depths: self.step(shape, samples, checkpointing, depths), self.depths
        )

    def _train(self, net: FakeNetwork, prepared: StepBatch, ledger: Ledger) -> None:
        assert prepared.batch is not None
        trainable = net.trainable
        own = {id(p): p for p in [*trainable.parameters.values(), *net.held.values()]}
        # torch warns of the first block, whose input has no gradient
        with ledger, catch_warnings(action="ignore", category=UserWarning):
            ledger.name((p for p in net.net.parameters() if id(p) not in own), "weights")
            ledger.name(net.net.buffers(), "weights")
            ledger.name(own.values(), "trained")
            ledger.name(trainable.ema.values.values() if trainable.ema else (), "ema")
            states = [
                state
                for part in optimizers.parts_of(trainable.optimizer)
                for state in part.state.values()
            ]
            ledger.name((x for state in states for x in _tensors(state)), "optimizer")
            ledger.name(
                [
                    prepared.batch.x0,
                    prepared.noise,
                    *_tensors(vars(prepared.batch.conditioning)),
                ],
                "batch",
            )
            hooks: list[Any] = [
                p.register_post_accumulate_grad_hook(
                    lambda p: ledger.name([p.grad], "gradients")
                )
                for p in own.values()
            ]
            blocks = [
                block
                for path in self.family.spec.blocks
                for block in net.net.get_submodule(path).children()
            ]
            if len(blocks) > 1:  # called when the gradient of a block's output is known
                hooks.append(
                    blocks[-2].register_full_backward_pre_hook(lambda *_: ledger.phase(""))
                )
                hooks.append(
                    blocks[0].register_full_backward_pre_hook(lambda *_: ledger.phase(FIRST))
                )
            settings = StepSettings(self.family, self.objective, 1, self.config.max_grad_norm)
            clock = Clock(torch.device("cpu"), lambda phase: ledger.phase(*PHASES[phase]))
            train_step(settings, net.net, trainable, prepared, clock)
        for hook in hooks:
            hook.remove()

    def trainable(self, held: Mapping[str, nn.Parameter]) -> TrainableState:
        """The run's own, with AdamW: other optimizers' state is counted by what they keep a number."""
        if not held:  # the new rows of a text encoder's table, which are next to nothing
            held = {"rows": nn.Parameter(torch.zeros(1, self.family.spec.text_width))}
        adamw = self.config.optimizer.model_copy(update={"name": "ADAMW"})
        dtype = next(name for name, dtype in build.DTYPES.items() if dtype == self.family.dtype)
        planned = self.config.model_copy(update={"optimizer": adamw, "train_dtype": dtype})
        name = trained(self.family.spec, self.config)[0]
        trainable = make_trainable(held, {}, self.family, planned, name, 1)
        return replace(trainable, text=None)  # text encoders are read apart

    def prepared(self, shape: ClipShape, samples: int) -> StepBatch:
        """A batch of zeros of the right shapes."""
        spec = self.family.spec
        frames, rows, columns = spec.rules.latent_size(shape)
        x0 = torch.zeros(samples, spec.latent_channels, frames, rows, columns)
        conditioning = self.family.condition([self.family.blank_states(shape)] * samples)
        if self.config.text_in_step:
            conditioning.text.requires_grad_()  # gradients go into it
        given = spec.image_conditioning == "replace" and bool(
            self.config.first_frame_probability
        )
        batch = Batch.of(
            x0, conditioning, fps=torch.full((samples,), shape.fps), has_conditioning=given
        )
        return StepBatch(
            1,
            batch.window_ids,
            batch.captions,
            torch.zeros(samples),
            0,
            batch,
            torch.zeros_like(x0),
        )

    def read_text(self) -> tuple[CountsByPart, float, list[list[int]]]:
        """The text encoder over one caption of full length: bytes by part, operations, and the bytes of its blocks.

        A part that is a ModuleDict holds several encoders, and each of them has blocks. Where it is used in the step: with
        its backward pass.
        """
        used = self.config.text_in_step
        with (
            self._part("text_encoder", "text encoder") as (net, ledger),
            torch.set_grad_enabled(used),
        ):
            ids = torch.zeros(1, self.family.spec.text_tokens, dtype=torch.long)
            embedded = net.get_input_embeddings()(ids).requires_grad_(used)  # type: ignore[operator]
            out = net(inputs_embeds=embedded, attention_mask=torch.ones_like(ids))[0]
            if used:
                out.sum().backward()
        blocks = []
        for encoder in net.values() if isinstance(net, nn.ModuleDict) else [net]:
            lists = [
                list(module)
                for module in encoder.modules()
                if isinstance(module, nn.ModuleList)
            ]
            blocks.append([weight_bytes(block) for block in max(lists, key=len)])
        return ledger.phases["text_encoder"], ledger.flops, blocks

    def encode(self, shape: ClipShape) -> CountsByPart:
        """The VAE over one clip of this shape: bytes by part."""
        with self._part("vae", "autoencoder") as (net, ledger):
            net.encode(torch.zeros(1, 3, shape.frames, shape.height, shape.width))  # type: ignore[operator]
        return ledger.phases["vae"]

    def decode(self, shape: ClipShape, tiled: bool = False) -> CountsByPart:
        """The VAE that decodes one preview of this shape, whole or in tiles: bytes by part."""
        size = self.family.spec.rules.latent_size(shape)
        with self._part("vae", "autoencoder") as (net, ledger), in_tiles(net, tiled):
            net.decode(torch.zeros(1, self.family.spec.latent_channels, *size))  # type: ignore[operator]
        return ledger.phases["vae"]

    @contextmanager
    def _part(self, name: str, label: str) -> Iterator[tuple[nn.Module, Ledger]]:
        net = self.family.part(name, fill=lambda net: to_fake(net, self.mode))
        ledger = Ledger(self.piece)
        with self.mode, torch.no_grad(), ledger:
            ledger.name([*net.parameters(), *net.buffers()], label)
            ledger.phase(name)
            yield net, ledger


def weight_bytes(net: nn.Module) -> int:
    """Bytes of a network's weights."""
    return sum(p.nbytes for p in net.parameters())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(values)) if isinstance(leaf, Tensor)]
