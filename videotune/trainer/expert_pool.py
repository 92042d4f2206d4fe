"""The denoisers of a run, one expert in memory at a time, with their trainable parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from videotune.adapters.layers import Parameters
from videotune.adapters.lora import bind_parameters
from videotune.config.schema import Config
from videotune.console import echo, size
from videotune.diffusion.loss import Objective
from videotune.distributed import DistributedContext, must_run_together
from videotune.errors import VideotuneError
from videotune.job.experts import TEXT, trained
from videotune.latent_cache.sampler import ExpertSchedule, exact
from videotune.memory.accelerator import empty_cache, local_device
from videotune.memory.attention import set_attention
from videotune.memory.block_offload import BlockOffload, stream_blocks
from videotune.memory.checkpointing import (
    INPUTS_ON_HOST,
    OFF,
    ON,
    checkpoint_blocks,
)
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.context_parallel import all_of, process_mesh, split_tokens
from videotune.memory.eight_bit_matmul import matmul_note
from videotune.memory.host_weights import HostWeights
from videotune.memory.quantization import packed_note
from videotune.memory.sharding import Shards
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.trainer.captured_passes import CapturedPasses
from videotune.trainer.step_context import TrainableState
from videotune.trainer.text_encoders import attach_text
from videotune.trainer.trainable import attach, make_trainable


@dataclass(frozen=True)
class ActiveExpert:
    """The expert that a step trains."""

    net: nn.Module
    """Its denoiser, on the device."""
    trainable: TrainableState
    expert_step: int
    """How many steps this expert has had, with the present one; all steps so far if only
    text encoders train.
    """


class ExpertPool(Mapping[str, "nn.Module"]):
    """The denoisers by expert name.

    Looking one up loads it in place of the one in memory.

    What trains of an expert outlives its denoiser. A model with one denoiser has one
    expert, which stays loaded.
    """

    def __init__(
        self,
        expert_schedule: ExpertSchedule,
        names: Sequence[str],
        open_net: Callable[[str], nn.Module],
    ) -> None:
        self.expert_schedule = expert_schedule
        self._names = tuple(names)
        self._open_net = open_net
        self.trainables: dict[str, TrainableState] = {}
        self.text_params: frozenset[str] = frozenset()
        """Names of trainable parameters that belong to text encoders."""
        self.block_offload: BlockOffload | None = None
        """Moves the blocks of the denoiser in memory.

        None: all of it stays on the device.
        """
        self.attention = "native"
        """diffusers' name of the attention backend."""
        self.shards: dict[str, Shards] = {}
        """This process's rows of sharded denoisers, by expert."""
        self.compiled: CompiledBlocks | None = None
        """The compiled blocks of all experts. None: none are."""
        self.loaded: tuple[str, nn.Module] | None = None
        """Name and denoiser of the expert in memory. None: none has been loaded yet."""
        self.captured: CapturedPasses | None = None
        """CUDA graphs of the denoiser in memory. None: the run has none."""

    def __getitem__(self, name: str) -> nn.Module:
        self.load(name)
        return self.net

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def net(self) -> nn.Module:
        """The denoiser that is in memory."""
        assert self.loaded is not None, "no expert has been loaded yet"
        return self.loaded[1]

    @property
    def current(self) -> str:
        """The name of the expert that is in memory."""
        assert self.loaded is not None, "no expert has been loaded yet"
        return self.loaded[0]

    @property
    def trainable(self) -> TrainableState:
        """What trains with the denoiser that is in memory."""
        return self.trainables[TEXT if TEXT in self.trainables else self.current]

    def load(self, name: str) -> None:
        """Load an expert in place of the one in memory.

        A reference that a caller keeps to that one keeps it in memory.
        """
        if name not in self._names:
            raise KeyError(name)
        if self.loaded is None or self.loaded[0] != name:
            self.drop()
            self.loaded = (name, self._open_net(name))

    def drop(self) -> None:
        """Free the denoiser. What trains stays."""
        self.free_graphs()
        self.loaded = None
        self.block_offload = None
        empty_cache()

    def free_graphs(self) -> None:
        """Free the memory of CUDA graphs; a later step captures them again."""
        if self.captured is not None:
            self.captured.clear()

    def activate(self, step: int) -> ActiveExpert:
        """Load the expert that runs at ``step``, counted from 1, with its trainable parameters."""
        name = self.expert_schedule.at(step)
        self.load(name)

        # If only text trains, it learns from every step, whichever expert runs.
        if TEXT in self.trainables:
            expert = name if len(self._names) > 1 else None
            trainable = replace(self.trainables[TEXT], expert=expert)
            return ActiveExpert(self.net, trainable, expert_step=step)

        expert_step = self.expert_schedule.count(step, name)
        return ActiveExpert(self.net, self.trainables[name], expert_step)


