"""What a step works with: what all steps share, and what trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from videotune.adapters.layers import LiveText
from videotune.diffusion.base_targets import BaseGuidance
from videotune.diffusion.loss import Objective
from videotune.distributed import DistributedContext
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.sharding import Shards
from videotune.models.base import DiffusersModel
from videotune.trainer.captured_passes import CapturedPasses
from videotune.trainer.ema import EmaWeights
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.loss_scale import LossScale
from videotune.trainer.low_precision import BackwardOptimizer, MasterWeights
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import AnyOptimizer
from videotune.trainer.schedule_free import ScheduleFreeWeights


@dataclass(frozen=True)
class StepContext:
    """What all steps of a run share: its settings, and the run's own objects that a step
    uses and changes (CUDA graphs, compiled blocks, gradient norms).
    """

    family: DiffusersModel
    objective: Objective
    micro_batch_count: int
    """Micro-batches of a whole step over all processes, if no limit makes them more.

    A count and no size, because buckets differ in the samples of a step.
    """
    max_grad_norm: float
    network_seed: int | None = None
    """Seed of draws inside the network, such as dropout.

    None: the network draws nothing.
    """
    micro_batch_size: int | None = None
    """Samples that a micro-batch takes at most. None: no limit."""
    dist: DistributedContext = field(default_factory=DistributedContext)
    gradient_norms: GradientNorms | None = None
    """Keeps the norms of gradients of steps that are asked for."""
    base_guidance: BaseGuidance | None = None
    """The guidance of the base model that the target keeps."""
    captured: CapturedPasses | None = None
    """Replays passes as CUDA graphs. None: each pass starts its own kernels."""
    compiled: CompiledBlocks | None = None
    """The compiled blocks of the denoisers. None: none are."""

    def samples_per_micro_batch(self, samples: int) -> int:
        """Return the samples of a micro-batch for a step of ``samples`` samples."""
        size = math.ceil(samples / self.micro_batch_count)
        if self.micro_batch_size is None:
            return size
        return min(size, self.micro_batch_size)


@dataclass(frozen=True)
class TrainableState:
    """What trains of a network, with its optimizer and the average of its weights."""

    parameters: Mapping[str, nn.Parameter]
    """What the optimizer updates, by name: the network's own parameters or their
    float32 masters.
    """
    optimizer: AnyOptimizer
    lr_schedules: Mapping[str, LRSchedule]
    """Learning-rate schedules by parameter group."""
    masters: MasterWeights | None = None
    ema: EmaWeights | ScheduleFreeWeights | None = None
    module_params: Mapping[str, nn.Parameter] | None = None
    """The network's own parameters where the optimizer holds masters.

    None: it updates them directly.
    """
    expert: str | None = None
    """Its name, in a model with two experts; else None."""
    text: LiveText | None = None
    """How captions are encoded in the step, because something of their encoder trains.

    None: text is cached.
    """
    rounding_seed: int | None = None
    """Seed of the draws that round updates of bf16 weights.

    None: updates are not rounded stochastically.
    """
    backward_optimizer: BackwardOptimizer | None = None
    """Updates each parameter during the backward pass. None: one update after it."""
    shards: Shards | None = None
    """This process's rows of a network that is sharded.

    None: every process has the whole network.
    """
    loss_scale: LossScale | None = None
    """The factor of the loss in float16. None: gradients are those of the loss itself."""
