"""The denoisers of a run by their experts' names, one of them in memory, and what of each trains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from videotune.adapters.adapter_types import parse_param_name
from videotune.adapters.layers import Parameters, add_full
from videotune.adapters.lora import add_lora, bind_parameters, rule_of
from videotune.config.optimizers import default_warmup
from videotune.config.schema import Config, Lora
from videotune.console import echo, size
from videotune.diffusion.loss import Objective
from videotune.distributed import DistributedContext, sharded
from videotune.errors import VideotuneError
from videotune.job.experts import TEXT, trained
from videotune.latent_cache.sampler import ExpertSchedule, exact
from videotune.memory.accelerator import empty_cache, local_device
from videotune.memory.attention import set_attention
from videotune.memory.block_offload import BlockOffload, stream_blocks
from videotune.memory.checkpointing import CPU_OFFLOADED, ON, checkpoint_blocks
from videotune.memory.compiling import compile_blocks
from videotune.memory.host_weights import HostWeights
from videotune.memory.quantization import packed_note
from videotune.memory.sharding import Shards
from videotune.trainer.build import dtype_name
from videotune.trainer.ema import EmaWeights
from videotune.trainer.low_precision import BackwardOptimizer, MasterWeights
from videotune.trainer.optimizers import LRSchedule, make_optimizer, parts_of
from videotune.trainer.schedule_free import ScheduleFreeWeights
from videotune.trainer.step import TrainableState
from videotune.trainer.text_encoders import attach_text, live_text
from videotune.types import Family, ModelSpec


class ExpertPool(Mapping[str, "nn.Module"]):
    """Looked up by name, an expert takes the place of the one that was in memory; what trains of it stays the same.

    A model with one denoiser has one expert, which stays.
    """

    def __init__(
        self,
        expert_schedule: ExpertSchedule,
        names: Sequence[str],
        open_net: Callable[[str], nn.Module],
    ) -> None:
        self.expert_schedule = expert_schedule
        self._names = tuple(names)
        self._open = open_net
        self.trainables: dict[str, TrainableState] = {}
        self.text_params: frozenset[str] = (
            frozenset()
        )  # what trains and is of no network here, by name
        self.streams: BlockOffload | None = None
        self.attention = "native"  # diffusers' name of what computes it
        self.shards: dict[
            str, Shards
        ] = {}  # of networks that are cut into rows: what trains of them, by expert
        self.loaded: tuple[str, nn.Module] | None = None

    def __getitem__(self, name: str) -> nn.Module:
        self.load(name)
        return self.net

    def load(self, name: str) -> None:
        """Load an expert in place of the one in memory, which a caller that keeps a reference to it would keep there too."""
        if name not in self._names:
            raise KeyError(name)
        if self.loaded is None or self.loaded[0] != name:
            self.drop()
            self.loaded = (name, self._open(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def net(self) -> nn.Module:
        """The denoiser that is in memory."""
        assert self.loaded is not None, "none was looked up yet"
        return self.loaded[1]

    @property
    def current(self) -> str:
        """The name of the expert that is in memory."""
        assert self.loaded is not None, "none was looked up yet"
        return self.loaded[0]

    def switch(self, step: int) -> tuple[nn.Module, TrainableState, int]:
        """(network, what trains of it, how many steps that has had with this one)."""
        name = self.expert_schedule.at(step)
        if TEXT in self.trainables:  # it learns from every step, whichever expert that is
            several = len(self._names) > 1
            return (
                self[name],
                replace(self.trainables[TEXT], expert=name if several else None),
                step,
            )
        return self[name], self.trainables[name], self.expert_schedule.count(step, name)

    @property
    def trainable(self) -> TrainableState:
        """What trains with the denoiser that is in memory."""
        return self.trainables[TEXT if TEXT in self.trainables else self.current]

    def drop(self) -> None:
        """Nothing is in memory but what trains."""
        self.loaded = self.streams = None
        empty_cache()


def make_expert_schedule(spec: ModelSpec, config: Config, loss: Objective) -> ExpertSchedule:
    """Which expert each step trains: by its share of the draws of t, or as the config says."""
    names = trained(spec, config)
    for expert in spec.experts:
        if expert.name in names and not max(expert.t_lo, config.timestep_min) < min(
            expert.t_hi, config.timestep_max
        ):
            raise VideotuneError(
                f"timestep_min and timestep_max: the expert {expert.name} of {spec.title} is for noise levels from "
                f"{expert.t_lo:g} to {expert.t_hi:g}, of which they leave none; name the other one as experts"
            )
    if len(names) == 1:
        return ExpertSchedule(names)
    first = next(expert for expert in spec.experts if expert.name == names[0])
    mass = loss.timesteps.mass(first.t_lo, first.t_hi)
    share = mass if config.expert_share is None else config.expert_share
    return ExpertSchedule(names, exact(share), config.expert_period)


def shares(expert_schedule: ExpertSchedule) -> dict[str, float]:
    """The share of the steps of each expert that trains."""
    first: Fraction = expert_schedule.share if len(expert_schedule.names) > 1 else Fraction(1)
    return {
        name: float(part)
        for name, part in zip(expert_schedule.names, (first, 1 - first), strict=False)
    }


def open_pool(
    family: Family,
    config: Config,
    expert_schedule: ExpertSchedule,
    steps: int,
    first: int,
    dist: DistributedContext,
) -> ExpertPool:
    """The denoisers with what trains in them; the one of step ``first`` is in memory."""
    mesh = (
        init_device_mesh(local_device().type, (dist.size,)) if sharded(config, dist) else None
    )
    fresh: dict[str, Parameters] = {}  # of an expert that has no learner yet
    homes: dict[
        str, HostWeights
    ] = {}  # of streamed weights that train, which outlive the network

    def open_net(name: str) -> nn.Module:
        from_host = bool(config.layer_offload_fraction) or mesh is not None
        net = family.denoiser(name, device=torch.device("cpu") if from_host else None)
        first = not pool.trainables and not fresh
        if first and (kept := family.weights.transformer) is not None:
            echo(packed_note(net, "the denoiser", kept))
        family.isolate_frames(net, not config.video_config.use_temporal_attention)
        held: Parameters = (
            attach(net, family.spec, config) if name in expert_schedule.names else {}
        )
        trainable = pool.trainables.get(name)
        home = homes.get(name)
        shards = pool.shards.setdefault(name, Shards()) if mesh is not None else None
        if trainable is not None:
            held = trainable.held or trainable.parameters
            elsewhere = (
                pool.text_params
                | (set(home.parameters) if home else set())
                | set(shards.rows if shards else ())
            )
            bind_parameters(
                net, {key: value for key, value in held.items() if key not in elsewhere}
            )
        if shards is not None and mesh is not None:
            checkpoint_blocks(net, config.gradient_checkpointing or ON)
            alone = () if config.training_method == "FINE_TUNE" else tuple(held.values())
            shards.bind(net, family.spec.blocks, mesh, alone)
            if trainable is None and held:
                parts = {
                    key: shards.local.get(key) if key in shards.rows else held[key]
                    for key in held
                }
                fresh[name] = {key: part for key, part in parts.items() if part is not None}
            return net
        if pool.attention != "native":
            set_attention(net, pool.attention)
        if config.compile is True:
            compile_blocks(net, family.spec.blocks)
        pool.streams = arrange_blocks(net, family.spec, config, held, home, first)
        if pool.streams and pool.streams.host_weights and pool.streams.host_weights.parameters:
            homes[name] = pool.streams.host_weights
        if trainable is None and held:
            fresh[name] = held if pool.streams is None else pool.streams.parameters(held)
        return net

    pool = ExpertPool(
        expert_schedule, [expert.name for expert in family.spec.experts], open_net
    )
    pool.attention = config.attention if config.attention != "auto" else "native"
    text = attach_text(family, config)
    now = expert_schedule.at(min(max(first, 1), steps))
    pool.text_params = frozenset(key for group in text.values() for key in group)
    if not config.transformer.train:
        pool.trainables[TEXT] = make_trainable({}, text, family, config, TEXT, steps)
        pool.load(now)
        if pool.shards:
            pool.trainables[TEXT] = replace(pool.trainables[TEXT], shards=pool.shards[now])
        return pool
    for name in sorted(
        expert_schedule.names, key=lambda name: name == now
    ):  # the one that is needed first comes last
        pool.load(name)
        made = make_trainable(
            fresh.pop(name), text, family, config, name, expert_schedule.count(steps, name)
        )
        pool.trainables[name] = replace(made, shards=pool.shards.get(name))
    return pool


def arrange_blocks(
    net: nn.Module,
    spec: ModelSpec,
    config: Config,
    held: Parameters,
    home: HostWeights | None,
    first: bool,
) -> BlockOffload | None:
    """Have the blocks keep on the device what the config says: all, each one's input alone, or not even their weights.

    None where nothing waits on the host. ``first``: say what that means.
    """
    mode = config.gradient_checkpointing or ON
    fraction = config.layer_offload_fraction or 0.0
    if not fraction and mode != CPU_OFFLOADED:
        checkpoint_blocks(net, mode)
        return None
    device = local_device()
    resident = () if config.training_method == "FINE_TUNE" else tuple(held.values())
    streams = stream_blocks(net, spec.blocks, device, fraction, mode, resident, home, echo)
    if first and streams.host_weights is not None:
        echo(
            f"{len(streams.streamed)} blocks are streamed from host memory ({size(streams.host_weights.size)}); "
            "they are recomputed in the backward pass"
        )
        if device.type == "cpu":
            echo("note: layer_offload_fraction saves memory of a GPU; on a CPU it takes some")
    return streams


def make_trainable(
    held: Parameters,
    text: Mapping[str, Parameters],
    family: Family,
    config: Config,
    name: str,
    steps: int,
) -> TrainableState:
    """What trains, its optimizer, its rates, and what is sampled, validated and exported in its place, if anything is.

    ``held`` of a network by their names in it; ``text`` of text encoders, by group and by their names in checkpoints;
    ``steps``: how many of the run's train it.
    """
    kind = config.optimizer
    several = len(family.spec.experts) > 1 and name != TEXT
    rates = rates_of(config, family.spec, name, steps)
    groups = {
        **adapter_groups(held, config.lora, name if several else "transformer", rates),
        **text,
    }
    whole = {key: parameter for group in groups.values() for key, parameter in group.items()}
    rounding = kind.masters == "STOCHASTIC_ROUNDING"
    if rounding and dtype_name(config) != "BFLOAT_16":
        raise VideotuneError(
            "optimizer.masters: STOCHASTIC_ROUNDING is for weights in BFLOAT_16, and on this device train_dtype is "
            f"{dtype_name(config)} unless set"
        )
    masters = MasterWeights({} if rounding else whole)
    parameters: Parameters = whole if rounding else masters.parameters
    grouped = {group: [parameters[key] for key in own] for group, own in groups.items() if own}
    optimizer = make_optimizer(grouped, kind, apart=rounding or kind.step_in_backward)
    average: EmaWeights | ScheduleFreeWeights | None = None
    if kind.name == "SCHEDULE_FREE":
        average = ScheduleFreeWeights(parameters, parts_of(optimizer))
    elif config.ema.decay is not None:
        average = EmaWeights(parameters, config.ema.decay, config.ema.device == "host")
    kept, copied = (masters, whole) if masters.apart else (None, None)
    seed = config.seed if rounding else None
    expert = name if several else None
    updates = (
        BackwardOptimizer(config.max_grad_norm, seed, kept).attach(whole, optimizer)
        if kind.step_in_backward
        else None
    )
    return TrainableState(
        parameters,
        optimizer,
        rates,
        kept,
        average,
        copied,
        expert,
        live_text(config),
        seed,
        updates,
    )


def adapter_groups(
    held: Parameters, settings: Lora, name: str, rates: dict[str, LRSchedule]
) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of a network by their group: one, or one for each rate of their own, which ``rates`` gets.

    LoRA+ (Hayou et al. 2024, arXiv 2402.12354): lora_B has a group of its own, at ``learning_rate_ratio`` times the rate.
    """
    groups: dict[str, dict[str, nn.Parameter]] = {}
    for key, parameter in held.items():
        path, part = parse_param_name(key) or (key, "")
        rule = rule_of(settings, path)
        raised = part == "lora_B" and settings.learning_rate_ratio != 1
        own = rule.learning_rate if rule else None
        group = " ".join(
            [name, *([rule.pattern] if rule and own else []), *(["lora_B"] if raised else [])]
        )
        peak = (own or rates[name].learning_rate) * (
            settings.learning_rate_ratio if raised else 1
        )
        rates[group] = replace(rates[name], learning_rate=peak)
        groups.setdefault(group, {})[key] = parameter
    return groups


