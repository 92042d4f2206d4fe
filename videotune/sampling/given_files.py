"""Files of the user's that samples are conditioned on: images, clips and a mask."""

from dataclasses import dataclass, fields

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec


@dataclass(frozen=True)
class GivenFiles:
    """What a sample is conditioned on, as paths of files."""

    image: str | None = None
    """The first frame."""
    last_frame: str | None = None
    prefix: str | None = None
    """A clip that the sample continues: its last frames are the sample's first."""
    suffix: str | None = None
    """A clip that the sample leads to: its first frames are the sample's last."""
    video: str | None = None
    """A clip of which the sample keeps what ``mask`` leaves; of a run that learns only
    sound, the sample's video.
    """
    mask: str | None = None
    """An image or clip, white where the sample is painted anew."""

    reference: str | None = None
    """A clip or image that is appended."""
    control: str | None = None
    """A clip or image that controls the sample."""
    sound: str | None = None
    """A file whose sound is the sample's, of a run that learns the video for a sound."""

    @property
    def types(self) -> frozenset[str]:
        """Types of the conditions."""
        names = {
            "image": "first_frame",
            "last_frame": "last_frame",
            "prefix": "prefix",
            "suffix": "suffix",
            "mask": "mask",
            "reference": "reference",
            "control": "control",
        }
        return frozenset(
            name for key, name in names.items() if getattr(self, key) is not None
        )

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


NO_FILES = GivenFiles()

FILE_KEYS = tuple(field.name for field in fields(GivenFiles))


def refuse_given(files: GivenFiles, spec: ModelSpec, config: Config, key: str) -> None:
    """Raise VideotuneError if a model does not take the conditions, or has not learnt
    them.

    Args:
        files: the files.
        spec: of the model.
        config: of the run.
        key: where the files are named, for messages.
    """
    _refuse_modality(files, spec, key)
    if not spec.has_conditioning_video and (files.video is None) != (
        files.mask is None
    ):
        raise VideotuneError(
            f"{key}: video and mask belong together: the mask is white where the video is "
            "painted anew. Set both or neither"
        )
    supported = ", ".join(spec.conditions) or "none: it generates only from text"
    learnt = config.condition_types | _known_to_base(spec)
    lacking = sorted(spec.required_conditions - files.types)
    if lacking:
        options = " and ".join(
            _key_of(name) for name in sorted(spec.required_conditions)
        )
        raise VideotuneError(
            f"{key}: {spec.title} samples between two images. Set {options}"
        )
    for name in sorted(files.types):
        word = _key_of(name)
        if name not in spec.conditions:
            raise VideotuneError(
                f"{key}: {word}: {spec.title} takes no {word} (it takes {supported})"
            )
        if name not in learnt:
            how = f"Train with {name} in conditions"
            if name == "first_frame":
                how = "Set first_frame_probability above 0"
            raise VideotuneError(
                f"{key}: {word}: {spec.title} takes it only in a run that learns it. {how}, or leave it out"
            )


def _refuse_modality(files: GivenFiles, spec: ModelSpec, key: str) -> None:
    """Raise VideotuneError for a sound that is not given in a run, or for what else a
    sample is given beside a whole video.
    """
    if files.sound is not None and not spec.has_conditioning_sound:
        raise VideotuneError(
            f"{key}: sound: it is for a run that learns the video for a sound (generate "
            "[video]). Leave it out"
        )
    if spec.has_conditioning_video and (files.types or files.video is None):
        raise VideotuneError(
            f"{key}: the run learns the sound of a video (generate [sound]). Set video, and no "
            "other file"
        )
    if spec.has_conditioning_sound and files.sound is None:
        raise VideotuneError(
            f"{key}: the run learns the video for a sound (generate [video]). Set sound too"
        )


def refuse_no_modality(spec: ModelSpec, key: str) -> None:
    """Raise VideotuneError for a sample without files, if it needs a video or a sound."""
    _refuse_modality(NO_FILES, spec, key)


def _known_to_base(spec: ModelSpec) -> frozenset[str]:
    """Return the types of the conditions that a model is made for: it needs no training
    for them.
    """
    is_made_with_frames = spec.image_conditioning == "replace"
    types = set()
    for name, support in spec.conditions.items():
        is_made_for = support.mechanism != "in_place" or is_made_with_frames
        # Clips beside the sample's are learnt by an adapter, images may be known.
        if name == "reference" and not support.is_image:
            is_made_for = False
        if support.in_diffusers and is_made_for:
            types.add(name)
    return frozenset(types)


def _key_of(condition: str) -> str:
    """Return the key under which a condition's file is given."""
    return "image" if condition == "first_frame" else condition
