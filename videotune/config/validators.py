"""What keys may stand together: contradictions, and keys that another choice does not use, are refused."""

from collections.abc import Iterator
from itertools import chain

from videotune.config.fields import ROUNDED
from videotune.config.optimizers import OPTIMIZERS
from videotune.config.schema import Config, leaves
from videotune.errors import VideotuneError
from videotune.types import ModelSpec

LEAST_OF_PRODIGY = 0.01
"""A rate below it is another optimizer's: PRODIGY multiplies it with the rate that it finds."""


def refuse_what_does_not_apply(config: Config, spec: ModelSpec | None) -> None:
    """Raise VideotuneError for keys that contradict each other, or that the choice beside them or the model does not use.

    A number that is its default says nothing: a run's kept config names every key.
    """
    of_keys = (_unused, _compiled, _with_sharding, _with_the_optimizer, _with_the_method)
    faults = chain.from_iterable(
        rule(config) for rule in (*of_keys, _with_the_loss, _with_the_adapter, _of_datasets)
    )
    for fault in chain(faults, _with_the_model(config, spec) if spec else ()):
        raise VideotuneError(fault)


def _unused(config: Config) -> Iterator[str]:
    for key, field in leaves().items():
        of, choices = field.json_schema_extra.get("goes_with", (None, ()))
        if of and getattr(config, key) != field.default and getattr(config, of) not in choices:
            yield f"{key}: {of} {getattr(config, of)} does not use it; it is for {' and '.join(choices)}. Leave it out."


def _compiled(config: Config) -> Iterator[str]:
    if config.compile is True and (why := cannot_compile(config)):
        yield f"compile: {why}: set it to false"


def cannot_compile(config: Config) -> str | None:
    """What of the config stands against compiled blocks, in words; None: nothing."""
    kept = (
        config.weight_dtype
        if config.transformer.weight_dtype == "auto"
        else config.transformer.weight_dtype
    )
    if config.deterministic:
        return "compiled kernels cannot promise the same bits, which deterministic asks for"
    if config.sharding == "FULL":
        return "with sharding FULL the weights of a block are gathered within it"
    if kept in ROUNDED:
        return f"weights in {kept} are dequantized by functions that torch cannot compile"
    return None


def _with_sharding(config: Config) -> Iterator[str]:
    """What cannot stand beside weights that several processes share out."""
    if config.sharding == "OFF":
        return
    kind = config.optimizer
    full = config.training_method == "FINE_TUNE" and config.transformer.train
    if config.layer_offload_fraction:
        why = "with sharding FULL the weights lie with the processes, not on the host"
        yield f"layer_offload_fraction: {why}: set it to 0, or sharding to OFF"
    if config.gradient_checkpointing == "CPU_OFFLOADED":
        why = "CPU_OFFLOADED computes a block by itself, and with sharding FULL its weights would not be there"
        yield f"gradient_checkpointing: {why}: set it to ON, or sharding to OFF"
    by_number = [name for name, one in OPTIMIZERS.items() if one.by_number]
    if full and kind.name not in by_number:
        whole = f"{kind.name} looks at a matrix, or at blocks of numbers, as a whole"
        why = f"{whole}, and with sharding FULL a process has some rows of each"
        yield f"optimizer.name: {why}: take {' or '.join(by_number)}, or LORA, whose adapter each process has whole"


