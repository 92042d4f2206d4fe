"""Whether video and sound learn from each other: a bar that moves one way, and a pitch
that rises or falls with it.

    python benchmarks/sound.py [--steps 400] [--seeds 0 1 2] [--scenes 64] [--batch 32]
    [--out FILE] [--tiny]

A small LTX-2 is trained from scratch with the product's own loss, on drawn latents: in
each scene a bar goes left or right, and the pitch rises if it goes right. Then scenes are
drawn with the product's own sampler in three ways: both from noise, the sound for a given
video, and the video for a given sound. A detector, which is right on all true scenes,
reads the direction of each. By chance half of the pairs agree. The same training with
video and sound kept apart has to stay there.

The two directions of cross-attention are learnt at different times, so each is scored by
itself.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videotune.diffusion.loss import Objective, denoising_loss
from videotune.diffusion.noise_paths import flow_path
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.files import read_json, write_json
from videotune.models.registry import find
from videotune.rng import generator_for
from videotune.types import Batch, ClipShape, Conditioning, SampleRequest, Sound

FAMILY = "ltx2"
SHAPE = ClipShape(frames=33, height=128, width=128, fps=24.0, sound=True)
"""Latents of 5 frames of 4 x 4 cells, and 34 of sound."""

TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 64,
    "num_layers": 3,
}
"""What differs from the tiny checkpoint of the family."""

CONNECTOR_HEADS = {"video": 32, "audio": 32}
"""Widths of a head of the tiny checkpoint's connectors that fit it: they have two."""

BAR_WIDTH = 0.6
"""Of the bar, in latent columns."""

PITCH_WIDTH = 0.8
"""Of a pitch, in channels of the sound's latents."""

SAMPLE_STEPS = 8


@dataclass(frozen=True)
class Settings:
    """What a call was told."""

    steps: int
    scenes: int
    batch: int
    learning_rate: float = 2e-3


@dataclass(frozen=True)
class Scenes:
    """Drawn scenes."""

    video: Tensor
    """(B,4,F,H,W)."""
    sound: Tensor
    """(B,C,L)."""
    right: Tensor
    """(B,) bool: the bar goes right and the pitch rises."""


def draw_scenes(count: int, *name: Any) -> Scenes:
    """Draw scenes with bars and pitches of random begins and speeds."""
    random = generator_for("sound", *name)
    spec = find(FAMILY).spec
    frames, rows, columns = spec.rules.latent_size(SHAPE)
    assert spec.sound is not None
    length = spec.sound.latents(SHAPE)

    right = torch.from_numpy(random.random(count) < 0.5)
    sign = torch.where(right, 1.0, -1.0)[:, None]
    # Positions are in [-1, 1]; a scene covers a random half to whole of it.
    reach = torch.from_numpy(random.uniform(0.5, 1.0, (count, 1))).float()
    middle = (1 - reach) * torch.from_numpy(random.uniform(-1, 1, (count, 1))).float()
    position = middle + sign * reach * torch.linspace(-1, 1, frames)
    pitch = middle + sign * reach * torch.linspace(-1, 1, length)

    column = (position + 1) / 2 * (columns - 1)
    distance = torch.arange(columns) - column[..., None]  # (B,F,W)
    bar = (-(distance**2) / (2 * BAR_WIDTH**2)).exp()
    video = torch.zeros(count, 4, frames, rows, columns)
    video[:, 0] = (2 * bar - 1)[:, :, None]
    # Rotary positions are relative: without the column as a value, a few blocks cannot
    # tell where the bar is.
    video[:, 1] = position[..., None, None]

    channels = 8
    band = (pitch + 1) / 2 * (channels - 1)
    distance = torch.arange(channels)[:, None] - band[:, None]  # (B,C,L)
    sound = 2 * (-(distance**2) / (2 * PITCH_WIDTH**2)).exp() - 1
    return Scenes(video, sound, right)


def video_goes_right(video: Tensor) -> Tensor:
    """Return whether the bars of latents (B,4,F,H,W) go right."""
    bar = video[:, 0].mean(2)  # (B,F,W)
    weight = (3 * bar).softmax(-1)
    column = (weight * torch.arange(bar.shape[-1])).sum(-1)
    return _rises(column)


def pitch_rises(sound: Tensor) -> Tensor:
    """Return whether the pitches of latents (B,C,L) rise."""
    weight = (3 * sound).softmax(1)
    band = (weight * torch.arange(sound.shape[1])[:, None]).sum(1)
    return _rises(band)


def _rises(values: Tensor) -> Tensor:
    """Return whether the line through values (B,n) rises."""
    times = torch.linspace(-1, 1, values.shape[1])
    return (values * times).sum(1) > 0


class Isolated(nn.Module):
    """A network whose video and sound do not see each other."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Any:
        """Call the network."""
        return self.net(**(inputs | {"isolate_modalities": True}))

    def cache_context(self, *arguments: Any) -> Any:
        """Return the network's own."""
        return self.net.cache_context(*arguments)


def small_model(folder: Path, seed: int) -> tuple[Any, nn.Module]:
    """Return a family over a tiny checkpoint, and a random transformer to train."""
    cls = find(FAMILY)
    cls.tiny(folder)
    # After videotune, which silences what its import would print.
    from diffusers import LTX2VideoTransformer3DModel

    config = LTX2VideoTransformer3DModel.load_config(folder / "transformer")
    torch.manual_seed(seed)
    net = LTX2VideoTransformer3DModel.from_config({**config, **TRANSFORMER})
    net.save_pretrained(folder / "transformer")
    # Of the connectors only the config is read here: their width is the transformer's.
    path = folder / "connectors" / "config.json"
    connectors = read_json(path)
    for kind, width in CONNECTOR_HEADS.items():
        connectors[f"{kind}_connector_attention_head_dim"] = width
    write_json(path, connectors)

    family = cls(folder, torch.device("cpu"), torch.float32)
    family.spec = family.spec.with_sound(["video", "sound"])
    return family, net


