"""Bytes that a step would hold: the real code, run on tensors with shapes and no
memory.

The tensors are on a fake *CPU*. A fake CUDA device ends the process if torch was built
without CUDA, and "meta" takes attention's path of plain matrices. The CPU's fused
attention keeps what CUDA's keeps: its output and a float32 number a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from videotune.config.schema import Config
from videotune.diffusion.base_targets import BaseGuidance
from videotune.diffusion.loss import Objective
from videotune.job.experts import trained
from videotune.latent_cache.clip_ends import appended_sizes
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.checkpointing import checkpoint_blocks
from videotune.memory.quantization import largest_list
from videotune.models.base import DiffusersModel
from videotune.models.pipelines import in_tiles
from videotune.planner.ledger import FIRST, KEPT, PIECE, CountsByPart, Ledger, Reading
from videotune.planner.shallow_networks import MORE, Depths, read_deep, shallow_counts
from videotune.trainer import build, optimizers
from videotune.trainer.step import train_step
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import Clock
from videotune.trainer.text_encoders import text_size
from videotune.trainer.trainable import attach, make_trainable
from videotune.types import Batch, ClipShape, Sound

PHASES = {
    "start": ["forward"],
    "forward": [KEPT, "backward"],
    "backward": ["optimizer"],
    "optimizer": ["end"],
}
"""The phases after each mark of a step's clock."""