def rates_of(config: Config, spec: ModelSpec, name: str, steps: int) -> dict[str, LRSchedule]:
    """The rate of each group of an expert that trains so many steps: its own, and those of what trains of text encoders."""
    warmup = default_warmup(steps) if config.warmup_steps is None else config.warmup_steps
    low = (
        name == spec.experts[-1].name
        and len(spec.experts) > 1
        and config.learning_rate_low is not None
    )
    peak = float(config.learning_rate_low or 0) if low else config.learning_rate
    rows = config.embedding_learning_rate
    text = config.text_encoder.learning_rate
    peaks = {
        name if len(spec.experts) > 1 else "transformer": peak,
        "embedding": config.learning_rate if rows is None else rows,
        "text_encoder": config.learning_rate if text is None else text,
    }
    scheduler = config.learning_rate_scheduler
    cycles = config.learning_rate_cycles
    power = config.learning_rate_power
    return {
        group: LRSchedule(peak, scheduler, warmup, steps, cycles, power)
        for group, peak in peaks.items()
    }


def attach(net: nn.Module, spec: ModelSpec, config: Config) -> dict[str, nn.Parameter]:
    """Make trainable what the method trains; the parameters by name, in the network's own dtypes."""
    if not config.transformer.train:
        return {}
    if config.training_method == "FINE_TUNE":
        return add_full(net, config.transformer.layers)
    return add_lora(net, spec, config.lora, config.seed)
