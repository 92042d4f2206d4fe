"""What samples are given clean: the last frame, a prefix, a suffix, a masked region. None
of it knows a pixel that is hidden.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.run_parts import preview
from tests.support.run_results import film, of_kind
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.diffusion.loss import denoising_loss
from videotune.errors import VideotuneError
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import draws_of, make_step_batch
from videotune.latent_cache.condition_reader import DrawnConditions
from videotune.latent_cache.conditions import known_cells
from videotune.model_spec import VideoRules
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.given_latents import encode_given
from videotune.trainer.build import open_models, plain_batch
from videotune.types import Batch, ClipShape, SampleRequest

FRAMES = 17
"""Pixel frames of a clip: five latent frames."""


def conditions(*types: str, **keys: Any) -> dict[str, Any]:
    return {
        "conditions": [{"type": name, **keys} for name in types],
        "resolution": "64x64",
        "video_config.frames": FRAMES,
        "video_config.variants": 1,
    }


def clips(folder: Path, frames: np.ndarray) -> Path:
    return write_dataset(folder, {"a.mkv": frames}, {}, fps=16)


def plain(lab: Lab, knobs: dict[str, Any], folder: Path) -> tuple[BatchSource, Batch]:
    """The source and the batch of its only window, as validation reads it."""
    source = source_of(lab, knobs, folder)
    return source, plain_batch(source, source.buckets[0][0])


def moved(frames: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Frames with other pixels where they are hidden (T,H,W,1)."""
    return np.where(hidden, noise(len(frames), 64, 64, seed=9), frames)


def hidden_by(name: str) -> np.ndarray:
    """Which pixels (T,H,W,1) a condition hides."""
    hidden = np.ones((FRAMES, 64, 64, 1), bool)
    if name == "prefix":
        hidden[:5] = False  # two latent frames
    elif name == "first_frame":
        hidden[:1] = False
    elif name == "suffix":
        hidden[-8:] = False  # two latent frames
    elif name == "last_frame":
        hidden[-1:] = False
    else:
        hidden[:, :, :40] = False
    return hidden


@pytest.mark.effect("conditions")
@pytest.mark.parametrize("name", ["prefix", "suffix", "last_frame", "mask"])
def test_what_is_given_knows_nothing_of_what_is_hidden(
    name: str, lab: Lab, lossless: Callable[[Path, np.ndarray], Path]
) -> None:
    """Other hidden pixels change nothing but the cells that are noised; latents cut out
    of the whole clip would change.
    """
    knobs = conditions(name)
    if name in ("prefix", "suffix"):
        knobs["conditions"][0]["latent_frames"] = 2
    frames = noise(FRAMES, 64, 64)
    hidden = hidden_by(name)
    batches = []
    slices = []
    for number, shown in enumerate((frames, moved(frames, hidden))):
        folder = lossless(lab.tmp / f"{name} {number}", shown)
        if name == "mask":
            pixels = np.repeat(hidden[0] * np.uint8(255), 3, axis=2)
            write_image(folder / "masks" / "a.png", pixels)
        source, batch = plain(lab, knobs, folder)
        batches.append(batch)
        slices.append(source.plain_latents(source.buckets[0][0]).mean)

    first, second = batches
    mask = first.conditioning_mask.expand(-1, -1, -1, *first.x0.shape[3:])
    assert torch.equal(first.conditioning_mask, second.conditioning_mask)
    assert 0 < mask.float().mean() < 1
    cells = mask.expand_as(first.x0)
    torch.testing.assert_close(first.x0[cells], second.x0[cells], atol=1e-5, rtol=0)
    assert not torch.equal(first.x0, second.x0)
    assert (first.loss_mask.expand_as(mask)[mask] == 0).all()

    if name != "prefix":
        naive = [latents[cells[0]] for latents in slices]
        assert (naive[0] - naive[1]).abs().max() > 1e-3, (
            "cut out of the clip, they know"
        )


@pytest.fixture
def lossless() -> Callable[[Path, np.ndarray], Path]:
    """A function that writes a dataset of one clip without loss of a bit."""

    def write(folder: Path, frames: np.ndarray) -> Path:
        path = folder / "videos" / "a.mov"
        write_clip(path, frames, 16, codec="png", pix_fmt="rgb24")
        (folder / "captions").mkdir()
        (folder / "captions" / "a.txt").write_text("a clip", encoding="utf-8")
        return folder

    return write


