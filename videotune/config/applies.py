"""When a key has an effect: one table, which the checks, the notes of a run, the options
page and the studio's form read.

A key that cannot act is either refused or noted. It is refused where its value would
contradict another key; it is noted where a preset, or an earlier choice of the user,
may well have left it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from videotune.config.optimizer_classes import is_class
from videotune.config.optimizers import NUMBERS_OF_NAMES
from videotune.config.schema import Config, leaves


@dataclass(frozen=True)
class Facts:
    """What decides whether a key acts. None: not known here, so the key may act."""

    config: Config

    num_denoisers: int | None = None
    """1, or 2 for a model with one expert for high noise and one for low."""

    mixes_images: bool | None = None
    """Whether there are images and videos to train on."""

    has_random_windows: bool | None = None
    """Whether something of a window is drawn at random."""

    held_out_clips: int | None = None

    splits_by_fraction: bool | None = None
    """Whether there are enough source videos to hold a share of them out."""

    most_frames: int | None = None
    """Frames of the longest window."""

    samples_per_step: int | None = None
    """Samples of the largest step."""


@dataclass(frozen=True)
class Condition:
    """Keys, and when they have an effect."""

    keys: tuple[str, ...]

    when: str
    """The condition in words, as the options page prints it after "applies when"."""

    holds: Callable[[Facts], bool]

    otherwise: str
    """Why the keys do not act, as a note prints it after "KEY is unused:"."""

    is_refused: bool = False
    """Whether a value other than the default is refused if the condition fails."""


def _is_at_most(value: int | None, limit: int) -> bool:
    """Whether a value is known and not above a limit."""
    return value is not None and value <= limit


def _trains_adapter(facts: Facts) -> bool:
    return facts.config.training_method == "LORA"


def _has_modules(facts: Facts) -> bool:
    config = facts.config
    return config.training_method == "LORA" and config.lora.variant in ("LORA", "DORA")


def _trains_embedding(facts: Facts) -> bool:
    return facts.config.training_method == "EMBEDDING"


def _trains_text_encoder(facts: Facts) -> bool:
    return facts.config.text_encoder.train


def _only_rows_have_their_rate(facts: Facts) -> bool:
    config = facts.config
    is_embedding = config.training_method == "EMBEDDING"
    trains_only_rows = is_embedding and not config.transformer.train
    return trains_only_rows and config.embedding_learning_rate is not None


def _only_text_has_its_rate(facts: Facts) -> bool:
    config = facts.config
    trains_only_text = config.text_encoder.train and not config.transformer.train
    return trains_only_text and config.text_encoder.learning_rate is not None


def _only_low_has_its_rate(facts: Facts) -> bool:
    config = facts.config
    trains_only_low = config.transformer.train and config.experts == "low"
    return trains_only_low and config.learning_rate_low is not None


def _trains_both_experts(facts: Facts) -> bool:
    is_single = _is_at_most(facts.num_denoisers, 1)
    return facts.config.experts in (None, "both") and not is_single


def _trains_low_expert(facts: Facts) -> bool:
    is_single = _is_at_most(facts.num_denoisers, 1)
    return facts.config.experts != "high" and not is_single


def _uses_object_store(facts: Facts) -> bool:
    """Return whether clips or encoded clips are on an object store."""
    config = facts.config
    paths = [config.cache_dir or "", *(dataset.path for dataset in config.datasets)]
    return any(path.startswith("s3://") for path in paths)


def _writes_backups(facts: Facts) -> bool:
    return facts.config.backup_after > 0 or facts.config.backup_every > 0


def _draws_previews(facts: Facts) -> bool:
    return facts.config.samples != 0 and facts.config.sample_after != 0


def _has_long_windows(facts: Facts) -> bool:
    return not _is_at_most(facts.most_frames, 1)


def _holds_out_by_fraction(facts: Facts) -> bool:
    kinds = {dataset.kind for dataset in facts.config.datasets}
    return "validation" not in kinds and facts.splits_by_fraction is not False


def _section(name: str, *, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the keys of a section of the config, without some."""
    prefix = f"{name}."
    return tuple(key for key in leaves() if key.startswith(prefix) and key not in but)


FREE_KEYS_OF_LORA = ("lora.learning_rate_ratio", "lora.modules")
"""Keys of the adapter that have a condition of their own."""

