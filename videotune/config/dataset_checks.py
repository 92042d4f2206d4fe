"""Settings of datasets that do not go together."""

from collections.abc import Iterator

from videotune.config.data_schema import Dataset
from videotune.config.schema import Config

TRAINING_KEYS = (
    "repeats",
    "probability",
    "from_step",
    "until_step",
    "batch_size",
    "caption_dropout",
    "flip",
    "loss_weight",
)
"""Keys of a dataset that a validation dataset does not use."""


def faults_of_datasets(config: Config) -> Iterator[str]:
    """Yield what does not go together within a dataset, or with the config."""
    for dataset in config.datasets:
        prior = dataset.prior_preservation
        is_regularization = dataset.kind == "regularization"
        if (
            config.training_method == "FINE_TUNE"
            and is_regularization
            and prior is not False
        ):
            yield (
                "datasets.prior_preservation: FINE_TUNE keeps no base model beside the one it changes. "
                f"Set it to false for {dataset.path}"
            )

        does_not_use = f"the {dataset.kind} dataset {dataset.path} does not use it"
        if prior is not None and not is_regularization:
            yield f'datasets.prior_preservation: {does_not_use}; it is for kind "regularization"'
        for key in TRAINING_KEYS:
            is_set = getattr(dataset, key) != Dataset.model_fields[key].default
            if dataset.kind == "validation" and is_set:
                yield f"datasets.{key}: {does_not_use}: it is measured, never trained"
        if dataset.kind == "validation" and dataset.caption_weights is not None:
            yield f"datasets.caption_weights: {does_not_use}: it is measured with each clip's first caption"
        yield from _of_captions(dataset)
        yield from _of_steps(dataset, config)
        if dataset.loss_masks is not None and not config.loss_mask.is_used:
            yield (
                f"datasets.loss_masks: the masks of {dataset.path} change nothing while loss_mask.inside "
                "and loss_mask.outside are equal. Set loss_mask.outside, such as 0"
            )
        if dataset.flip != "never" and config.video_config.variants == 1:
            yield (
                f"datasets.flip: {dataset.path} would never be mirrored with one variant of each window. "
                "Set video_config.variants to 2 or more"
            )


def _of_steps(dataset: Dataset, config: Config) -> Iterator[str]:
    """Yield contradictions of the steps in which a dataset is trained."""
    until_step = dataset.until_step
    if until_step is not None and until_step < dataset.from_step:
        yield (
            f"datasets.until_step: {dataset.path} ends at step {until_step}, before its from_step "
            f"{dataset.from_step}. Set a later one"
        )

    is_limited = dataset.from_step > 1 or until_step is not None
    for key in Config.model_fields:
        is_in_epochs = key == "epochs" or key.endswith("_epochs")
        if is_limited and is_in_epochs and getattr(config, key) is not None:
            yield (
                f"{key}: a pass over the data has no length while datasets.from_step or until_step let "
                f"{dataset.path} come or go. Set steps instead of passes"
            )


def _of_captions(dataset: Dataset) -> Iterator[str]:
    """Yield keys of captions that need another key, or that the dataset cannot use."""
    if dataset.kind == "validation" and dataset.varies_captions:
        yield (
            "datasets.caption_shuffle, caption_tag_dropout, caption_wildcards: the validation dataset "
            f"{dataset.path} does not use them: it is measured with each clip's first caption. Leave them out"
        )

    splits_tags = dataset.caption_shuffle or dataset.caption_tag_dropout > 0
    fields = Dataset.model_fields
    for key, is_used, needs in (
        ("caption_keep_tokens", splits_tags, "caption_shuffle or caption_tag_dropout"),
        ("caption_separator", splits_tags, "caption_shuffle or caption_tag_dropout"),
        (
            "caption_variants",
            dataset.varies_captions,
            "caption_shuffle, caption_tag_dropout or caption_wildcards",
        ),
    ):
        if getattr(dataset, key) != fields[key].default and not is_used:
            yield f"datasets.{key}: {dataset.path} does not use it without {needs}. Set that, or leave it out"
