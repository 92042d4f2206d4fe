"""Previews and samples that begin with an image: a clip's own, or a file that the person names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.shell import sample, train
from videotune.commands.sample import SampleOptions
from videotune.config.schema import Lora
from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.errors import DONE, VideotuneError
from videotune.models.registry import find
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import Job, open_job
from videotune.types import PLAIN
from videotune.validation.callbacks import reads_of_run
from videotune.validation.previews import first_frames_of

SIZE = ("sample.frames=9", "sample.resolution=32x32", "sample.steps=2", "sample.guidance=2")
QUIET = ("validate_every=0", "steps=1", "save_every=0", "dataloader_threads=0", "train_dtype=FLOAT_32")
BASES = Callable[..., Path]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def overrides_from(clips: Path, base: Path, cache: Path, *sets: str) -> Overrides:
    own = (f"base_model_name={base}", f"cache_dir={cache}", "resolution=32x32", "video_config.frames=9")
    return Overrides(data=str(clips), sets=(*own, *QUIET, *sets))


def job_of(clips: Path, base: Path, cache: Path, *sets: str) -> Job:
    return open_job(*resolve_config(overrides_from(clips, base, cache, *sets)))


def picture(path: Path, seed: int, height: int = 40, width: int = 72) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height)).save(path)
    return path


def test_a_preview_begins_with_the_first_frame_of_the_clip_of_its_caption(
    small_clips: Path, tiny_bases: BASES, tmp_path: Path
) -> None:
    job = job_of(small_clips, tiny_bases("wan", "i2v"), tmp_path, "samples=3")
    found = first_frames_of(job)
    captions = {clip.id: clip.captions for clip in job.library.clips}
    assert len(found) == 3
    assert all(prompt in captions[window.clip_id] for prompt, window in found.items())
    assert {(window, PLAIN) for window in found.values()} <= set(reads_of_run(job).samples)
    named = job_of(small_clips, tiny_bases("wan", "i2v"), tmp_path, 'samples=["no caption", "none too"]')
    one, two = first_frames_of(named).values()
    assert one != two, "the first windows, one after the other"


def test_who_is_told_no_image_has_no_first_frames(small_clips: Path, tiny_bases: BASES, tmp_path: Path) -> None:
    for variant, sets, tells in (
        ("t2v", (), False),
        ("ti2v", (), False),
        ("ti2v", ("first_frame_probability=0.7",), True),
        ("i2v", (), True),
        ("i2v", ("samples=0",), False),
    ):
        job = job_of(small_clips, tiny_bases("wan", variant), tmp_path, *sets)
        assert bool(first_frames_of(job)) == tells, (variant, sets)


def test_a_preview_of_a_shape_that_no_window_has_is_refused_before_the_work(
    small_clips: Path, tiny_bases: BASES, tmp_path: Path
) -> None:
    for word in ("sample.frames=5", "sample.resolution=32x64"):
        words = overrides_from(small_clips, tiny_bases("wan", "i2v"), tmp_path / "cache", word)
        with pytest.raises(VideotuneError, match=r"no window is .* there are 9x32x32"):
            train(words, tmp_path / "run")
    assert not list((tmp_path / "cache").glob("*latents*"))


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_a_run_draws_its_previews_from_its_clips_first_frames(
    variant: str, small_clips: Path, tiny_bases: BASES, tmp_path: Path
) -> None:
    """And `sample` of the run, given that clip's first frame as a picture, draws the same."""
    sets = ("samples=1", "sample_after=1", "sample.steps=2", "sample.guidance=1", "first_frame_probability=1")
    words = overrides_from(small_clips, tiny_bases("wan", variant), tmp_path / "cache", *sets)
    assert train(words, tmp_path / "run") == DONE
    lines = [line for line in read_journal(tmp_path / "run") if line["kind"] in ("sample", "warning")]
    assert [line["kind"] for line in lines] == ["sample", "sample"]
    last = lines[-1]
    job = open_job(*resolve_config(words))
    window = first_frames_of(job)[last["prompt"]]
    facts = job.library.media[window.clip_id]
    Image.fromarray(decode(facts, [window.start], 32, 32)[0]).save(tmp_path / "first.png")
    again = SampleOptions((last["prompt"],), last["seed"], tmp_path / "run", images=(tmp_path / "first.png",))
    assert sample(again, tmp_path / "again") == DONE
    other = SampleOptions((last["prompt"],), last["seed"], tmp_path / "run", images=(picture(tmp_path / "o.png", 1),))
    assert sample(other, tmp_path / "other") == DONE
    preview, same, else_ = (film(next(iter(place))) for place in (
        [tmp_path / "run" / last["path"]], (tmp_path / "again").glob("*.mp4"), (tmp_path / "other").glob("*.mp4")
    ))  # fmt: skip
    assert np.array_equal(preview, same)
    assert np.abs(preview - else_).mean() > 0.5