def _with_the_optimizer(config: Config) -> Iterator[str]:
    kind = config.optimizer
    own = type(config.optimizer).model_fields
    for key in ("beta1", "beta2"):
        if not OPTIMIZERS[kind.name].betas and getattr(kind, key) != own[key].default:
            yield f"optimizer.{key}: {kind.name} keeps no such mean; leave it out"
    if kind.name == "PRODIGY" and config.learning_rate < LEAST_OF_PRODIGY:
        fault = f"{config.learning_rate:g} is a rate for other optimizers (a preset may have set it)"
        yield f"learning_rate: PRODIGY multiplies it with the rate that it finds, and {fault}: set learning_rate=1"
    if kind.name == "SCHEDULE_FREE":
        fits = {
            "optimizer.beta1: set it above 0": kind.beta1 > 0,
            "optimizer.masters: leave it at FLOAT_32": kind.masters == "FLOAT_32",
            "learning_rate_scheduler: set it to CONSTANT": config.learning_rate_scheduler
            == "CONSTANT",
            "ema.decay: leave it out": config.ema.decay is None,
        }
        yield from (
            f"{text}, since SCHEDULE_FREE averages the weights itself"
            for text, fit in fits.items()
            if not fit
        )
    full = config.training_method == "FINE_TUNE"
    rounds = kind.masters == "STOCHASTIC_ROUNDING"
    if rounds and (not full or config.train_dtype == "FLOAT_32"):
        use = "STOCHASTIC_ROUNDING is for FINE_TUNE in BFLOAT_16, whose weights otherwise have float32 copies"
        here = "they are float32 themselves" if full else "an adapter trains, in float32"
        yield f"optimizer.masters: {use}; here {here}. Leave it out."
    if kind.name == "PRODIGY" and (kind.step_in_backward or rounds):
        apart = (
            "optimizer.step_in_backward"
            if kind.step_in_backward
            else "optimizer.masters STOCHASTIC_ROUNDING"
        )
        yield f"{apart}: PRODIGY finds one rate from all gradients together; choose another optimizer"
    summed = "optimizer.step_in_backward: a gradient that is used at once cannot be summed over"
    if kind.step_in_backward and config.gradient_accumulation_steps > 1:
        yield f"{summed} gradient_accumulation_steps {config.gradient_accumulation_steps}; set one of the two back"
    if config.layer_offload_fraction and (why := cannot_wait(config)):
        yield f"{why} (FINE_TUNE with layer_offload_fraction): leave it out, or set layer_offload_fraction to 0"
    if (
        kind.step_in_backward
        and (config.micro_batch_size or config.batch_size) < config.batch_size
    ):
        yield f"{summed} the passes of micro_batch_size {config.micro_batch_size}; set one of the two back"


def _with_the_method(config: Config) -> Iterator[str]:
    """What the training method cannot train or does not use, and where nothing would train."""
    method = config.training_method
    net = config.transformer.train
    text = config.text_encoder.train
    if (config.missing_caption == "text") != (config.missing_caption_text is not None):
        yield 'missing_caption "text" and missing_caption_text belong together: set both or neither'
    if method == "EMBEDDING" and (net or text):
        key = "transformer.train" if net else "text_encoder.train"
        yield f"{key}: EMBEDDING trains new tokens and leaves all weights as they are: leave it out"
    if method == "LORA" and not net:
        yield "transformer.train: LORA trains an adapter of the transformer; without it nothing trains"
    if method == "LORA" and text:
        yield (
            "text_encoder.train: FINE_TUNE trains the text encoder, and EMBEDDING new tokens of it; LORA does not, since "
            "the pipelines of video models read no adapter of a text encoder"
        )
    if method == "FINE_TUNE":
        yield from _rounded(config)
        if not (net or text):
            yield "transformer.train: nothing would train: set it, or text_encoder.train, to true"
        return
    if method == "EMBEDDING" and config.output_dtype not in (None, "FLOAT_32"):
        yield f"output_dtype: new tokens' rows are exported in FLOAT_32, not {config.output_dtype}: leave it out"
    others = [dataset.path for dataset in config.datasets if dataset.kind == "regularization"]
    if method == "EMBEDDING" and others:
        yield f"datasets.kind: a regularization clip does not hold the new token, so EMBEDDING learns nothing of {others[0]}"
    if config.transformer.layers is not None:
        yield "transformer.layers: it is for FINE_TUNE; where an adapter goes, lora.targets says"
    if config.lora.variant == "OFT":
        if config.lora.alpha is not None:
            yield "lora.alpha: OFT turns weights and scales nothing; leave it out"
        if config.lora.dropout:
            yield "lora.dropout: PEFT's OFT drops nothing out; leave it at 0"
        if config.lora.rank < 2:
            yield "lora.rank: OFT turns so many inputs together, at least 2"


