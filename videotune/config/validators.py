"""Refuse keys that contradict each other, and keys that another choice does not use."""

from collections.abc import Iterator
from operator import attrgetter

from videotune.config.applies import Facts, unused
from videotune.config.connector_checks import faults_with_connectors
from videotune.config.context_checks import faults_of_context, faults_of_context_in
from videotune.config.dataset_checks import faults_of_datasets
from videotune.config.graph_checks import faults_of_graphs, saved_attention_faults
from videotune.config.optimizer_classes import (
    NEEDED_FOR_ALL,
    argument_faults,
    failing_parts,
    has_own_arguments,
    is_class,
)
from videotune.config.optimizers import OPTIMIZERS, finds_its_rate
from videotune.config.part_checks import faults_of_parts
from videotune.config.pass_checks import faults_of_passes, largest_batch
from videotune.config.precision_checks import (
    faults_with_eight_bits,
    faults_with_float16,
    faults_with_trained_weights,
)
from videotune.config.schema import Config, leaves
from videotune.config.sections import CONNECTORS
from videotune.config.sound_checks import faults_with_sound
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec

MAX_DRAWN_ON_CHANNELS = 3
"""Most conditions on channels of which each is drawn for a sample."""

LEAST_OF_PRODIGY = 0.01
"""A rate below this is meant for another optimizer: PRODIGY multiplies it with the rate
that it finds.
"""


def refuse_what_does_not_apply(config: Config, spec: ModelSpec | None) -> None:
    """Raise VideotuneError for keys that contradict each other, or that another choice
    or the model does not use.

    A value that is its default is never refused, because a run's config.json names
    every key.
    """
    rules = (
        _unused,
        _compiled,
        faults_of_graphs,
        saved_attention_faults,
        faults_of_parts,
        _with_sharding,
        faults_of_context,
        _with_the_optimizer,
        _with_the_method,
        faults_with_eight_bits,
        faults_with_float16,
        _with_masks,
        _with_the_loss,
        _with_the_adapter,
        faults_of_datasets,
    )
    for rule in rules:
        for fault in rule(config):
            raise VideotuneError(fault)
    if spec is not None:
        for fault in _with_the_model(config, spec):
            raise VideotuneError(fault)


def _unused(config: Config, spec: ModelSpec | None = None) -> Iterator[str]:
    """Yield faults of keys that other choices, or the model, leave without effect."""
    num_denoisers = None if spec is None else len(spec.experts)
    fields = leaves()
    for key, condition in unused(Facts(config, num_denoisers)).items():
        is_default = attrgetter(key)(config) == fields[key].default
        if condition.is_refused and not is_default:
            yield f"{key}: {condition.otherwise}. Leave it out"


def _compiled(config: Config) -> Iterator[str]:
    reason = cannot_compile(config)
    if config.compile is True and reason:
        yield f"compile: {reason}. Set it to false"


def cannot_compile(config: Config) -> str | None:
    """Return why the config cannot be compiled, or None."""
    if config.deterministic:
        return "compiled kernels cannot promise the same bits, which deterministic asks for"
    learns_both = config.learns_sound and config.learns_video
    if learns_both and config.optimizer.step_in_backward:
        return (
            "in a step of silent clips compiled blocks have gradients of zero for what only sound reads, and with "
            "optimizer.step_in_backward these would move its weights"
        )
    return None


def _with_sharding(config: Config) -> Iterator[str]:
    """Yield faults of keys that do not go with sharded weights."""
    if config.sharding == "OFF":
        return

    if config.layer_offload_fraction:
        yield (
            "layer_offload_fraction: with sharding FULL the weights are on the processes' devices, not on the host. "
            "Set it to 0, or sharding to OFF"
        )
    if config.gradient_checkpointing == "CPU_OFFLOADED":
        yield (
            "gradient_checkpointing: CPU_OFFLOADED computes a block by itself, and with sharding FULL its weights would "
            "not be there. Set it to ON, or sharding to OFF"
        )

    name = config.optimizer.name
    by_number = [other for other, kind in OPTIMIZERS.items() if kind.by_number]
    trains_all_weights = (
        config.training_method == "FINE_TUNE" and config.transformer.train
    )
    if trains_all_weights and name not in by_number:
        yield (
            f"optimizer.name: {name} looks at a matrix, or at blocks of numbers, as a whole, and with sharding FULL a "
            f"process has some rows of each. Set {' or '.join(by_number)}, or train LORA, whose adapter each process has whole"
        )