def open_pool(
    family: DiffusersModel,
    config: Config,
    expert_schedule: ExpertSchedule,
    steps: int,
    first: int,
    dist: DistributedContext,
) -> ExpertPool:
    """Open the denoisers of a run and attach what trains.

    Args:
        family: the base model.
        config: the run's settings.
        expert_schedule: which expert trains at which step.
        steps: number of steps of the run.
        first: the first step to do; its expert is in memory at the end.
        dist: this process among those of the run.
    """
    mesh = None
    if must_run_together(config, dist):
        mesh = process_mesh(local_device().type, dist.data_size, dist.context_parallel)

    loader = ExpertLoader(family, config, expert_schedule.names, mesh)
    names = [expert.name for expert in family.spec.experts]
    # It is called only once the pool is there.
    pool = ExpertPool(expert_schedule, names, lambda name: loader.load(pool, name))
    if config.attention != "auto":
        pool.attention = config.attention
    if config.compile is True:
        pool.compiled = CompiledBlocks()

    text_groups = attach_text(family, config)
    pool.text_params = frozenset(chain.from_iterable(text_groups.values()))
    # A resume of a finished run has no step left: its last expert is loaded.
    first_expert = expert_schedule.at(min(max(first, 1), steps))

    if not config.transformer.train:
        text_state = make_trainable({}, text_groups, family, config, TEXT, steps)
        pool.trainables[TEXT] = text_state
        pool.load(first_expert)
        if pool.shards:
            pool.trainables[TEXT] = replace(
                text_state, shards=pool.shards[first_expert]
            )
        return pool

    # The expert of the first step is opened last, so that it is the one that stays in
    # memory. ``text_groups`` go to one expert only: text trains beside a denoiser with
    # FINE_TUNE, which trains one expert.
    for name in sorted(expert_schedule.names, key=lambda name: name == first_expert):
        pool.load(name)
        expert_steps = expert_schedule.count(steps, name)
        state = make_trainable(
            loader.new_parameters.pop(name),
            text_groups,
            family,
            config,
            name,
            expert_steps,
        )
        pool.trainables[name] = replace(state, shards=pool.shards.get(name))
    return pool