def _rounded(config: Config) -> Iterator[str]:
    """Weights that train and would be kept in another dtype: updates are smaller than its steps."""
    for name, part in (
        ("transformer", config.transformer),
        ("text_encoder", config.text_encoder),
    ):
        own = part.weight_dtype != "auto"
        kept, key = (
            (part.weight_dtype, f"{name}.weight_dtype")
            if own
            else (config.weight_dtype, "weight_dtype")
        )
        if part.train and kept not in ("auto", config.train_dtype):
            other = "text_encoder" if name == "transformer" else "transformer"
            why = f"FINE_TUNE trains the {name.replace('_', ' ')}, and {kept} is for frozen weights"
            remedy = f"Leave it out{'' if own else f', or set {other}.weight_dtype alone'}."
            yield f"{key}: {why}: weights that train are in train_dtype. {remedy}"


def _with_the_loss(config: Config) -> Iterator[str]:
    if config.timestep_min >= config.timestep_max:
        yield f"timestep_min: {config.timestep_min:g} leaves no noise level below timestep_max {config.timestep_max:g}"
    if config.loss != "mse" and config.video_config.temporal_consistency_weight:
        yield f"video_config.temporal_consistency_weight: it weighs squared errors, and loss is {config.loss}: set it to 0"


def _with_the_adapter(config: Config) -> Iterator[str]:
    lora = config.lora
    own = any(rule.learning_rate for rule in config.lora.modules)
    keys = {
        "lora.learning_rate_ratio": lora.learning_rate_ratio != 1,
        "lora.modules": bool(lora.modules),
    }
    for key in [key for key, given in keys.items() if given]:
        if config.training_method != "LORA" or lora.variant not in ("LORA", "DORA"):
            yield f"{key}: it is for the variants LORA and DORA of training_method LORA: leave it out"
        if config.optimizer.name == "PRODIGY" and (own or key != "lora.modules"):
            yield f"{key}: PRODIGY finds the rate of each group itself, so rates in proportion mean nothing; leave it out"


def _of_datasets(config: Config) -> Iterator[str]:
    for dataset in config.datasets:
        prior = dataset.prior_preservation
        keeps = dataset.kind == "regularization"
        if config.training_method == "FINE_TUNE" and keeps and prior is not False:
            why = "FINE_TUNE keeps no base model beside the one it changes"
            yield f"datasets.prior_preservation: {why}; set it to false for {dataset.path}"
        of = f"the {dataset.kind} dataset {dataset.path} does not use"
        if prior is not None and not keeps:
            yield f'datasets.prior_preservation: {of} it; it is for kind "regularization"'
        for name, default in (("repeats", 1), ("loss_weight", 1.0)):
            if dataset.kind == "validation" and getattr(dataset, name) != default:
                yield f"datasets.{name}: {of} it: it is measured, never trained"


def _with_the_model(config: Config, spec: ModelSpec) -> Iterator[str]:
    targets = config.lora.targets
    if spec.first_frame is None and config.first_frame_probability is not None:
        yield f"first_frame_probability: {spec.title} takes no image; it generates from text alone. Leave it out."
    if isinstance(targets, str) and targets not in spec.lora_targets:
        known = ", ".join(sorted(spec.lora_targets))
        yield f"lora.targets: {targets!r} is no named set of {spec.title} ({known}) and no list of patterns"
    if len(spec.experts) == 1 and config.sample.guidance_2 is not None:
        yield f"sample.guidance_2: {spec.title} has one denoiser, which sample.guidance is for"
    if config.timestep_shift == "resolution" and spec.shift_by_tokens is None:
        usual = f"{spec.timestep_shift:g}"
        yield f"timestep_shift: {spec.title} publishes no shift by resolution; give a number, say {usual}"
    if spec.path != "v" and config.loss_weighting != "none":
        yield f"loss_weighting {config.loss_weighting!r} is defined for v-prediction; {spec.title} is flow"


def cannot_wait(config: Config) -> str | None:
    """Why weights of this run cannot wait on the host, by the key that stands against it; None: they can.

    Frozen ones always can. Those that train have their masters and updates there, which torch's AdamW alone makes.
    """
    kind = config.optimizer
    if config.training_method != "FINE_TUNE" or not config.transformer.train:
        return None
    if kind.name != "ADAMW":
        return f"optimizer.name: {kind.name} does not update offloaded weights"
    if kind.step_in_backward:
        return "optimizer.step_in_backward: offloaded weights are updated on the host, after backward"
    if kind.masters == "STOCHASTIC_ROUNDING":
        return "optimizer.masters: offloaded weights have float32 master weights on the host"
    return None