def _with_the_optimizer(config: Config) -> Iterator[str]:
    """Yield faults of keys that the optimizer does not use, or that it cannot work
    with.
    """
    settings = config.optimizer
    if is_class(settings.name):
        yield from _with_a_class(config)
    else:
        yield from _with_a_name(config)
    if config.learning_rate_min > config.learning_rate:
        yield (
            f"learning_rate_min: {config.learning_rate_min:g} is above learning_rate {config.learning_rate:g}, the peak. "
            "Set a lower one"
        )
    if finds_its_rate(settings.name):
        yield from _with_found_rate(config)
    if settings.name == "SCHEDULE_FREE":
        yield from _with_schedule_free(config)
    yield from _with_rounding(config)
    yield from _with_step_in_backward(config)


def _with_a_name(config: Config) -> Iterator[str]:
    """Yield faults of the numbers of an optimizer of the table."""
    settings = config.optimizer
    fields = type(settings).model_fields
    for key in ("beta1", "beta2"):
        is_set = getattr(settings, key) != fields[key].default
        if is_set and not OPTIMIZERS[settings.name].betas:
            yield f"optimizer.{key}: {settings.name} keeps no such mean. Leave it out"


def _with_a_class(config: Config) -> Iterator[str]:
    """Yield faults of an optimizer that is named by its class.

    What cannot be known without importing it is tried when a run begins.
    """
    settings = config.optimizer
    name = settings.name
    if not has_own_arguments(name, settings.args):
        for reason in failing_parts(name, NEEDED_FOR_ALL):
            yield (
                f"optimizer.name: {name} with its own defaults cannot train here: {reason.rstrip('.!')}. Choose another"
                " optimizer, or set optimizer.args, with which it is tried again"
            )
    yield from argument_faults(name, settings.args)
    for reason in failing_parts(name, parts_needed(config)):
        yield (
            f"optimizer.name: {name} cannot do what this training needs: {reason}. Choose another optimizer, or leave out "
            "FINE_TUNE, DORA, step_in_backward and STOCHASTIC_ROUNDING"
        )


def parts_needed(config: Config) -> tuple[str, ...]:
    """Return the parts of the optimizers' contract that only some trainings need."""
    settings = config.optimizer
    parts = []
    if config.training_method == "FINE_TUNE" or config.lora.variant == "DORA":
        parts.append("vectors")
    if settings.step_in_backward or settings.masters == "STOCHASTIC_ROUNDING":
        parts.append("apart")
    return tuple(parts)


def _with_found_rate(config: Config) -> Iterator[str]:
    """Yield faults of rates that are meant for another optimizer."""
    name = config.optimizer.name
    rates = {
        "learning_rate": config.learning_rate,
        "learning_rate_low": config.learning_rate_low,
        "embedding_learning_rate": config.embedding_learning_rate,
        "text_encoder.learning_rate": config.text_encoder.learning_rate,
    }
    for key, rate in rates.items():
        if rate is None or rate >= LEAST_OF_PRODIGY:
            continue
        yield (
            f"{key}: {name} multiplies it with the rate that it finds, and {rate:g} is a rate "
            f"for other optimizers (a preset may have set it). Set {key}=1"
        )


def _with_schedule_free(config: Config) -> Iterator[str]:
    settings = config.optimizer
    remedies = []
    if settings.beta1 <= 0:
        remedies.append("optimizer.beta1: set it above 0")
    if settings.masters != "FLOAT_32":
        remedies.append("optimizer.masters: leave it at FLOAT_32")
    if config.learning_rate_scheduler != "CONSTANT":
        remedies.append("learning_rate_scheduler: set it to CONSTANT")
    if config.ema.decay is not None:
        remedies.append("ema.decay: leave it out")
    for remedy in remedies:
        yield f"{remedy}, since SCHEDULE_FREE averages the weights itself"


def _with_rounding(config: Config) -> Iterator[str]:
    """Yield faults of stochastic rounding."""
    settings = config.optimizer
    if settings.masters != "STOCHASTIC_ROUNDING":
        return

    is_fine_tuning = config.training_method == "FINE_TUNE"
    if not is_fine_tuning or config.train_dtype == "FLOAT_32":
        reason = "an adapter trains, in float32"
        if is_fine_tuning:
            reason = "they are float32 themselves"
        yield (
            "optimizer.masters: STOCHASTIC_ROUNDING is for FINE_TUNE in BFLOAT_16, whose weights otherwise have float32 "
            f"copies; here {reason}. Leave it out."
        )
    if settings.name == "PRODIGY" and not settings.step_in_backward:
        yield _needs_all_gradients("optimizer.masters STOCHASTIC_ROUNDING")


def _needs_all_gradients(key: str) -> str:
    return f"{key}: PRODIGY finds one rate from all gradients together. Choose another optimizer"