class ExpertLoader:
    """Load a denoiser and give it what trains: new parameters the first time, those of
    the pool from then on.
    """

    def __init__(
        self,
        family: DiffusersModel,
        config: Config,
        trained_experts: Sequence[str],
        mesh: DeviceMesh | None,
    ) -> None:
        """``mesh``: the processes that must run the network together (``process_mesh``)."""
        self._family = family
        self._config = config
        self._trained_experts = tuple(trained_experts)
        self._mesh = mesh
        self._weights_mesh: DeviceMesh | None = None
        """The processes that share the weights out. None: each has all of them."""
        if mesh is not None and config.sharding == "FULL":
            self._weights_mesh = all_of(mesh)
        self.new_parameters: dict[str, Parameters] = {}
        """Parameters by expert that no optimizer holds yet."""
        self._has_reported = False
        """Whether it is printed how denoisers are stored and placed."""
        self._host_weights: dict[str, HostWeights] = {}
        """Streamed weights that train, by expert. They outlive the denoiser."""

    def load(self, pool: ExpertPool, name: str) -> nn.Module:
        """Return the denoiser of an expert, placed by the config, with its trained
        parameters bound into it.

        The first time, what the optimizer is to update is left in ``new_parameters``.
        """
        is_first = not self._has_reported
        self._has_reported = True
        net = self._open(is_first=is_first, name=name)

        # An adapter is injected again each time. When the expert is loaded again, its
        # parameters are replaced by the trained ones.
        parameters: Parameters = {}
        if name in self._trained_experts:
            parameters = attach(net, self._family.spec, self._config)
        trainable = pool.trainables.get(name)
        if trainable is not None:
            parameters = trainable.module_params or trainable.parameters
            self._bind(pool, name, net, parameters)

        self._set_up_attention(pool, net)
        if self._weights_mesh is not None:
            new_parameters = self._shard(
                pool, name, net, parameters, self._weights_mesh
            )
        else:
            new_parameters = self._place(pool, name, net, parameters, is_first=is_first)

        if trainable is None and parameters:
            self.new_parameters[name] = new_parameters
        return net

    def _open(self, *, is_first: bool, name: str) -> nn.Module:
        """Read a denoiser from its files: onto the host if its blocks go to the device
        one at a time.
        """
        from_host = (
            bool(self._config.layer_offload_fraction) or self._weights_mesh is not None
        )
        net = self._family.denoiser(
            name, device=torch.device("cpu") if from_host else None
        )

        if is_first:
            self._echo_dtypes(net)
        uses_temporal_attention = self._config.video_config.use_temporal_attention
        self._family.isolate_frames(net, not uses_temporal_attention)
        return net

    def _echo_dtypes(self, net: nn.Module) -> None:
        """Print how much of the denoiser is stored, or multiplies, in fewer bits."""
        weights = self._family.weights
        stored_dtype = weights.transformer or weights.matmul
        if stored_dtype is not None:
            echo(packed_note(net, "the denoiser", stored_dtype))
        if weights.matmul is not None:
            echo(matmul_note(net, "the denoiser", weights.matmul))

    def _set_up_attention(self, pool: ExpertPool, net: nn.Module) -> None:
        """Set the attention back end, and split tokens over the processes of a group."""
        if pool.attention != "native":
            set_attention(net, pool.attention)
        if self._mesh is None or self._mesh["ulysses"].size() == 1:
            return
        plan = self._family.token_plan(net)
        split_tokens(net, plan, self._family.video_attentions(net), self._mesh)

    def _bind(
        self, pool: ExpertPool, name: str, net: nn.Module, parameters: Parameters
    ) -> None:
        """Put trained parameters into a denoiser that was read again.

        Parameters of text encoders are left out, and those that streaming or sharding
        puts into place.
        """
        left_out = set(pool.text_params)
        if name in self._host_weights:
            left_out |= set(self._host_weights[name].parameters)
        if name in pool.shards:
            left_out |= set(pool.shards[name].layout)

        bound = {}
        for key, parameter in parameters.items():
            if key not in left_out:
                bound[key] = parameter
        bind_parameters(net, bound)

    def _shard(
        self,
        pool: ExpertPool,
        name: str,
        net: nn.Module,
        parameters: Parameters,
        mesh: DeviceMesh,
    ) -> Parameters:
        """Shard a denoiser over the processes and return this process's part of its
        parameters.
        """
        mode = self._config.gradient_checkpointing or ON
        checkpoint_blocks(net, mode, whole_graph=True)
        if pool.compiled is not None:
            pool.compiled.add(net, self._family.spec.block_lists, mode)
        shards = pool.shards.setdefault(name, Shards())
        # Every process has an adapter whole. Without one the network's own weights train.
        adapter: tuple[nn.Parameter, ...] = ()
        if self._config.training_method != "FINE_TUNE":
            adapter = tuple(parameters.values())
        shards.bind(net, self._family.spec.blocks, mesh, adapter)

        local: dict[str, nn.Parameter] = {}
        for key, parameter in parameters.items():
            if key not in shards.layout:
                local[key] = parameter
            elif key in shards.local_parameters:
                local[key] = shards.local_parameters[key]
            # Else it is a small weight of which this process has no row.
        return local

    def _place(
        self,
        pool: ExpertPool,
        name: str,
        net: nn.Module,
        parameters: Parameters,
        *,
        is_first: bool,
    ) -> Parameters:
        """Set up compilation and block offload, and return the parameters that the optimizer
        updates: of streamed blocks, those in host memory.
        """
        pool.block_offload = arrange_blocks(
            net,
            self._family.spec,
            self._config,
            parameters,
            self._host_weights.get(name),
            report=is_first,
            compiled=pool.compiled,
        )
        if pool.block_offload is None:
            return parameters

        host_weights = pool.block_offload.host_weights
        if host_weights and host_weights.parameters:
            self._host_weights[name] = host_weights
        # When a denoiser is loaded again, the pool has what trains already.
        if name in pool.trainables:
            return parameters
        return pool.block_offload.parameters(parameters)


