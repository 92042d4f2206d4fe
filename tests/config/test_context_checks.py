"""What does not go together with samples that processes share (``context_parallel``)."""

from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest

from tests.support.command_line import train
from videotune.config.context_checks import SPLIT_MODELS
from videotune.errors import VideotuneError
from videotune.job.context_checks import groups_of, refuse_unequal_parts
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.models.registry import find, names

Bases = Callable[..., Path]


def words(clips: Path, base: Path, *sets: str) -> Overrides:
    own = (f"base_model_name={base}", "resolution=32x32", "steps=2")
    return Overrides(data=str(clips), sets=(*own, "context_parallel=2", *sets))


@pytest.mark.parametrize("name", names())
def test_the_models_that_diffusers_splits_are_those_whose_tokens_are_shared(
    name: str, small_clips: Path, tiny_bases: Bases
) -> None:
    """And the others are refused in a sentence that lists them."""
    family = find(name)
    has_plan = getattr(diffusers, family.transformer_class)._cp_plan is not None
    assert family.spec.splits_tokens == has_plan
    if not has_plan:
        with pytest.raises(VideotuneError, match="context_parallel") as refused:
            resolve_config(words(small_clips, tiny_bases(name)))
        assert SPLIT_MODELS in str(refused.value)
    else:
        name_of_all = family.spec.title.split()[0].partition(".")[0]
        assert name_of_all in SPLIT_MODELS


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("context_parallel=4",), "heads"),
        (("attention=_native_math",), "attention: "),
        (("gradient_checkpointing=ATTENTION_SAVED",), "gradient_checkpointing: "),
        (("video_config.use_temporal_attention=false",), "use_temporal_attention: "),
        (("sample.cache_threshold=0.1",), "sample.cache_threshold: "),
    ],
)
def test_what_processes_cannot_share_is_refused(
    sets: tuple[str, ...], key: str, small_clips: Path, tiny_bases: Bases
) -> None:
    with pytest.raises(VideotuneError, match=key):
        resolve_config(words(small_clips, tiny_bases("wan"), *sets))


def test_sound_is_not_shared(small_clips: Path, tiny_bases: Bases) -> None:
    sets = ('generate=["video", "sound"]',)
    with pytest.raises(VideotuneError, match="not those of its sound"):
        resolve_config(words(small_clips, tiny_bases("ltx2"), *sets))


def test_processes_come_in_groups(
    small_clips: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    config = resolve_config(words(small_clips, tiny_bases("wan")))[0].config
    assert groups_of(config, 6) == 3
    with pytest.raises(VideotuneError, match="multiple of 2"):
        groups_of(config, 3)
    with pytest.raises(VideotuneError, match="multiple of 2"):
        train(words(small_clips, tiny_bases("wan")), tmp_path / "run")


def test_a_clip_whose_tokens_cannot_be_shared_is_named(
    small_clips: Path, tiny_bases: Bases
) -> None:
    """Of LTX-Video a clip of 32x32 has a token for each latent frame."""
    job = open_job(*resolve_config(words(small_clips, tiny_bases("ltx_video"))))
    with pytest.raises(VideotuneError, match=r"\.mp4: a sample of 17x32x32 has 3 tok"):
        refuse_unequal_parts(job)
    refuse_unequal_parts(
        open_job(*resolve_config(words(small_clips, tiny_bases("wan"))))
    )
