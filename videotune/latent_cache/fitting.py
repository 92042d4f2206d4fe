"""Whether entries of a cache can be what a model encodes."""

from collections.abc import Callable
from functools import cache

from videotune.latent_cache.conditions import ConditionSample, condition_form
from videotune.latent_cache.entry import CacheEntry, TensorForm, form_of
from videotune.latent_cache.mask_reading import MASK_TENSOR
from videotune.models.base import DiffusersModel
from videotune.types import ClipShape, Window

WindowVariant = tuple[Window, int]

CacheItem = str | WindowVariant | ConditionSample
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
    latent_names = ("mean", "logvar") if spec.keeps_variance else ("mean",)

    @cache
    def expected_forms(shape: ClipShape) -> dict[str, TensorForm]:
        return form_of(family.blank_states(shape))

    @cache
    def channel_forms(shape: ClipShape) -> dict[str, TensorForm]:
        return form_of(family.blank_channels(shape))

    def fits(entry: CacheEntry, item: CacheItem) -> bool:
        forms = dict(entry.tensors)
        if isinstance(item, ConditionSample):
            shown_forms = channel_forms(item.window.shape)
            return forms == condition_form(item, shown_forms, spec)
        if isinstance(item, str):
            shape = caption_shape
            if "text" not in forms:
                return False
        else:
            shape = item[0].shape
            if entry.kind == "masks":
                size = spec.rules.latent_size(shape)
                return forms == {MASK_TENSOR: ("float32", size)}
            latent_form = (
                "float32",
                (spec.latent_channels, *spec.rules.latent_size(shape)),
            )
            for name in latent_names:
                if forms.pop(name, None) != latent_form:
                    return False
            channels, _, rows, columns = latent_form[1]
            start_form = ("float32", (channels, 1, rows, columns))
            if forms.pop("start", start_form) != start_form:
                return False

        expected = expected_forms(shape)
        return all(
            name in expected and _has_form(form, expected[name])
            for name, form in forms.items()
        )

    return fits


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
