"""Training loops as other programs write them, for ``count.py``: the structure of their
step on diffusers' network with PEFT's LoRA, on fake tensors.

Read from what they publish: all run the network under autocast to bfloat16, turn its
output to float32, compute each block again in the backward pass with torch's checkpoint,
and clip gradients. They differ in the dtype of the LoRA and in the optimizer. Autocast
follows the list of a CPU here, which casts fewer operations to float32 than a card's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from videotune.config.schema import Config
from videotune.latent_cache.step_batch import StepBatch
from videotune.planner.measure import FakeNetwork, FakeRun, to_fake


@dataclass(frozen=True)
class PlainLoop:
    """What tells the loops apart."""

    lora_dtype: torch.dtype | None = None
    """None: the network's, as PEFT makes it."""

    per_parameter: bool = False
    """Whether the optimizer updates one parameter at a time in bfloat16, with stochastic
    rounding, instead of all at once.
    """


LOOPS = {
    "diffusers' script": PlainLoop(),
    "LTX-Video's trainer": PlainLoop(lora_dtype=torch.float32),
    "SimpleTuner": PlainLoop(per_parameter=True),
}


def network_of(run: FakeRun, ours: FakeNetwork, config: Config, loop: PlainLoop) -> Any:
    """Return the whole network with a LoRA of PEFT on the same layers as ours."""
    targets = {name.partition(".lora_")[0] for name in ours.trained}
    rank = config.lora.rank
    alpha = config.lora.alpha or rank
    dtype = run.family.dtype

    net: Any = run.denoiser()
    net.requires_grad_(False)
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=sorted(targets))
    inject_adapter_in_model(lora, net, low_cpu_mem_usage=True)

    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                values = torch.empty_like(parameter, dtype=loop.lora_dtype or dtype)
                module._parameters[name] = nn.Parameter(values)

    to_fake(net, run.mode)
    net.train()
    return net


class PlainStep:
    """A step of such a loop."""

    def __init__(
        self, run: FakeRun, ours: FakeNetwork, loop: PlainLoop, checkpointing: bool
    ) -> None:
        self.run = run
        self.net = network_of(run, ours, run.config, loop)
        if checkpointing:
            self.net.enable_gradient_checkpointing()
        parameters: list[nn.Parameter] = list(self.net.parameters())
        self.trained = [p for p in parameters if p.requires_grad]
        if loop.per_parameter:
            self.update: Callable[[], Any] = OneByOne(self.trained).step
        else:
            optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
            self.update = optimizer.step

    def __call__(self, prepared: StepBatch, after_passes: Callable[[], None]) -> None:
        """Make a step; ``after_passes`` is called before the update."""
        batch = prepared.batch
        assert batch is not None
        dtype = self.run.family.dtype
        sigma = torch.zeros(len(batch.x0)).view(-1, 1, 1, 1, 1)
        x_t = ((1 - sigma) * batch.x0 + sigma * prepared.noise).to(dtype)
        is_half = dtype != torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            predicted = self.run.family.predict(self.net, x_t, sigma.flatten(), batch)
        target = prepared.noise - batch.x0
        loss = (predicted.float() - target).square().mean()
        loss.backward()

        torch.nn.utils.clip_grad_norm_(self.trained, 1.0, foreach=True)
        after_passes()
        self.update()
        for parameter in self.trained:
            parameter.grad = None


class OneByOne:
    """AdamW in bfloat16 with the error of rounding kept beside each parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.states = [
            tuple(torch.zeros_like(p, requires_grad=False) for _ in range(3))
            for p in parameters
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update each parameter in turn."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            mean, square, shift = state
            gradient = parameter.grad
            assert gradient is not None
            mean.mul_(0.9)
            add_rounded(mean, gradient, 0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            add_rounded(shift, mean / square.sqrt().add_(1e-8), -1e-4)

            before = parameter.clone()
            add_rounded(parameter, shift, 1.0)
            add_rounded(shift, before.sub_(parameter), 1.0)


def add_rounded(target: Tensor, addend: Tensor, alpha: float) -> None:
    """Add in float32 and round to bfloat16 by chance, in the least number of passes."""
    total = target.float().add_(addend, alpha=alpha)
    bits = torch.randint(0, 1 << 16, total.shape, dtype=torch.int32)
    bits.add_(total.view(torch.int32)).bitwise_and_(-65536)
    target.copy_(bits.view(torch.float32))
