"""Previews and samples that begin with an image: a clip's own, or a file that the person names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.clips import write_image
from tests.commands.safety_kit import Finished, Make, of_kind, warnings_of
from tests.shell import sample, train
from videotune.commands.sample import SampleOptions
from videotune.config.schema import Lora
from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.errors import DONE, VideotuneError
from videotune.models.registry import find
from videotune.trainer.resolve_config import resolve_config
from videotune.trainer.run_spec import Job, open_job
from videotune.types import PLAIN
from videotune.validation.callbacks import reads_of_run
from videotune.validation.previews import first_frames_of

SIZE = ("sample.frames=9", "sample.resolution=32x32", "sample.steps=2", "sample.guidance=2")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


IMAGE_SETS = ("steps=1", "video_config.frames=9", "first_frame_probability=1")


def picture(path: Path, seed: int) -> Path:
    return write_image(path, np.random.default_rng(seed).integers(0, 256, (40, 72, 3), dtype=np.uint8))


def job_of(overrides: Make, variant: str, *sets: str) -> Job:
    return open_job(*resolve_config(overrides("video_config.frames=9", *sets, base=("wan", variant))))


def test_a_preview_begins_with_the_first_frame_of_the_clip_of_its_caption(overrides: Make) -> None:
    job = job_of(overrides, "i2v", "samples=3", "sample_after=1")
    found = first_frames_of(job)
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert len(found) == 3
    assert all(prompt in captions[window.clip_id] for prompt, window in found.items())
    assert {(window, PLAIN) for window in found.values()} <= set(reads_of_run(job).samples)
    one, two = first_frames_of(job_of(overrides, "i2v", 'samples=["no caption", "none too"]')).values()
    assert one != two, "the first windows, one after the other"


@pytest.mark.parametrize(
    ("variant", "sets", "conditioned"),
    [
        ("t2v", (), False),
        ("ti2v", (), False),
        ("ti2v", ("first_frame_probability=0.7",), True),
        ("i2v", (), True),
        ("i2v", ("samples=0",), False),
    ],
)
def test_a_model_without_an_image_has_no_first_frames(
    variant: str, sets: tuple[str, ...], conditioned: bool, overrides: Make
) -> None:
    assert bool(first_frames_of(job_of(overrides, variant, *sets))) == conditioned


@pytest.mark.parametrize("shape", ["sample.frames=5", "sample.resolution=32x64"])
def test_a_preview_of_a_shape_that_no_window_has_is_refused_before_the_work(
    shape: str, overrides: Make, tmp_path: Path
) -> None:
    sets = (*IMAGE_SETS[:2], "sample_after=1", f"cache_dir={tmp_path / 'cache'}", shape)
    with pytest.raises(VideotuneError, match=r"no window is .* there are 9x32x32"):
        train(overrides(*sets, base=("wan", "i2v")), tmp_path / "run")
    assert not list((tmp_path / "cache").glob("*latents*"))


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_previews_begin_with_the_first_frames_of_clips(
    variant: str, overrides: Make, finished: Finished, tmp_path: Path
) -> None:
    """And `sample` of the run, given that clip's first frame as a picture, makes the same."""
    sets = (*IMAGE_SETS, "samples=1", "sample_after=1", "sample.steps=2", "sample.guidance=1")
    run = finished(*sets, base=("wan", variant))
    assert warnings_of(run) == []
    _, last = of_kind(run, "sample")
    job = open_job(*resolve_config(overrides(*sets, base=("wan", variant))))
    window = first_frames_of(job)[last["prompt"]]
    first = decode(job.library.media[window.clip_id], [window.start], 32, 32)[0]

    def sampled(name: str, image: Path) -> np.ndarray:
        assert sample(SampleOptions((last["prompt"],), last["seed"], run, images=(image,)), tmp_path / name) == DONE
        return film(next((tmp_path / name).glob("*.mp4")))

    preview = film(run / last["path"])
    assert np.array_equal(preview, sampled("again", write_image(tmp_path / "first.png", first)))
    assert np.abs(preview - sampled("other", picture(tmp_path / "other.png", 1))).mean() > 0.5