def _with_step_in_backward(config: Config) -> Iterator[str]:
    """Yield faults of updates during backward, and of weights that wait on the host."""
    settings = config.optimizer
    if settings.step_in_backward and settings.name == "PRODIGY":
        yield _needs_all_gradients("optimizer.step_in_backward")

    cannot_sum = "optimizer.step_in_backward: a gradient that is used at once cannot be summed over"
    if settings.step_in_backward and config.gradient_accumulation_steps > 1:
        yield (
            f"{cannot_sum} gradient_accumulation_steps {config.gradient_accumulation_steps}. Set one of the two back"
        )
    reason = cannot_wait(config)
    if config.layer_offload_fraction and reason:
        yield (
            f"{reason} (FINE_TUNE with layer_offload_fraction). "
            "Leave it out, or set layer_offload_fraction to 0"
        )
    batch_size = largest_batch(config)
    micro_batch_size = config.micro_batch_size or batch_size
    if settings.step_in_backward and micro_batch_size < batch_size:
        yield (
            f"{cannot_sum} the passes of micro_batch_size {config.micro_batch_size}. Set one of the two back"
        )


def _with_masks(config: Config) -> Iterator[str]:
    """Yield weights of masks that leave nothing to learn, or that make no difference."""
    weights = config.loss_mask
    if not weights.inside and not weights.outside:
        yield "loss_mask.inside, loss_mask.outside: both are 0, so nothing counts. Set one above 0"
    elif weights.inside == weights.outside != 1:
        yield (
            f"loss_mask.inside, loss_mask.outside: both are {weights.inside:g}, so masks change nothing. "
            "Set two that differ, or leave both out"
        )


def _with_the_method(config: Config) -> Iterator[str]:
    """Yield faults of what the training method cannot train or does not use, and if
    nothing would train.
    """
    method = config.training_method
    trains_transformer = config.transformer.train
    trains_text = config.text_encoder.train
    if (config.missing_caption == "text") != (config.missing_caption_text is not None):
        yield 'missing_caption "text" and missing_caption_text belong together. Set both or neither'

    if method == "EMBEDDING" and (trains_transformer or trains_text):
        key = "transformer.train" if trains_transformer else "text_encoder.train"
        yield f"{key}: EMBEDDING trains new tokens and leaves all weights as they are. Leave it out"
    if method == "LORA" and not trains_transformer:
        yield "transformer.train: LORA trains an adapter of the transformer; without it nothing trains"
    if method == "LORA" and trains_text:
        yield (
            "text_encoder.train: FINE_TUNE trains the text encoder, and EMBEDDING new tokens of it; LORA does not, since "
            "the pipelines of video models read no adapter of a text encoder"
        )
    if method == "FINE_TUNE":
        yield from faults_with_trained_weights(config)
        if any(lora.training_only for lora in config.base_loras):
            yield (
                "base_loras.training_only: FINE_TUNE changes the merged weights themselves, so"
                " nothing can be left out of them later. Leave it out"
            )
        if not (trains_transformer or trains_text):
            yield "transformer.train: nothing would train. Set it, or text_encoder.train, to true"
        return

    if method == "EMBEDDING" and config.output_dtype not in (None, "FLOAT_32"):
        yield (
            f"output_dtype: rows of new tokens are exported in FLOAT_32, not {config.output_dtype}. Leave it out"
        )
    regularization = [
        dataset.path for dataset in config.datasets if dataset.kind == "regularization"
    ]
    if method == "EMBEDDING" and regularization:
        yield (
            "datasets.kind: a regularization clip does not have the new token, so EMBEDDING learns nothing from "
            f"{regularization[0]}"
        )
    if config.transformer.layers is not None:
        yield "transformer.layers: it is for FINE_TUNE; lora.targets says where an adapter goes"
    if config.lora.variant == "OFT":
        yield from _with_oft(config)


def _with_oft(config: Config) -> Iterator[str]:
    if config.lora.alpha is not None:
        yield "lora.alpha: OFT rotates weights and scales nothing. Leave it out"
    if config.lora.dropout:
        yield "lora.dropout: PEFT's OFT has no dropout. Leave it at 0"
    if config.lora.rank < 2:
        yield "lora.rank: must be at least 2 for OFT (it is the block size)"


def _with_the_loss(config: Config) -> Iterator[str]:
    if config.timestep_min >= config.timestep_max:
        yield (
            f"timestep_min: {config.timestep_min:g} leaves no noise level below timestep_max {config.timestep_max:g}"
        )
    if config.loss != "mse" and config.video_config.temporal_consistency_weight:
        yield (
            f"video_config.temporal_consistency_weight: it weights squared errors, and loss is {config.loss}. "
            "Set it to 0"
        )

    if config.distilled_guidance is not None and config.training_method != "LORA":
        yield (
            f"distilled_guidance: {config.training_method} keeps no base model beside what it trains. Leave it out"
        )
    if config.distilled_guidance is not None and config.text_in_step:
        yield (
            "distilled_guidance: the empty caption is read from the cache, and captions are encoded in the step here. "
            "Leave it out"
        )