def arrange_blocks(
    net: nn.Module,
    spec: ModelSpec,
    config: Config,
    parameters: Parameters,
    host_weights: HostWeights | None,
    *,
    report: bool,
    compiled: CompiledBlocks | None = None,
) -> BlockOffload | None:
    """Set up gradient checkpointing, offloading and compilation of the blocks.

    Args:
        net: the denoiser.
        spec: facts of its model.
        config: the run's settings.
        parameters: its trainable parameters.
        host_weights: its streamed weights from an earlier load, if they train.
        report: print what streaming means.
        compiled: compiles the blocks. None: they stay uncompiled.

    Returns:
        What moves the blocks, or None if nothing waits on the host.
    """
    mode = config.gradient_checkpointing or ON
    fraction = config.layer_offload_fraction or 0.0
    if not fraction and mode not in INPUTS_ON_HOST:
        draws = bool(config.lora.dropout)
        checkpoint_blocks(
            net,
            mode,
            spec.block_lists,
            draws=draws,
            whole_graph=compiled is not None,
        )
        if compiled is not None:
            compiled.add(net, spec.block_lists, mode, draws=draws)
        return None

    # ``stream_blocks`` checkpoints around the compiled blocks, so they have none inside.
    if compiled is not None:
        compiled.add(net, spec.block_lists, OFF)

    device = local_device()
    resident = (
        () if config.training_method == "FINE_TUNE" else tuple(parameters.values())
    )
    offload = stream_blocks(
        net, spec.block_lists, device, fraction, mode, resident, host_weights, echo
    )
    if report and offload.host_weights is not None:
        echo(
            f"{len(offload.streamed)} blocks are streamed from host memory "
            f"({size(offload.host_weights.size)}) and recomputed in the backward pass"
        )
        if device.type == "cpu":
            echo(
                "note: layer_offload_fraction saves GPU memory; on a CPU it uses more memory"
            )
    return offload


def make_expert_schedule(
    spec: ModelSpec, config: Config, objective: Objective
) -> ExpertSchedule:
    """Return which expert each step trains: by its share of the noise levels, or as the
    config says.
    """
    names = trained(spec, config)
    for expert in spec.experts:
        lowest = max(expert.t_lo, config.timestep_min)
        highest = min(expert.t_hi, config.timestep_max)
        if expert.name in names and lowest >= highest:
            raise VideotuneError(
                f"timestep_min and timestep_max: they leave no noise level for the expert {expert.name} of "
                f"{spec.title}, which covers {expert.t_lo:g} to {expert.t_hi:g}. Name only the other one in experts"
            )
    if len(names) == 1:
        return ExpertSchedule(names)

    first = next(expert for expert in spec.experts if expert.name == names[0])
    share = config.expert_share
    if share is None:
        share = objective.timesteps.mass(first.t_lo, first.t_hi)
    return ExpertSchedule(names, exact(share), config.expert_period)


def shares(expert_schedule: ExpertSchedule) -> dict[str, float]:
    """Return the share of the steps of each expert that trains."""
    names = expert_schedule.names
    if len(names) == 1:
        return {names[0]: 1.0}
    first_share: Fraction = expert_schedule.share
    return {names[0]: float(first_share), names[1]: float(1 - first_share)}