def film(path: Path) -> np.ndarray:
    facts = probe(path)
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_the_picture_is_cropped_to_the_shape_and_each_prompt_may_have_its_own(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base, (one, two) = str(tiny_bases("wan", "ti2v")), (picture(tmp_path / f"{i}.png", i) for i in (1, 2))

    def sampled(out: str, prompts: tuple[str, ...], *images: Path) -> list[np.ndarray]:
        settings = SampleOptions(prompts, 3, base=base, sets=SIZE, images=images)
        assert sample(settings, tmp_path / out) == DONE
        return [film(path) for path in sorted((tmp_path / out).glob("*.mp4"), key=lambda path: path.name[-5])]

    family = find("wan")(Path(base), torch.device("cpu"), torch.float32)
    both, first = sampled("both", ("a", "a"), one, two), sampled("one", ("a", "a"), one)
    assert np.array_equal(both[0], first[0])
    assert np.abs(both[1] - first[1]).mean() > 0.5
    with Image.open(one) as image:
        wide = image.resize((58, 32), Image.Resampling.BICUBIC)  # covers 32 x 32 at its own aspect
        crop = np.asarray(wide.crop((13, 0, 45, 32)))
    moments = family.encode_video(torch.from_numpy(crop.copy()).permute(2, 0, 1)[:, None].float() / 127.5 - 1)
    start = ((family.decode(moments.mean)[:, 0] / 2 + 0.5) * 255).round().permute(1, 2, 0).numpy()
    assert np.abs(both[0][0] - start).mean() < 12, "the video begins with what the VAE keeps of the crop"
    assert np.abs(both[1][0] - start).mean() > np.abs(both[0][0] - start).mean()
    text_alone = sampled("none", ("a", "a"))
    assert np.abs(text_alone[0] - both[0]).mean() > 0.5


def test_images_that_do_not_fit_the_model_or_the_prompts(tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    image, broken = picture(tmp_path / "a.png", 0), tmp_path / "b.png"
    broken.write_bytes(b"no picture")

    def refused(match: str, variant: str, prompts: int = 1, **options: Any) -> None:
        with pytest.raises(VideotuneError, match=match):
            sample(
                SampleOptions(("a",) * prompts, 1, base=str(tiny_bases("wan", variant)), sets=SIZE, **options), tmp_path
            )

    refused("takes no image", "t2v", images=(image,))
    refused("which image", "i2v")
    refused("one for all 3 prompts", "i2v", 3, images=(image, image))
    refused(r"b\.png", "i2v", images=(broken,))
    refused(r"none\.png", "i2v", images=(tmp_path / "none.png",))
    refused("one file, not 2", "t2v", loras=(image, image))
    refused("whose name says", "t2v-a14b", loras=(image,))


def test_the_base_with_two_experts_is_sampled_and_its_files_find_their_experts(
    tiny_bases: Callable[..., Path], tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    from videotune.adapters.lora import add_lora
    from videotune.exporter.lora import export_lora

    family, files = tiny_family("wan", variant="t2v-a14b"), {}
    for expert in ("high", "low"):
        state = add_lora(family.denoiser(expert), family.spec, Lora(rank=2, targets="linear"), seed=0)
        for name, parameter in state.items():
            if "lora_B" in name:
                parameter.data.normal_(std=2.0, generator=torch.Generator().manual_seed(len(name)))
        files[expert] = tmp_path / f"x{family.spec.export_suffix(expert)}.safetensors"
        export_lora(family, "diffusers", state, 1.0, files[expert], {}, expert)

    def sampled(out: str, *loras: Path) -> np.ndarray:
        settings = SampleOptions(("a",), 3, base=str(tiny_bases("wan", "t2v-a14b")), sets=SIZE, loras=loras)
        assert sample(settings, tmp_path / out) == DONE
        return film(next((tmp_path / out).glob("*.mp4")))

    alone, both, swapped = sampled("a"), sampled("b", *files.values()), sampled("c", files["low"], files["high"])
    low = sampled("d", files["low"])
    assert np.array_equal(both, swapped), "their names say whose they are, not their order"
    assert np.abs(alone - low).mean() > 0.3
    assert np.abs(both - low).mean() > 0.3