def film(path: Path) -> np.ndarray:
    facts = probe(path)
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_the_picture_is_cropped_to_the_shape_and_each_prompt_may_have_its_own(
    tiny_bases: BASES, tmp_path: Path
) -> None:
    base, (one, two) = str(tiny_bases("wan", "ti2v")), (picture(tmp_path / f"{i}.png", i) for i in (1, 2))

    def drawn(out: str, prompts: tuple[str, ...], *images: Path) -> list[np.ndarray]:
        words = SampleOptions(prompts, 3, base=base, sets=SIZE, images=images)
        assert sample(words, tmp_path / out) == DONE
        return [film(path) for path in sorted((tmp_path / out).glob("*.mp4"), key=lambda path: path.name[-5])]

    family = find("wan")(Path(base), torch.device("cpu"), torch.float32)
    both, first = drawn("both", ("a", "a"), one, two), drawn("one", ("a", "a"), one)
    assert np.array_equal(both[0], first[0])
    assert np.abs(both[1] - first[1]).mean() > 0.5
    with Image.open(one) as image:
        wide = image.resize((58, 32), Image.Resampling.BICUBIC)  # covers 32 x 32 at its own aspect
        crop = np.asarray(wide.crop((13, 0, 45, 32)))
    moments = family.encode_video(torch.from_numpy(crop.copy()).permute(2, 0, 1)[:, None].float() / 127.5 - 1)
    start = ((family.decode(moments.mean)[:, 0] / 2 + 0.5) * 255).round().permute(1, 2, 0).numpy()
    assert np.abs(both[0][0] - start).mean() < 12, "the video begins with what the VAE keeps of the crop"
    assert np.abs(both[1][0] - start).mean() > np.abs(both[0][0] - start).mean()
    text_alone = drawn("none", ("a", "a"))
    assert np.abs(text_alone[0] - both[0]).mean() > 0.5


def test_images_that_do_not_fit_the_model_or_the_prompts(tiny_bases: BASES, tmp_path: Path) -> None:
    image, broken = picture(tmp_path / "a.png", 0), tmp_path / "b.png"
    broken.write_bytes(b"no picture")

    def refused(match: str, variant: str, prompts: int = 1, **words: Any) -> None:
        with pytest.raises(VideotuneError, match=match):
            sample(
                SampleOptions(("a",) * prompts, 1, base=str(tiny_bases("wan", variant)), sets=SIZE, **words), tmp_path
            )

    refused("takes no image", "t2v", images=(image,))
    refused("which image", "i2v")
    refused("one for all 3 prompts", "i2v", 3, images=(image, image))
    refused(r"b\.png", "i2v", images=(broken,))
    refused(r"none\.png", "i2v", images=(tmp_path / "none.png",))
    refused("one file, not 2", "t2v", loras=(image, image))
    refused("whose name says", "t2v-a14b", loras=(image,))


def test_the_base_with_two_experts_is_drawn_and_its_files_find_their_experts(
    tiny_bases: BASES, tiny_family: Callable[..., Any], tmp_path: Path
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

    def drawn(out: str, *loras: Path) -> np.ndarray:
        words = SampleOptions(("a",), 3, base=str(tiny_bases("wan", "t2v-a14b")), sets=SIZE, loras=loras)
        assert sample(words, tmp_path / out) == DONE
        return film(next((tmp_path / out).glob("*.mp4")))

    alone, both, swapped = drawn("a"), drawn("b", *files.values()), drawn("c", files["low"], files["high"])
    low = drawn("d", files["low"])
    assert np.array_equal(both, swapped), "their names say whose they are, not their order"
    assert np.abs(alone - low).mean() > 0.3
    assert np.abs(both - low).mean() > 0.3