TABLE = (
    Condition(
        keys=("optimizer.args",),
        when="optimizer.name is a class",
        holds=lambda facts: is_class(facts.config.optimizer.name),
        otherwise="it is for an optimizer that is named by its class, such as torch.optim:AdamW",
        is_refused=True,
    ),
    Condition(
        keys=tuple(f"optimizer.{key}" for key in NUMBERS_OF_NAMES),
        when="optimizer.name is in capitals",
        holds=lambda facts: not is_class(facts.config.optimizer.name),
        otherwise="an optimizer that is named by its class has its numbers in optimizer.args",
        is_refused=True,
    ),
    Condition(
        keys=_section("lora", but=FREE_KEYS_OF_LORA),
        when="training_method is LORA",
        holds=_trains_adapter,
        otherwise='training_method is not "LORA", so there is no adapter',
    ),
    Condition(
        keys=FREE_KEYS_OF_LORA,
        when="training_method is LORA and lora.variant is LORA or DORA",
        holds=_has_modules,
        otherwise="it is for the variants LORA and DORA of training_method LORA",
        is_refused=True,
    ),
    Condition(
        keys=(
            "embedding_learning_rate",
            "embedding.token",
            "embedding.vectors",
            "embedding.init_text",
        ),
        when="training_method is EMBEDDING",
        holds=_trains_embedding,
        otherwise='training_method is not "EMBEDDING"',
    ),
    Condition(
        keys=("text_encoder.learning_rate", "text_encoder.layers"),
        when="text_encoder.train is true",
        holds=_trains_text_encoder,
        otherwise="the text encoder does not train",
    ),
    Condition(
        keys=("learning_rate",),
        when="more trains than new tokens with embedding_learning_rate",
        holds=lambda facts: not _only_rows_have_their_rate(facts),
        otherwise="embedding_learning_rate is the new tokens' own",
    ),
    Condition(
        keys=("learning_rate",),
        when="more trains than a text encoder with text_encoder.learning_rate",
        holds=lambda facts: not _only_text_has_its_rate(facts),
        otherwise="text_encoder.learning_rate is the text encoder's own",
    ),
    Condition(
        keys=("learning_rate",),
        when="more trains than one expert with learning_rate_low",
        holds=lambda facts: not _only_low_has_its_rate(facts),
        otherwise="learning_rate_low is the expert's own",
    ),
    Condition(
        keys=("learning_rate_low",),
        when="the expert for low noise trains",
        holds=_trains_low_expert,
        otherwise="no expert for low noise trains",
        is_refused=True,
    ),
    Condition(
        keys=("expert_share", "expert_period"),
        when="both experts of a model train",
        holds=_trains_both_experts,
        otherwise="it deals the steps out to two experts, and only one denoiser trains",
        is_refused=True,
    ),
    Condition(
        keys=("timestep_stratified",),
        when="a step has two samples or more",
        holds=lambda facts: not _is_at_most(facts.samples_per_step, 1),
        otherwise="a step has one sample, so there is nothing to divide between samples",
    ),
    Condition(
        keys=("ema.device",),
        when="ema.decay is set",
        holds=lambda facts: facts.config.ema.decay is not None,
        otherwise="ema.decay is not set, so there is no average",
    ),
    Condition(
        keys=("backup_keep",),
        when="backup_after or backup_every is above 0",
        holds=_writes_backups,
        otherwise="backup_after and backup_every are 0, so there are no backups",
    ),
    Condition(
        keys=("tracker_project",),
        when="trackers names one",
        holds=lambda facts: bool(facts.config.trackers),
        otherwise="trackers is empty",
    ),
    Condition(
        keys=("object_cache_gb",),
        when="a dataset or cache_dir is on an object store (s3://)",
        holds=_uses_object_store,
        otherwise="neither a dataset nor cache_dir is on an object store",
    ),
    Condition(
        keys=("push_checkpoints_keep",),
        when="push_checkpoints_to names a repository",
        holds=lambda facts: facts.config.push_checkpoints_to is not None,
        otherwise="push_checkpoints_to is not set",
    ),
    Condition(
        keys=("notify_on",),
        when="notify names an address",
        holds=lambda facts: bool(facts.config.notify),
        otherwise="notify is empty",
    ),
    Condition(
        keys=_section("sample"),
        when="previews are drawn (samples and sample_after are not 0)",
        holds=_draws_previews,
        otherwise="no previews are drawn while training (samples or sample_after is 0); "
        "only `videotune sample` uses it",
    ),
    Condition(
        keys=_section("sample_metrics", but=("sample_metrics.budget",)),
        when="sample_metrics.budget is above 0",
        holds=lambda facts: facts.config.sample_metrics.budget > 0,
        otherwise="sample_metrics.budget is 0, so no samples are measured",
    ),
    Condition(
        keys=_section("forgetting", but=("forgetting.budget",)),
        when="forgetting.budget is above 0",
        holds=lambda facts: facts.config.forgetting.budget > 0,
        otherwise="forgetting.budget is 0, so nothing is read of the base model",
    ),
    Condition(
        keys=_section("sound"),
        when="generate is set",
        holds=lambda facts: facts.config.reads_sound,
        otherwise="generate is not set, so no sound is read",
    ),
    Condition(
        keys=("video_config.max_frames",),
        when="video_config.frames is not set",
        holds=lambda facts: facts.config.video_config.frames is None,
        otherwise="video_config.frames is set, and takes its place",
    ),
    Condition(
        keys=(
            "video_config.use_temporal_attention",
            "video_config.frame_dropout_probability",
            "video_config.temporal_consistency_weight",
        ),
        when="a training window has two frames or more",
        holds=_has_long_windows,
        otherwise="every training window has one frame",
    ),
    Condition(
        keys=("video_config.video_batch_size_multiplier",),
        when="images and videos are mixed",
        holds=lambda facts: facts.mixes_images is not False,
        otherwise="images and videos are not mixed here",
    ),
    Condition(
        keys=("video_config.window_stride",),
        when='video_config.windows is "slide"',
        holds=lambda facts: facts.config.video_config.windows == "slide",
        otherwise='video_config.windows is not "slide"',
    ),
    Condition(
        keys=("video_config.keyframe_source",),
        when='video_config.frame_sample_strategy is "keyframe"',
        holds=lambda facts: (
            facts.config.video_config.frame_sample_strategy == "keyframe"
        ),
        otherwise='frame_sample_strategy is not "keyframe"',
    ),
    Condition(
        keys=("video_config.variants",),
        when="something of a window is random, or boxes are drawn",
        holds=lambda facts: (
            facts.has_random_windows is not False
            or "mask" in facts.config.condition_types
        ),
        otherwise="nothing of a window is random",
    ),
    Condition(
        keys=("video_config.windows",),
        when="video_config.stretch is false",
        holds=lambda facts: not facts.config.video_config.stretch,
        otherwise="stretch makes one window of each clip",
    ),
    Condition(
        keys=("validation_fraction",),
        when="no dataset is of kind validation, and there are 20 source videos or more",
        holds=_holds_out_by_fraction,
        otherwise="a dataset of kind validation takes its place, "
        "or there are fewer than 20 source videos",
    ),
    Condition(
        keys=("validation_windows",),
        when="validate_every is not 0",
        holds=lambda facts: facts.config.validate_every != 0,
        otherwise="validate_every is 0, so nothing is validated",
    ),
    Condition(
        keys=("early_stopping",),
        when="validate_every is not 0",
        holds=lambda facts: facts.config.validate_every != 0,
        otherwise="validate_every is 0, and only validations can say when to stop",
    ),
    Condition(
        keys=("early_stopping",),
        when="two clips or more are kept aside",
        holds=lambda facts: not _is_at_most(facts.held_out_clips, 1),
        otherwise="fewer than two clips are kept aside, "
        "and only clips kept aside tell learning from copying",
    ),
)


