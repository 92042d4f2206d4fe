"""Whether entries of a cache can be what a model encodes."""

from collections.abc import Callable, Mapping
from functools import cache

from videotune.latent_cache.conditions import SeparateCondition, condition_form
from videotune.latent_cache.entry import CacheEntry, TensorForm, form_of
from videotune.latent_cache.mask_reading import MASK_TENSOR
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.types import ClipShape, Window

WindowVariant = tuple[Window, int]

CacheItem = str | WindowVariant | SeparateCondition
"""What an entry is for: a caption, a sample, or a condition of one."""

FitsFn = Callable[[CacheEntry, CacheItem], bool]
"""Says whether a cache entry can hold what it is for."""


def fits_of(family: DiffusersModel, caption_shape: ClipShape) -> FitsFn:
    """Return a check of whether an entry can be what this family encodes, by the names,
    dtypes and sizes it declares.

    A dataset may bring a cache that somebody else made.

    Args:
        family: the base model.
        caption_shape: any shape of the dataset, with which captions are checked. Windows
            have shapes of their own.
    """
    spec = family.spec

    @cache
    def channel_forms(shape: ClipShape) -> dict[str, TensorForm]:
        return form_of(family.blank_channels(shape))

    @cache
    def caption_forms() -> dict[str, TensorForm]:
        # ``blank_states`` are all states that the network reads: those of a caption, and
        # those of channels, which have entries of their own or are in those of latents.
        forms = form_of(family.blank_states(caption_shape))
        shown_names = channel_forms(caption_shape).keys()
        return {name: form for name, form in forms.items() if name not in shown_names}

    def fits(entry: CacheEntry, item: CacheItem) -> bool:
        forms = dict(entry.tensors)
        if isinstance(item, str):
            return _have_forms(forms, caption_forms())

        if isinstance(item, SeparateCondition):
            shown_forms = channel_forms(item.window.shape)
            return forms == condition_form(item, shown_forms, spec)

        window, _ = item
        if entry.kind == "masks":
            size = spec.rules.latent_size(window.shape)
            return forms == {MASK_TENSOR: ("float32", size)}

        expected = _latent_forms(window, spec)
        # Control channels are shown by entries of their own.
        if not spec.control_channels:
            expected |= channel_forms(window.shape)
        return forms == expected

    return fits


def _latent_forms(window: Window, spec: ModelSpec) -> dict[str, TensorForm]:
    """Return the dtypes and sizes of a window's latents: "mean", and "logvar" and "start" if
    the model has them.
    """
    channels = spec.latent_channels
    frames, rows, columns = spec.rules.latent_size(window.shape)
    forms: dict[str, TensorForm] = {
        "mean": ("float32", (channels, frames, rows, columns))
    }
    if spec.keeps_variance:
        forms["logvar"] = forms["mean"]

    has_own_start = window.companion("start_image") is not None
    encodes_start = has_own_start or spec.encodes_first_frame
    if encodes_start and spec.is_in_place("first_frame"):
        forms["start"] = ("float32", (channels, 1, rows, columns))
    return forms


def _have_forms(
    forms: Mapping[str, TensorForm], expected: Mapping[str, TensorForm]
) -> bool:
    """Return whether the tensors of a caption are the expected ones, or those of a shorter
    caption.
    """
    if forms.keys() != expected.keys():
        return False
    return all(_has_form(form, expected[name]) for name, form in forms.items())


def _has_form(form: TensorForm, expected: TensorForm) -> bool:
    """Return whether a tensor has the expected dtype and shape, or that of a shorter
    caption: fewer rows, as wide.
    """
    dtype, shape = form
    expected_dtype, expected_shape = expected
    if dtype != expected_dtype or len(shape) != len(expected_shape):
        return False
    if len(shape) >= 2 and shape[-1] != expected_shape[-1]:
        return False
    return all(side <= limit for side, limit in zip(shape, expected_shape, strict=True))