def no_text(family: Any, samples: int) -> Conditioning:
    """Return one blank token of text: captions say nothing here."""
    states = {
        name: value[:1].float() for name, value in family.blank_states(SHAPE).items()
    }
    return Conditioning(
        states["text"].expand(samples, -1, -1),
        None,
        {"audio_text": states["audio_text"].expand(samples, -1, -1)},
    )


def objective_of(family: Any) -> tuple[Objective, TimestepSampler]:
    """Return the objective, and the law of the sound's noise levels."""
    spec = family.spec
    laws = []
    for tokens in (spec.video_tokens(SHAPE), spec.sound.latents(SHAPE)):
        shift = shift_of_tokens(tokens, spec.shift_by_tokens)
        laws.append(TimestepSampler(spec.timestep_distribution, shift))
    return Objective(flow_path, laws[0]), laws[1]


def train(family: Any, net: nn.Module, settings: Settings, seed: int) -> list[float]:
    """Train a network on drawn scenes, and return the loss of each step."""
    objective, law_of_sound = objective_of(family)
    optimizer = torch.optim.AdamW(net.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps
    )
    random = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(settings.steps):
        scenes = draw_scenes(settings.batch, seed, "train", step)
        uniforms = torch.rand(2, settings.batch, generator=random, dtype=torch.float64)
        sound_t = law_of_sound.draw(uniforms[1])
        batch = noised_batch(family, scenes, sound_t, random)
        output = denoising_loss(
            family,
            net,
            objective,
            batch,
            objective.timesteps.draw(uniforms[0]),
            torch.randn(scenes.video.shape, generator=random),
        )

        output.loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return losses


def noised_batch(
    family: Any, scenes: Scenes, sound_t: torch.Tensor, random: torch.Generator
) -> Batch:
    """Return scenes as a batch, with noise drawn for their sound."""
    x0 = scenes.sound[..., None, None]
    noise = torch.randn(x0.shape, generator=random)
    count = len(scenes.video)
    return Batch.of(
        scenes.video,
        no_text(family, count),
        fps=torch.full((count,), SHAPE.fps),
        has_clean_frames=False,
        sound=Sound(x0, noise, sound_t),
    )


def score(family: Any, net: nn.Module, scenes: Scenes) -> dict[str, float]:
    """Return how often video and sound agree, by what was given."""
    count = len(scenes.video)
    request = SampleRequest(SHAPE, SAMPLE_STEPS, 1.0, tuple(range(count)))
    everything = torch.ones(count, 1, *scenes.video.shape[2:], dtype=torch.bool)
    requests = {
        "both": request,
        "sound for a video": replace(
            request, known=scenes.video, known_mask=everything
        ),
        "video for a sound": replace(request, sound=scenes.sound),
    }

    shares = {}
    net.eval()
    for name, each in requests.items():
        with torch.no_grad():
            video, sound = family.sample_with_sound(
                {"transformer": net}, no_text(family, count), None, each
            )
        agree = video_goes_right(video) == pitch_rises(sound)
        shares[name] = agree.float().mean().item()
    return shares


def run(settings: Settings, seed: int, isolated: bool) -> dict[str, Any]:
    """Train and score a network."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        family, net = small_model(Path(folder) / "base", seed)
        if isolated:
            net = Isolated(net)
        losses = train(family, net, settings, seed)
        held_out = draw_scenes(settings.scenes, seed, "held out")
        shares = score(family, net, held_out)

    last = losses[-max(1, len(losses) // 10) :]
    return {
        "seed": seed,
        "isolated": isolated,
        "agree": {name: round(share, 3) for name, share in shares.items()},
        "loss": round(sum(last) / len(last), 4),
        "seconds": round(time.monotonic() - begun, 1),
    }


def check_detector(count: int = 256) -> None:
    """Raise AssertionError unless the detector is right on true scenes."""
    scenes = draw_scenes(count, "detector")
    assert torch.equal(video_goes_right(scenes.video), scenes.right)
    assert torch.equal(pitch_rises(scenes.sound), scenes.right)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the shares of each run."""
    names = list(rows[0]["agree"])
    print(f"{'run':<18}" + "".join(f"{name:>20}" for name in names) + f"{'loss':>8}")
    for row in rows:
        name = f"seed {row['seed']}" + (", apart" if row["isolated"] else "")
        shares = "".join(f"{row['agree'][each]:>20.2f}" for each in names)
        print(f"{name:<18}{shares}{row['loss']:>8.3f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scenes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: no figures")
    arguments = parser.parse_args()

    settings = Settings(arguments.steps, arguments.scenes, arguments.batch)
    seeds = arguments.seeds
    if arguments.tiny:
        settings = Settings(steps=2, scenes=2, batch=2)
        seeds = seeds[:1]
    check_detector()

    rows: list[dict[str, Any]] = []
    if arguments.out and arguments.out.is_file():
        stored = read_json(arguments.out)
        if stored.get("settings") == asdict(settings):
            rows = stored["runs"]
    done = {(row["seed"], row["isolated"]) for row in rows}
    for isolated in (False, True):
        for seed in seeds:
            if (seed, isolated) in done:
                continue
            rows.append(run(settings, seed, isolated))
            print_table(rows[-1:])
            if arguments.out:
                write_json(arguments.out, {"settings": asdict(settings), "runs": rows})
    print()
    print_table(rows)
    chance = math.sqrt(0.25 / settings.scenes)
    print(f"by chance 0.5, with a deviation of {chance:.2f}")


if __name__ == "__main__":
    main()