def conditions() -> Iterator[Condition]:
    """Yield all conditions: those at the fields of the schema, then the table's."""
    for key, field in leaves().items():
        other_key, choices = field.json_schema_extra.get("goes_with", (None, ()))
        if other_key is None:
            continue
        yield _choice_condition(key, other_key, choices)
    yield from TABLE


def _choice_condition(key: str, other_key: str, choices: tuple[str, ...]) -> Condition:
    names = " or ".join(choices)

    def is_chosen(facts: Facts) -> bool:
        return getattr(facts.config, other_key) in choices

    return Condition(
        keys=(key,),
        when=f"{other_key} is {names}",
        holds=is_chosen,
        otherwise=f"it is for {other_key} {names}",
        is_refused=True,
    )


def unused(facts: Facts) -> dict[str, Condition]:
    """Return the keys that cannot act, with the condition that fails."""
    failed: dict[str, Condition] = {}
    for condition in conditions():
        if condition.holds(facts):
            continue
        for key in condition.keys:
            failed.setdefault(key, condition)
    return failed


SAMPLING_SECTIONS = ("sample", "base_parts", "base_loras", "vae")
"""Sections and lists of which every key acts in `videotune sample` and `compare`."""

SAMPLING_KEYS = (
    "family",
    "base_model_name",
    "training_method",
    "conditions",
    "generate",
    "train_dtype",
    "weight_dtype",
    "transformer.file",
    "transformer.matmul_dtype",
    "transformer.weight_dtype",
    "text_encoder.convention",
    "text_encoder.file",
    "text_encoder.weight_dtype",
    "video_config.frame_sample_strategy",
    "video_config.frames",
    "video_config.stretch",
    "video_config.target_fps",
)
"""Other keys that act there: the model, its dtypes, and the shape of a video."""


def acts_in_samples(key: str) -> bool:
    """Return whether a key acts in ``videotune sample`` and ``videotune compare``, which
    draw with weights that are trained already.
    """
    return key in SAMPLING_KEYS or key.partition(".")[0] in SAMPLING_SECTIONS


def sampling_key_of(key: str) -> str | None:
    """Return the key of ``sample`` that is called like a key of the training, if there is
    one: ``sample.steps`` for ``steps``.
    """
    sampling_key = f"sample.{key.rpartition('.')[2]}"
    return sampling_key if sampling_key in leaves() else None


def applies_when(key: str) -> str:
    """Return when a key has an effect, in words; empty if it always has."""
    texts = [condition.when for condition in conditions() if key in condition.keys]
    return "; ".join(texts)
