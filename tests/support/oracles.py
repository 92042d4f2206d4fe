"""Perfect networks: what each family's transformer would answer if it knew the latents.

In the family's own pipeline it must end at them, which settles sign, units, layout and
schedule.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.model_spec import ModelSpec

Oracle = Callable[..., Tensor]


def oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """What a perfect transformer of the family returns for latents x0 (B,C,F,H,W)."""
    return ORACLES.get(spec.name, flow_oracle)(x0, spec)


def flow_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """v = (x_t - x0) / t, told 1000 t; 0 where a token is told 0.

    Channels behind those of x0 are passed over.
    """

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        x_t, frames = hidden_states[:, : x0.shape[1]], x0.shape[2]
        t = timestep.float() / 1000
        t = (
            t.view(-1, 1, 1, 1, 1)
            if t.ndim == 1
            else t.view(len(t), frames, -1)[:, None, :, :1, None]
        )
        return ((x_t - x0) / t.clamp(min=1e-9)).where(t > 0, t.new_zeros(()))

    return answer


def v_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """v = (alpha·x_t - x0) / sigma, told the integer timestep; a noisy copy of the
    first frame may stand in front.
    """
    path, steps = (
        objective_for_prediction(
            "v", spec.prediction_constants, TimestepSampler()
        ).noise_path,
        spec.prediction_constants["num_train_timesteps"],
    )

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        at = path(timestep.float() / (steps - 1))
        front = x0[:, :, :1].expand(
            -1, -1, hidden_states.shape[1] - x0.shape[2], -1, -1
        )
        clean = torch.cat([front, x0], dim=2).transpose(1, 2)
        return (at.alpha * hidden_states[:, :, : x0.shape[1]] - clean) / at.sigma

    return answer


def token_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """``flow_oracle`` in tokens (B,F·H·W,C)."""
    clean = x0.flatten(2).transpose(1, 2)

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        t = (timestep.float() / 1000).view(len(hidden_states), -1, 1)
        return ((hidden_states - clean) / t.clamp(min=1e-9)).where(
            t > 0, t.new_zeros(())
        )

    return answer


def sounding_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """``token_oracle`` beside sound that stays as it is; appended tokens are known."""
    clean = x0.flatten(2).transpose(1, 2)
    of_video = token_oracle(x0, spec)

    def answer(
        hidden_states: Tensor, timestep: Tensor, audio_hidden_states: Tensor, **_: Any
    ) -> Any:
        of_clip = hidden_states[:, : clean.shape[1]]
        times = timestep.view(len(timestep), -1)[:, : clean.shape[1]]
        video = of_video(hidden_states=of_clip, timestep=times)
        behind = torch.zeros_like(hidden_states[:, clean.shape[1] :])
        return torch.cat([video, behind], dim=1), torch.zeros_like(audio_hidden_states)

    return answer


def picture_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """``flow_oracle`` turned about, of pictures (B,C,H,W)."""

    def answer(hidden_states: Tensor, timesteps: Tensor, **_: Any) -> Tensor:
        t = timesteps.float().view(-1, 1, 1, 1) / 1000
        return (x0[:, :, 0] - hidden_states) / t.clamp(min=1e-9)

    return answer


def channels_last_oracle(x0: Tensor, spec: ModelSpec) -> Oracle:
    """``flow_oracle`` with channels last, in the output that the pipeline reads."""
    clean = x0.permute(0, 2, 3, 4, 1)

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Any:
        t = timestep.float().view(-1, 1, 1, 1, 1) / 1000
        v = (hidden_states[..., : clean.shape[-1]] - clean) / t.clamp(min=1e-9)
        return Transformer2DModelOutput(sample=v)

    return answer


ORACLES: dict[str, Callable[[Tensor, ModelSpec], Oracle]] = {
    "cogvideox": v_oracle, "ltx_video": token_oracle, "hidream": picture_oracle,
    "ltx2": sounding_oracle, "kandinsky5": channels_last_oracle,
}  # fmt: skip


def unpacked(spec: ModelSpec, video: Tensor, size: tuple[int, int, int]) -> Tensor:
    """What a transformer was fed as latents (B,C,F,H,W), (F,H,W) being ``size``: from
    tokens, frames first, or a picture.
    """
    if spec.name in ("ltx_video", "ltx2"):
        return video.transpose(1, 2).unflatten(2, size)
    if spec.prediction == "v":
        return video.transpose(1, 2)
    if spec.name == "kandinsky5":
        return video.permute(0, 4, 1, 2, 3)
    return video[:, :, None] if video.ndim == 4 else video