def _with_the_adapter(config: Config) -> Iterator[str]:
    lora = config.lora
    set_keys = []
    if lora.learning_rate_ratio != 1:
        set_keys.append("lora.learning_rate_ratio")
    if lora.modules:
        set_keys.append("lora.modules")

    has_own_rates = any(rule.learning_rate for rule in lora.modules)
    for key in set_keys:
        sets_rates = has_own_rates or key != "lora.modules"
        if config.optimizer.name == "PRODIGY" and sets_rates:
            yield (
                f"{key}: PRODIGY finds the rate of each group itself, so proportional rates mean nothing. Leave it out"
            )


def _of_conditions(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield conditions that the model does not take, or that contradict each other."""
    supported = ", ".join(spec.conditions) or "none"
    if config.first_frame_probability is not None and (
        "first_frame" not in spec.conditions
    ):
        yield (
            f"first_frame_probability: {spec.title} takes no image; it generates only from text. Leave it out."
        )

    types = [condition.type for condition in config.conditions]
    for condition_type in types:
        if condition_type not in spec.conditions:
            yield (
                f"conditions: {spec.title} cannot learn {condition_type}; it takes {supported}. Leave it out"
            )
        if types.count(condition_type) > 1:
            yield f"conditions: {condition_type} is there twice. Keep one"
    shares = config.condition_shares
    for name in sorted(spec.required_conditions):
        if shares.get(name) != 1:
            yield (
                f"conditions: {spec.title} never runs without its {name}. Set its probability to 1"
            )

    drawn_types = [
        name
        for name, share in sorted(shares.items())
        if spec.is_on_channels(name) and 0 < share < 1
    ]
    if len(drawn_types) > MAX_DRAWN_ON_CHANNELS and config.video_config.variants:
        yield (
            f"conditions: {', '.join(drawn_types)}: each set that samples may have together is encoded for each clip, "
            f"here {2 ** len(drawn_types)} sets. Draw at most {MAX_DRAWN_ON_CHANNELS} (the others with probability 1), "
            "or set video_config.variants 0"
        )

    for condition in config.conditions:
        uses_frames = condition.type in ("prefix", "suffix", "reference")
        if condition.frames_given > 1 and not uses_frames:
            yield (
                f"conditions: {condition.type} does not use latent_frames; prefix, suffix and reference do. Leave it out"
            )


def _with_the_model(config: Config, spec: ModelSpec) -> Iterator[str]:
    yield from _unused(config, spec)
    yield from faults_of_passes(config, spec)
    yield from faults_of_context_in(config, spec)
    targets = config.lora.targets
    yield from _of_conditions(config, spec)
    yield from faults_with_sound(config, spec)
    yield from faults_with_connectors(config, spec)
    is_name = isinstance(targets, str) and targets != CONNECTORS
    if is_name and targets not in spec.lora_targets:
        sets = [*spec.lora_targets, *([CONNECTORS] if spec.connectors else [])]
        names = ", ".join(sorted(sets))
        yield (
            f"lora.targets: {targets!r} is neither a named set of {spec.title} ({names}) nor a list of patterns"
        )
    if len(spec.experts) == 1 and config.sample.guidance_2 is not None:
        yield (
            f"sample.guidance_2: {spec.title} has one denoiser, which sample.guidance is for. Leave it out"
        )
    if config.timestep_shift == "resolution" and spec.shift_by_tokens is None:
        yield (
            f"timestep_shift: {spec.title} publishes no shift by resolution. Set a number, such as {spec.timestep_shift:g}"
        )
    if spec.prediction != "v" and config.loss_weighting != "none":
        yield (
            f"loss_weighting: {config.loss_weighting!r} is defined for v-prediction, and {spec.title} is flow. Leave it out"
        )


def cannot_wait(config: Config) -> str | None:
    """Return why weights of this run cannot wait on the host, by the key that prevents
    it, or None if they can.

    Frozen weights always can. Those that train have their masters and updates there,
    which only torch's AdamW makes.
    """
    settings = config.optimizer
    if config.training_method != "FINE_TUNE" or not config.transformer.train:
        return None
    if settings.name != "ADAMW":
        return f"optimizer.name: {settings.name} does not update offloaded weights"
    if settings.step_in_backward:
        return "optimizer.step_in_backward: offloaded weights are updated on the host, after backward"
    if settings.masters == "STOCHASTIC_ROUNDING":
        return "optimizer.masters: offloaded weights have float32 master weights on the host"
    return None