def to_fake(net: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Replace each parameter and buffer by a fake tensor of the same shape and dtype.

    Returns:
        The new tensors by the ``id`` of the old ones. A shared tensor stays shared.
    """
    fakes: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        fakes[id(tensor)] = fake

    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = fakes[id(old)]
    return fakes


def fake_mode() -> FakeTensorMode:
    """Return the mode under which a step runs without memory; real constants may be
    used.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass
class FakeNetwork:
    """A fake network with a few of its blocks, and its optimizer."""

    net: nn.Module
    trained: Mapping[str, nn.Parameter]
    trainable: TrainableState
    warm: bool = False
    """Whether a step was made, so that the optimizer has its state."""


class FakeRun:
    """A family on fake tensors.

    Networks and the readings of steps are kept between calls.
    """

    def __init__(
        self, family: DiffusersModel, config: Config, piece: int = PIECE
    ) -> None:
        """Prepare a run.

        Args:
            family: The family, with its base model's configuration.
            config: The run's config.
            piece: Multiple in which memory is counted.
        """
        self.family = family
        self.config = config
        self.mode = fake_mode()
        self.piece = piece
        # with real tables
        self.objective: Objective = build.make_objective(family.spec, config)
        self._nets: dict[Depths, FakeNetwork] = {}
        self._readings: dict[Any, Reading] = {}

    def denoiser(self) -> nn.Module:
        """Return the whole network, without adapters."""
        experts = self.family.spec.experts
        expert = experts[0].name if len(experts) > 1 else None
        return self.family.denoiser(expert, fill=lambda net: None)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Bytes of the weights of each block, by list of blocks; without adapters."""
        net = self.denoiser()
        sizes = {}
        for path in self.family.spec.block_lists:
            blocks = net.get_submodule(path).children()
            sizes[path] = [weight_bytes(block) for block in blocks]
        return sizes

    @cached_property
    def other_weights(self) -> int:
        """Bytes of the denoiser's weights outside of blocks."""
        in_blocks = sum(chain.from_iterable(self.blocks.values()))
        return weight_bytes(self.denoiser()) - in_blocks

    @property
    def depths(self) -> dict[str, int]:
        """The number of blocks of each list of the whole network."""
        counts = {}
        for path, sizes in self.blocks.items():
            counts[path] = len(sizes)
        return counts

    def network(self, depths: Depths) -> FakeNetwork:
        """Return the network with these numbers of blocks, and with its adapters."""
        if depths not in self._nets:
            self._nets[depths] = self._make_network(depths)
        return self._nets[depths]

    def _make_network(self, depths: Depths) -> FakeNetwork:
        net = self.denoiser()
        for path, count in depths:
            parent_path, _, name = path.rpartition(".")
            all_blocks = list(net.get_submodule(path))  # type: ignore[call-overload]
            shallow_list = nn.ModuleList(all_blocks[:count])
            setattr(net.get_submodule(parent_path), name, shallow_list)
        has_temporal_attention = self.config.video_config.use_temporal_attention
        self.family.isolate_frames(net, not has_temporal_attention)

        real_parameters = dict(attach(net, self.family.spec, self.config))
        fakes = to_fake(net, self.mode)
        net.train()
        for module in net.modules():
            # LoHa and LoKr would draw a random number
            if hasattr(module, "module_dropout"):
                module.eval()

        parameters = {}
        for name, real in real_parameters.items():
            parameters[name] = fakes[id(real)]
        with self.mode:
            trainable = self.trainable(parameters)
            return FakeNetwork(net, parameters, trainable)

    def step(
        self, shape: ClipShape, samples: int, checkpointing: str, depths: Depths
    ) -> Reading:
        """Read a training step with one micro-batch, whose optimizer has its state.

        Args:
            shape: Shape of each sample.
            samples: Number of samples.
            checkpointing: The gradient checkpointing.
            depths: The blocks of the network.
        """
        key = (shape, samples, checkpointing, depths)
        if key not in self._readings:
            network = self.network(depths)
            ledger = Ledger(self.piece)
            whole_graph = self.config.compile is True
            checkpoint_blocks(
                network.net,
                checkpointing,
                self.family.spec.block_lists,
                whole_graph=whole_graph,
            )
            with self.mode, self.family.planning_mode():
                prepared = self.prepared(shape, samples)
                if not network.warm:
                    self._train(network, prepared, Ledger(self.piece))
                    network.warm = True
                self._train(network, prepared, ledger)
            self._readings[key] = ledger.reading()
        return self._readings[key]

    def deep_step(self, shape: ClipShape, samples: int, checkpointing: str) -> Reading:
        """Return ``step`` of the whole network, calculated from shallow ones."""

        def read(depths: Depths) -> Reading:
            return self.step(shape, samples, checkpointing, depths)

        return read_deep(read, self.depths)

    def kept_by_block(self, shape: ClipShape, checkpointing: str) -> dict[str, int]:
        """Return the bytes of activations that a block of each list keeps of one sample
        until the backward pass.
        """
        shallow = shallow_counts(self.depths)

        def activations_of(depths: Mapping[str, int]) -> int:
            network = tuple(depths.items())
            reading = self.step(shape, 1, checkpointing, network)
            return reading.phases[KEPT].get("activations", 0)

        kept = {}
        for path, count in self.depths.items():
            few = shallow[path]
            more = min(MORE, count)
            with_few = activations_of(shallow)
            with_more = activations_of({**shallow, path: more})
            grown = max(0, with_more - with_few)
            kept[path] = grown // max(1, more - few)
        return kept

    def _train(self, network: FakeNetwork, prepared: StepBatch, ledger: Ledger) -> None:
        """Do a training step, and count what it holds."""
        context = StepContext(
            self.family,
            self.objective,
            1,
            self.config.max_grad_norm,
            base_guidance=self._base_guidance(prepared),
        )

        def begin_phases(mark: str) -> None:
            ledger.phase(*PHASES[mark])

        clock = Clock(torch.device("cpu"), begin_phases)
        # torch warns about the first block, whose input has no gradient
        with ledger, catch_warnings(action="ignore", category=UserWarning):
            self._name_tensors(network, prepared, ledger)
            hooks = self._add_hooks(network, ledger)
            train_step(context, network.net, network.trainable, prepared, clock)
        for hook in hooks:
            hook.remove()

    def _base_guidance(self, prepared: StepBatch) -> BaseGuidance | None:
        """Return the guidance of the base model that the target keeps, with the states
        of a caption of full length.
        """
        scale = self.config.distilled_guidance
        if scale is None:
            return None
        assert prepared.batch is not None
        with self.mode:
            first = prepared.batch.conditioning.take([0])
        return BaseGuidance(scale, first)

    def _name_tensors(
        self, network: FakeNetwork, prepared: StepBatch, ledger: Ledger
    ) -> None:
        """Name the parts to which the step's tensors belong."""
        assert prepared.batch is not None
        trainable = network.trainable
        trained_tensors = self._trained_tensors(network)
        frozen = []
        for parameter in network.net.parameters():
            if id(parameter) not in trained_tensors:
                frozen.append(parameter)
        ledger.name(frozen, "weights")
        ledger.name(network.net.buffers(), "weights")
        ledger.name(trained_tensors.values(), "trained")
        if trainable.ema:
            ledger.name(trainable.ema.values.values(), "ema")

        for optimizer in optimizers.parts_of(trainable.optimizer):
            for state in optimizer.state.values():
                ledger.name(_tensors(state), "optimizer")
        conditioning = _tensors(vars(prepared.batch.conditioning))
        batch_tensors = [prepared.batch.x0, prepared.noise, *conditioning]
        ledger.name(batch_tensors, "batch")

    def _trained_tensors(self, network: FakeNetwork) -> dict[int, nn.Parameter]:
        """Return master weights and trained parameters by their ``id``."""
        masters = network.trainable.parameters.values()
        in_network = network.trained.values()
        return {id(parameter): parameter for parameter in (*masters, *in_network)}

    def _add_hooks(self, network: FakeNetwork, ledger: Ledger) -> list[Any]:
        """Name gradients when they are made, and tell the blocks apart in the backward
        pass.
        """

        def name_gradient(parameter: nn.Parameter) -> None:
            ledger.name([parameter.grad], "gradients")

        def end_last(*_: Any) -> None:
            ledger.phase("")

        def begin_first(*_: Any) -> None:
            ledger.phase(FIRST)

        hooks: list[Any] = []
        for parameter in self._trained_tensors(network).values():
            hooks.append(parameter.register_post_accumulate_grad_hook(name_gradient))

        blocks: list[nn.Module] = []
        for path in self.family.spec.block_lists:
            blocks += network.net.get_submodule(path).children()
        if len(blocks) > 1:  # called when the gradient of a block's output is known
            last_ended = blocks[-2].register_full_backward_pre_hook
            hooks.append(last_ended(end_last))
            first_begins = blocks[0].register_full_backward_pre_hook
            hooks.append(first_begins(begin_first))
        return hooks

    def trainable(self, parameters: Mapping[str, nn.Parameter]) -> TrainableState:
        """Return the run's trainable state, with AdamW.

        The state of other optimizers is calculated from what they keep for each number.
        """
        if not parameters:  # the few new rows of a text encoder's table
            row = torch.zeros(1, self.family.spec.text_width)
            parameters = {"rows": nn.Parameter(row)}
        adamw = self.config.optimizer.model_copy(update={"name": "ADAMW"})
        dtype_names = {dtype: name for name, dtype in build.DTYPES.items()}
        train_dtype = dtype_names[self.family.dtype]
        changes = {"optimizer": adamw, "train_dtype": train_dtype}
        config = self.config.model_copy(update=changes)
        expert = trained(self.family.spec, self.config)[0]
        trainable = make_trainable(parameters, {}, self.family, config, expert, 1)
        return replace(trainable, text=None)  # text encoders are read by themselves

    def prepared(self, shape: ClipShape, samples: int) -> StepBatch:
        """Return a batch of zeros with the right shapes."""
        spec = self.family.spec
        latent_size = spec.rules.latent_size(shape)
        x0 = torch.zeros(samples, spec.latent_channels, *latent_size)

        states = self.family.blank_states(shape)
        conditioning = self.family.collate_states([states] * samples)
        if self.config.text_in_step:
            conditioning.text.requires_grad_()
        appended = {}
        for name, size in appended_sizes(self.config, shape, spec).items():
            appended[name] = torch.zeros(samples, spec.latent_channels, *size)
        if appended:
            extras = {**conditioning.extras, **appended}
            conditioning = replace(conditioning, extras=extras)

        levels = torch.zeros(samples)
        batch = Batch.of(
            x0,
            conditioning,
            fps=torch.full((samples,), shape.fps),
            has_clean_frames=any(map(spec.is_in_place, self.config.condition_types)),
        )
        sound_t = None
        if shape.sound:
            assert spec.sound is not None
            sound_latents = spec.sound.latents(shape)
            sound_size = (samples, spec.sound.channels, sound_latents, 1, 1)
            is_conditioning = "sound" not in spec.generates
            sound_x0 = torch.zeros(sound_size)
            sound_noise = torch.zeros(sound_size)
            sound = Sound(sound_x0, sound_noise, levels, is_conditioning)
            only_sound = "video" not in spec.generates
            batch = replace(batch, sound=sound, video_is_conditioning=only_sound)
            sound_t = levels if len(spec.generates) == 2 else None
        return StepBatch(
            1,
            batch.window_ids,
            batch.captions,
            levels,
            0,
            batch,
            torch.zeros_like(x0),
            sound_t=sound_t,
        )

    def read_text(self) -> tuple[CountsByPart, float, list[list[int]]]:
        """Read the text encoder over one caption of full length.

        If it runs in the step, its backward pass is included. A ModuleDict has several
        encoders, each with blocks.

        Returns:
            (bytes by part, operations, bytes of the blocks of each encoder)
        """
        in_step = self.config.text_in_step
        with (
            self._part("text_encoder", "text encoder") as (net, ledger),
            torch.set_grad_enabled(in_step),
        ):
            ids = torch.zeros(1, self.family.spec.text_tokens, dtype=torch.long)
            embed = net.get_input_embeddings()  # type: ignore[operator]
            embedded = embed(ids).requires_grad_(in_step)
            mask = torch.ones_like(ids)
            out = net(inputs_embeds=embedded, attention_mask=mask)[0]
            if in_step:
                out.sum().backward()

        encoders = [net]
        if isinstance(net, nn.ModuleDict):
            encoders = list(net.values())
        block_sizes = [_block_bytes(encoder) for encoder in encoders]
        return ledger.phases["text_encoder"], ledger.flops, block_sizes

    def encode(self, shape: ClipShape) -> tuple[CountsByPart, float]:
        """Read the VAE that encodes one clip: bytes by part, and operations."""
        with self._part("vae", "autoencoder") as (net, ledger):
            clip_size = (1, 3, shape.frames, shape.height, shape.width)
            clip = torch.zeros(clip_size)
            net.encode(clip)  # type: ignore[operator]
        return ledger.phases["vae"], ledger.flops

    def decode(self, shape: ClipShape, tiled: bool = False) -> CountsByPart:
        """Read the VAE that decodes one preview, whole or in tiles: bytes by part."""
        latent_size = self.family.spec.rules.latent_size(shape)
        with self._part("vae", "autoencoder") as (net, ledger), in_tiles(net, tiled):
            latent = torch.zeros(1, self.family.spec.latent_channels, *latent_size)
            net.decode(latent)  # type: ignore[operator]
        return ledger.phases["vae"]

    def text_size(self) -> tuple[int, int]:
        """Return how many modules and numbers of the text encoders train."""
        return text_size(self.family, self.config)

    @contextmanager
    def _part(self, name: str, label: str) -> Iterator[tuple[nn.Module, Ledger]]:
        net = self.family.part(name, fill=lambda net: to_fake(net, self.mode))
        ledger = Ledger(self.piece)
        with self.mode, torch.no_grad(), ledger:
            tensors = [*net.parameters(), *net.buffers()]
            ledger.name(tensors, label)
            ledger.phase(name)
            yield net, ledger


def _block_bytes(encoder: nn.Module) -> list[int]:
    """Return the bytes of an encoder's blocks."""
    blocks = encoder.get_submodule(largest_list(encoder)).children()
    return [weight_bytes(block) for block in blocks]


def weight_bytes(net: nn.Module) -> int:
    """Return the bytes of a network's weights."""
    return sum(parameter.nbytes for parameter in net.parameters())


def _tensors(values: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(values))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