def test_every_condition_is_drawn_by_itself(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    knobs = conditions("last_frame", "mask", probability=0.4)
    knobs |= {"batch_size": 4, "first_frame_probability": 0.3}
    source = source_of(lab, knobs, folder)
    shown = [
        types
        for step in range(1, 101)
        for types in draws_of(source, step).condition_types
    ]
    for name, share in (("first_frame", 0.3), ("last_frame", 0.4), ("mask", 0.4)):
        counted = sum(name in types for types in shown) / len(shown)
        assert counted == pytest.approx(share, abs=0.07)
    both = sum({"last_frame", "mask"} <= types for types in shown) / len(shown)
    assert both == pytest.approx(0.16, abs=0.06)


def test_a_first_frame_in_the_list_is_its_share(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    listed = conditions("first_frame", probability=0.5)
    job = job_of(lab, listed, folder)
    assert job.config.first_frame_probability == 0.5
    assert job.config.conditions == []

    short = {**conditions(), "first_frame_probability": 0.5}
    same = [source_of(lab, knobs, folder) for knobs in (listed, short)]
    for step in range(1, 9):
        first, second = (make_step_batch(source, step).batch for source in same)
        assert torch.equal(first.x0, second.x0)
        assert torch.equal(first.conditioning_mask, second.conditioning_mask)
    with pytest.raises(VideotuneError, match="twice"):
        job_of(lab, {**listed, "first_frame_probability": 0.5}, folder)


@pytest.mark.parametrize(
    ("variant", "condition", "fault"),
    [
        ("flf2v", {"type": "suffix"}, "it takes first_frame, last_frame"),
        ("t2v", {"type": "last_frame", "latent_frames": 2}, "latent_frames"),
        ("t2v", {"type": "sound"}, "conditions"),
    ],
)
def test_what_the_model_does_not_take_is_refused(
    variant: str,
    condition: dict[str, Any],
    fault: str,
    lab: Lab,
    tiny_bases: Callable[..., Path],
) -> None:
    model = replace(lab, model=tiny_bases("wan", variant))
    with pytest.raises(VideotuneError, match=fault):
        job_of(model, {"conditions": [condition]})


def test_drawn_boxes_differ_and_are_those_of_the_seed(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    knobs = conditions("mask") | {"video_config.variants": 4}
    source = source_of(lab, knobs, folder)
    numbers = {draws_of(source, step).boxes[0] for step in range(1, 33)}
    assert numbers == {0, 1, 2, 3}
    window = source.buckets[0][0]
    latents = [
        source.condition_reader.encoded_conditions(
            DrawnConditions(window, 0, frozenset({"mask"}), number)
        )["mask"]["latents"]
        for number in range(4)
    ]
    for first, second in itertools.combinations(latents, 2):
        assert not torch.equal(first, second)

    again = make_step_batch(source_of(lab, knobs, folder), 3).batch
    batch = make_step_batch(source, 3).batch
    assert torch.equal(batch.x0, again.x0)
    assert torch.equal(batch.conditioning_mask, again.conditioning_mask)


def test_steps_feed_them_clean_at_noise_level_0(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    trainer = trainer_of(lab, conditions("suffix", "mask") | {"steps": 2}, folder)
    for step, call in enumerate(take_steps(trainer).calls, 1):
        batch = make_step_batch(trainer.source, step).batch
        cells = batch.conditioning_mask.expand_as(batch.x0)
        assert torch.equal(call["x_t"][cells], batch.x0[cells])
        assert not torch.equal(call["x_t"][~cells], batch.x0[~cells])

        tokens = cells[0, 0, :, ::2, ::2].flatten()
        assert torch.equal(call["t"][0] == 0, tokens)
        assert call["t"][0][~tokens].unique().numel() == 1


def test_the_noise_of_a_given_cell_is_never_read(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    knobs = conditions("suffix", "mask")
    source = source_of(lab, knobs, folder)
    job = job_of(lab, knobs, folder)
    family = open_models(job.spec, job.base, job.config)
    net = family.denoiser()
    step = make_step_batch(source, 1)
    other_noise = torch.where(step.batch.conditioning_mask, step.noise + 1, step.noise)
    with torch.no_grad():
        losses = [
            denoising_loss(
                family, net, source.objective, step.batch, step.t, noise_
            ).loss
            for noise_ in (step.noise, other_noise)
        ]
    assert torch.equal(*losses)


class Perfect(torch.nn.Module):
    """A network that knows the clip (1,C,F,H,W), and checks which tokens are clean."""

    def __init__(self, clean: torch.Tensor, known_mask: torch.Tensor) -> None:
        super().__init__()
        self.clean = clean
        self.known_mask = known_mask

    def cache_context(self, *_: Any) -> Any:
        return torch.no_grad()

    def forward(self, hidden_states: Any, timestep: Any, **_: Any) -> Any:
        frames, rows, columns = self.clean.shape[2:]
        t = timestep.float().view(1, 1, frames, rows // 2, columns // 2) / 1000
        t = t.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
        assert torch.equal(t == 0, self.known_mask)
        v = (hidden_states - self.clean) / t.clamp(min=1e-9)
        return (v.where(t > 0, t.new_zeros(())),)


@pytest.mark.parametrize("variant", ["t2v", "ti2v", "t2v-a14b"])
def test_a_perfect_network_ends_at_the_clip_around_what_is_given(
    variant: str, tiny_family: Callable[..., Any]
) -> None:
    """diffusers' loop with other cells than a first frame: they stay to the bit, and
    the rest becomes what the network knows.
    """
    family = tiny_family("wan", variant=variant)
    rules = family.spec.rules
    side = 4 * rules.side_multiple
    shape = ClipShape(FRAMES, side, side, rules.fps)
    size = rules.latent_size(shape)
    random = torch.Generator().manual_seed(3)
    clean = torch.randn(1, family.spec.latent_channels, *size, generator=random)
    known = clean + 0.5
    known_mask = torch.zeros(1, 1, *size, dtype=torch.bool)
    known_mask[:, :, -2:, :4] = True

    request = SampleRequest(shape, 12, 1.0, (1,), known=known, known_mask=known_mask)
    conditioning = family.collate_states(family.encode_text(["a"]))
    network = Perfect(clean, known_mask)
    nets = {expert.name: network for expert in family.spec.experts}
    end = family.sample(nets, conditioning, None, request)
    cells = known_mask.expand_as(end)
    assert torch.equal(end[cells], known[cells])
    assert torch.allclose(end[~cells], clean[~cells], atol=5e-3)


@pytest.mark.parametrize("variant", ["t2v", "ti2v"])
def test_the_vae_is_causal_so_a_prefix_may_be_cut_out_of_a_clip(
    variant: str, tiny_family: Callable[..., Any]
) -> None:
    family = tiny_family("wan", variant=variant)
    side = 2 * family.spec.rules.side_multiple
    clip = torch.rand(3, FRAMES, side, side) * 2 - 1
    other_end = clip.clone()
    other_end[:, 9:] = torch.rand(3, FRAMES - 9, side, side)
    latents, others = (family.encode_video(frames).mean for frames in (clip, other_end))
    torch.testing.assert_close(latents[:, :3], others[:, :3], atol=1e-6, rtol=0)
    assert not torch.allclose(latents[:, 3:], others[:, 3:], atol=1e-2)


@pytest.mark.parametrize("patch", [(1, 2, 2), (1, 1, 1), (2, 2, 2)])
def test_a_cell_is_known_if_no_hidden_pixel_reaches_its_token(
    patch: tuple[int, int, int],
) -> None:
    rules = VideoRules(4, 1, 16, 16.0, 8, 4)
    hidden = torch.zeros(13, 64, 64)
    hidden[6, 17, 60] = 1
    known = known_cells(hidden, rules, patch)
    assert known.shape == (4, 8, 8)

    # The pixel is in the cell (2, 2, 7), and reaches one cell further.
    reached = {
        (frame, row, column)
        for frame in (1, 2, 3)
        for row in (1, 2, 3)
        for column in (6, 7)
    }
    frames, rows, columns = patch
    for frame in range(4):
        for row in range(8):
            for column in range(8):
                token = {
                    (f, r, c)
                    for f, r, c in reached
                    if (f // frames, r // rows, c // columns)
                    == (frame // frames, row // rows, column // columns)
                }
                assert bool(known[frame, row, column]) == (not token)


def coloured_clip(path: Path, colour: tuple[int, int, int], frames: int = 24) -> str:
    pixels = np.zeros((frames, 64, 64, 3), np.uint8)
    pixels[:] = colour
    return str(write_clip(path, pixels, 16, codec="png", pix_fmt="rgb24"))


@dataclass(frozen=True)
class Files:
    """Files of one colour each, and a mask whose right part is white."""

    prefix: str
    suffix: str
    kept: str
    image: str
    mask: str


@pytest.fixture
def files(lab: Lab) -> Files:
    blue = np.full((64, 64, 3), (0, 0, 255), np.uint8)
    white_right = np.zeros((64, 64, 3), np.uint8)
    white_right[:, 40:] = 255
    return Files(
        coloured_clip(lab.tmp / "red.mov", (255, 0, 0)),
        coloured_clip(lab.tmp / "green.mov", (0, 255, 0)),
        coloured_clip(lab.tmp / "blue.mov", (0, 0, 255)),
        str(write_image(lab.tmp / "blue.png", blue)),
        str(write_image(lab.tmp / "mask.png", white_right)),
    )


ALL = conditions("prefix", "suffix", latent_frames=2)
ALL["conditions"] += [{"type": "last_frame"}, {"type": "mask"}]


def test_files_become_the_latents_that_training_would_have_of_them(
    lab: Lab, files: Files
) -> None:
    job = job_of(lab, ALL, clips(lab.tmp / "clips", noise(FRAMES, 64, 64)))
    family = open_models(job.spec, job.base, job.config)
    shape = ClipShape(FRAMES, 64, 64, 16.0)

    def flat(*colour: int) -> torch.Tensor:
        pixels = torch.tensor(colour).view(3, 1, 1, 1).expand(3, FRAMES, 64, 64)
        return family.encode_video(pixels / 127.5 - 1).mean

    red, green, blue = flat(255, 0, 0), flat(0, 255, 0), flat(0, 0, 255)
    given = [
        GivenFiles(prefix=files.prefix, suffix=files.suffix),
        GivenFiles(last_frame=files.image),
        GivenFiles(video=files.kept, mask=files.mask),
    ]
    requests = [(one, shape) for one in given]
    both, last, inpainted = encode_given(family, requests, job.config, "samples")

    close = partial(torch.testing.assert_close, atol=1e-4, rtol=0)
    assert both.known[:, 0, 0].tolist() == [True, True, False, True, True]
    close(both.mean[:, :2], red[:, :2])
    close(both.mean[:, -2:], green[:, -2:])
    assert last.known[:, 0, 0].tolist() == [False] * 4 + [True]
    close(last.mean[:, -1], blue[:, -1])
    assert inpainted.known[0, 0].tolist() == [True] * 4 + [False] * 4
    assert not inpainted.known[..., 4:].any()


@pytest.mark.parametrize(("white", "is_said"), [(64, True), (24, False)])
def test_a_mask_that_leaves_nothing_is_said(
    white: int,
    is_said: bool,
    lab: Lab,
    lossless: Callable[[Path, np.ndarray], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = lossless(lab.tmp / "clips", noise(FRAMES, 64, 64))
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :white] = 255
    write_image(folder / "masks" / "a.png", pixels)
    source = source_of(lab, conditions("mask"), folder)
    assert ("conditions: mask: 1 mask hide" in capsys.readouterr().err) == is_said
    batch = plain_batch(source, source.buckets[0][0])
    assert bool(batch.conditioning_mask.any()) != is_said


def test_a_clip_is_continued_from_its_end(lab: Lab, files: Files) -> None:
    """A prefix of one latent frame is the clip's last frame, not its first."""
    pixels = np.zeros((24, 64, 64, 3), np.uint8)
    pixels[-1] = (0, 255, 0)
    path = lab.tmp / "turns-green.mov"
    write_clip(path, pixels, 16, codec="png", pix_fmt="rgb24")
    knobs = conditions("prefix")
    job = job_of(lab, knobs, clips(lab.tmp / "clips", noise(FRAMES, 64, 64)))
    family = open_models(job.spec, job.base, job.config)
    shape = ClipShape(FRAMES, 64, 64, 16.0)

    given = [GivenFiles(prefix=str(path)), GivenFiles(prefix=files.suffix)]
    requests = [(prefix, shape) for prefix in given]
    turned, green = encode_given(family, requests, job.config, "sample")
    assert turned.known[:, 0, 0].tolist() == [True] + [False] * 4
    torch.testing.assert_close(turned.mean[:, 0], green.mean[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["prefix", "suffix"])
def test_more_latent_frames_than_a_clip_has_leave_one_to_learn(
    name: str, lab: Lab, files: Files, lossless: Callable[[Path, np.ndarray], Path]
) -> None:
    """And the suffix then knows nothing of the first frame."""
    knobs = conditions(name, latent_frames=40)
    frames = noise(FRAMES, 64, 64)
    other_start = frames.copy()
    other_start[:1] = 255
    batches = []
    for number, pixels in enumerate((frames, other_start)):
        folder = lossless(lab.tmp / f"{name} {number}", pixels)
        batches.append(plain(lab, knobs, folder)[1])
    first, second = batches
    assert first.conditioning_mask.sum() == 4
    if name == "suffix":
        assert torch.equal(first.x0[:, :, 1:], second.x0[:, :, 1:])

    job = job_of(lab, knobs, folder)
    family = open_models(job.spec, job.base, job.config)
    request = (GivenFiles(**{name: files.kept}), ClipShape(FRAMES, 64, 64, 16.0))
    (given,) = encode_given(family, [request], job.config, "sample")
    assert given.known[:, 0, 0].sum() == 4


def test_of_a_still_nothing_is_given(lab: Lab) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    knobs = conditions("suffix", "mask", "last_frame", "prefix")
    _, batch = plain(lab, knobs | {"video_config.frames": 1}, folder)
    assert batch.x0.shape[2] == 1
    assert not batch.conditioning_mask.any()


def test_a_mask_that_leaves_nothing_is_refused(lab: Lab, files: Files) -> None:
    job = job_of(lab, ALL, clips(lab.tmp / "clips", noise(FRAMES, 64, 64)))
    family = open_models(job.spec, job.base, job.config)
    white = np.full((64, 64, 3), 255, np.uint8)
    mask = str(write_image(lab.tmp / "white.png", white))
    given = GivenFiles(video=files.kept, mask=mask)
    shape = ClipShape(FRAMES, 64, 64, 16.0)
    with pytest.raises(VideotuneError, match="nothing of the video is left"):
        encode_given(family, [(given, shape)], job.config, "sample")


@pytest.mark.effect("samples")
def test_a_preview_is_given_the_files_of_its_prompt(lab: Lab, files: Files) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    prompts = [
        {"prompt": "a", "prefix": path, "seed": 1}
        for path in (files.prefix, files.kept)
    ]
    films = []
    for prompt in prompts:
        knobs = ALL | {"samples": [prompt], "sample_after": 1, "steps": 1}
        trainer = trainer_of(lab, knobs, folder)
        preview(trainer, 0)
        (line,) = of_kind(trainer.run, "sample")
        films.append(film(trainer.run / line["path"]).astype(float))
    changes = np.abs(films[0] - films[1]).mean((1, 2, 3))
    assert changes.mean() > 0.1


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ({"last_frame": "image"}, "in a run that learns it"),
        ({"video": "kept"}, "belong together"),
        ({"prefix": "nowhere"}, "no such file"),
    ],
)
def test_files_that_cannot_be_given_are_refused(
    prompt: dict[str, str], fault: str, lab: Lab, files: Files
) -> None:
    folder = clips(lab.tmp / "clips", noise(FRAMES, 64, 64))
    paths = {key: getattr(files, name, name) for key, name in prompt.items()}
    knobs = conditions("prefix", "mask") | {"samples": [{"prompt": "a", **paths}]}
    with pytest.raises(VideotuneError, match=fault):
        trainer_of(lab, knobs | {"sample_after": 1, "steps": 1}, folder)
