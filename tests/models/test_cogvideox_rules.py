"""The frames and sizes that CogVideoX takes are rules: said before anything is loaded, for clips and for samples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from videotune.commands.sample import shape_of
from videotune.config.data_schema import VideoConfig
from videotune.config.resolve import resolve
from videotune.data.buckets import choose_size, parse_resolution
from videotune.data.frame_sampling import frame_rule, planned_frames, snap_frames, valid_at_least
from videotune.errors import VideotuneError
from videotune.models.cogvideox import CogVideoX
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.run_spec import open_job
from videotune.validation.previews import sample_settings

Bases = Callable[[str], Path]


@pytest.mark.parametrize(("variant", "most"), [("2b", 49), ("5b", 49), ("1.5-5b", 161), ("1.5-5b-i2v", 161)])
def test_no_window_is_longer_than_the_model_takes(variant: str, most: int, cog_bases: Bases) -> None:
    rules = CogVideoX.read_spec(cog_bases(variant)).rules
    assert snap_frames(400, rules) == snap_frames(most, rules) == most
    assert valid_at_least(most + 1, rules) is None
    frames, note = planned_frames(VideoConfig(frames=400), rules)
    assert (frames, note) == (most, f"frames 400 becomes {most}: this model takes {frame_rule(rules)}")
    assert frame_rule(rules).endswith(f"n+1 frames, at most {most}")
    with pytest.raises(VideotuneError, match=f"Set it to {most}"):
        planned_frames(VideoConfig(frames=400, strict_frames=True), rules)


def test_5b_i2v_takes_one_size_alone(cog_bases: Bases, small_clips: Path, tmp_path: Path) -> None:
    """Its own is the default; another is refused, an area too, before a clip is read."""

    def of(*sets: str) -> Overrides:
        fixed = (f"base_model_name={cog_bases('5b-i2v')}", f"cache_dir={tmp_path}", "video_config.pad_short=freeze")
        return Overrides(data=str(small_clips), sets=(*fixed, *sets))

    resolved, _, _ = resolve_config(of())
    assert resolved.config.resolution == "32x32"
    job = open_job(*resolve_config(of("video_config.max_frames=17")))
    assert {str(shape) for shape in job.shapes} == {"49x32x32"}
    assert any("becomes 49: this model takes exactly 49 frames" in note for note in job.notes)
    for asked in ("512", '"32x48"'):
        with pytest.raises(VideotuneError, match=r'one size of 32x32 pixels alone\. Set resolution="32x32"'):
            open_job(*resolve_config(of(f"resolution={asked}")))


def test_sides_of_1_5_have_an_end(cog_bases: Bases) -> None:
    """A pair beyond it is refused; a wide clip by area is made no wider."""
    rules = CogVideoX.read_spec(cog_bases("1.5-5b")).rules
    assert rules.most_side == 320
    with pytest.raises(VideotuneError, match="at most 320 pixels"):
        choose_size(1920, 1080, parse_resolution("64x336", rules), rules)
    for width, height in ((4000, 400), (400, 4000), (1920, 1080)):
        assert max(choose_size(width, height, parse_resolution(300, rules), rules)) == 320
    assert choose_size(1920, 1080, parse_resolution(64, rules), rules) == (48, 80)


@pytest.mark.parametrize(
    ("variant", "shape"),
    [("5b", (49, 32, 48)), ("5b-i2v", (49, 32, 32)), ("1.5-5b", (81, 320, 320))],
)
def test_without_a_run_the_model_draws_its_own_shape(
    variant: str, shape: tuple[int, int, int], cog_bases: Bases
) -> None:
    spec = CogVideoX.read_spec(cog_bases(variant))
    usual = shape_of(None, spec.rules.fps, resolve({}, {}, spec).config, spec)
    assert (usual.frames, usual.height, usual.width) == shape
    long = resolve({"video_config": {"frames": 65}}, {}, spec).config
    assert shape_of(None, spec.rules.fps, long, spec).frames == (65 if variant.startswith("1.5") else 49)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"frames": 17}, r"sample\.frames: CogVideoX 5B I2V draws exactly 49 frames, not 17"),
        ({"resolution": "48x32"}, r"sample\.resolution: CogVideoX 5B I2V draws 32x32 pixels, not 48x32"),
    ],
)
def test_a_sample_of_another_shape_is_told_which_there_is(
    sample: dict[str, object], said: str, cog_bases: Bases
) -> None:
    spec = CogVideoX.read_spec(cog_bases("5b-i2v"))
    config = resolve({"sample": sample}, {}, spec).config
    with pytest.raises(VideotuneError, match=said):
        sample_settings(config, spec, shape_of(None, spec.rules.fps, config, spec))
