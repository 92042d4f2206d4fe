"""Every option there is, with its default, its bounds and one line of help.

A key exists only if it does something.

A key with a single legal value (``training_method``) is a statement that a config may
make, not a knob.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from videotune.config.data_schema import Dataset, Section, VideoConfig
from videotune.config.fields import (
    FALLING,
    Attention,
    Checkpointing,
    Decay,
    Dtype,
    ExportDtype,
    ExportFormat,
    Resolution,
    Share,
    Side,
    Timesteps,
    TrackerName,
    checked,
    data,
    fatal,
    override,
    safe,
    short_for,
    word,
)
from videotune.config.notify_addresses import NotifyAddress, NotifyEvent
from videotune.config.optimizers import Optimizer
from videotune.config.sampling_sections import (
    Forgetting,
    Prompt,
    Sample,
    SampleMetrics,
    short_file,
)
from videotune.config.sections import (
    BaseLora,
    Condition,
    Ema,
    Embedding,
    Lora,
    LossMask,
    SoundConfig,
    TextEncoder,
    Transformer,
    Vae,
    WeightDtype,
)


class Config(Section):
    """A training run."""

    family: str | None = fatal(None)
    """the model family (default: as the base model says)"""
    base_model_name: str | None = checked(None, min_length=1)
    """a folder in diffusers layout, a Hub id, a .safetensors file with base_parts, or
    asset:toy (comes with videotune)
    """
    base_parts: str | None = checked(None, min_length=1)
    """the folder or Hub id, in diffusers layout, of all but the transformer where
    base_model_name is a file
    """
    training_method: Annotated[
        Literal["LORA", "FINE_TUNE", "EMBEDDING"], BeforeValidator(word)
    ] = fatal("LORA")
    """LORA: a low-rank adapter; FINE_TUNE: every weight; EMBEDDING: new tokens (textual
    inversion)
    """
    init_from: str | None = fatal(None, min_length=1)
    """weights to begin with: a LoRA or embedding file, or a checkpoint's folder; a
    fresh optimizer
    """
    base_loras: list[Annotated[BaseLora, short_file]] = checked([])
    """LoRA files merged into the frozen weights that are trained on: a path, or
    {"file", "strength", "expert", "training_only"}
    """
    datasets: list[Dataset] = Field(default_factory=list)
    """the folders of clips; --data DIR is a list of one"""
    prior_preservation: str | None = data(None, min_length=1)
    """a folder of clips at which the base model's predictions stay: short for a dataset
    of kind regularization
    """
    cache_dir: str | None = safe(None, min_length=1)
    """where encoded clips and captions are kept: a folder, or s3://BUCKET/FOLDER to share
    them between machines (default: .videotune-cache in or beside the first dataset)
    """
    object_cache_gb: float = safe(50.0, gt=0, le=1e6)
    """gigabytes of this disk, at most, for clips of datasets on an object store (s3://),
    and as many for entries of a cache there; what was read longest ago is removed
    """

    steps: int = checked(2000, ge=1, le=10**9)
    """optimizer steps"""
    epochs: float | None = checked(None, gt=0, le=10**6)
    """passes over the data instead of steps"""
    batch_size: int = checked(1, ge=1, le=65_536)
    """samples of one forward pass"""
    gradient_accumulation_steps: int = checked(1, ge=1, le=65_536)
    """forward passes summed into one update"""
    micro_batch_size: int | None = safe(None, ge=1)
    """samples of a forward pass, at most; the step stays the same (default: as many of
    batch_size as fit)
    """
    shuffle: bool = fatal(True)
    """false: each bucket in path order"""
    seed: int = fatal(0, ge=0)
    """the random seed of the run"""
    deterministic: bool = safe(False)
    """kernels that give the same bits every time; steps may take longer (a CPU gives
    them anyway)
    """
    resolution: Resolution | None = data(None)
    """R: about R×R pixels at each clip's own aspect; "HxW"; or a list (default: the
    family's)
    """
    width: Side = data(None)
    """with height: resolution, each side named"""
    height: Side = data(None)
    """with width: resolution, each side named"""
    allow_crop: bool = safe(False)
    """train although more than half of every clip is cropped away"""
    resize: Literal["center", "random", "pad", "stretch"] = data("center")
    """how frames are resized: centre crop, random crop, black borders (pad), or stretch
    """
    video_config: VideoConfig = Field(default_factory=VideoConfig)
    """frames"""

    experts: Literal["both", "high", "low"] | None = fatal(None)
    """of a model with two experts, for high noise and for low, which train (default:
    both)
    """
    expert_share: Share | None = fatal(None)
    """share of the steps that the expert for high noise trains (default: its share of
    the draws)
    """
    expert_period: int = fatal(50, ge=1, le=10**9)
    """steps in a row that one expert trains before the other is loaded"""

    lora: Lora = Field(default_factory=Lora)
    """the adapter"""
    transformer: Transformer = Field(default_factory=Transformer)
    """the denoiser"""
    text_encoder: TextEncoder = Field(default_factory=TextEncoder)
    """the text encoder"""
    vae: Vae = Field(default_factory=Vae)
    """the VAE"""
    embedding: Embedding = Field(default_factory=Embedding)
    """new tokens"""
    optimizer: Annotated[Optimizer, short_for(str, lambda name: {"name": name})] = (
        Field(default_factory=Optimizer)
    )
    """the optimizer"""
    learning_rate: float = override(1e-4, gt=0)
    """the peak rate (default for FINE_TUNE: 1e-5, for EMBEDDING: 1e-3; for PRODIGY: 1,
    times what it finds)
    """
    embedding_learning_rate: float | None = override(None, gt=0)
    """EMBEDDING: the peak learning rate of the new token embeddings, instead of
    learning_rate
    """
    learning_rate_low: float | None = override(None, gt=0)
    """of the expert for low noise, where there are two (default: learning_rate)"""
    learning_rate_scheduler: Decay = override("CONSTANT")
    """learning rate schedule after the warm-up; WSD: constant, then a fall over the
    last steps; REX: slow, then fast
    """
    learning_rate_min: float = override(
        0.0, ge=0, goes_with=("learning_rate_scheduler", FALLING)
    )
    """the rate at which the schedule ends; of a group with another peak in proportion
    """
    learning_rate_cycles: int = override(
        1, ge=1, goes_with=("learning_rate_scheduler", ("COSINE_RESTARTS",))
    )
    """COSINE_RESTARTS: number of cosine cycles"""
    learning_rate_power: float = override(
        1.0, gt=0, goes_with=("learning_rate_scheduler", ("POLYNOMIAL",))
    )
    """POLYNOMIAL: the power of the share of the steps that is left; 1: LINEAR"""
    learning_rate_decay_steps: int | None = override(
        None, ge=1, goes_with=("learning_rate_scheduler", ("WSD",))
    )
    """WSD: number of the last steps, in which the rate falls (default: 20 % of the
    steps)
    """
    learning_rate_timescale: int | None = override(
        None, ge=1, goes_with=("learning_rate_scheduler", ("INVERSE_SQRT",))
    )
    """INVERSE_SQRT: steps after the warm-up in which the rate falls to 0.71 of the peak
    (default: the warm-up, or 10000)
    """
    warmup_steps: int | None = override(None, ge=0)
    """linear warm-up (default: 5 % of the steps, at most 100)"""
    ema: Annotated[Ema, short_for(float, lambda decay: {"decay": decay})] = Field(
        default_factory=Ema
    )
    """an average of the weights"""
    max_grad_norm: float = override(1.0, gt=0)
    """the gradient is clipped to this norm, once a step"""
    out_of_memory: Literal["stop", "retry"] = safe("stop")
    """where a step does not fit: stop: save the state and end; retry: once, with a
    remedy that changes no result
    """
    train_dtype: Dtype | None = fatal(None)
    """dtype of the frozen weights and activations (default: BFLOAT_16 on CUDA, FLOAT_16
    on a CUDA card without bfloat16, FLOAT_32 on a CPU)
    """
    weight_dtype: WeightDtype = fatal("auto")
    """dtype of the blocks' frozen weights (auto: train_dtype); FLOAT_8, INT_8,
    NFLOAT_4: rounded, so another base
    """
    gradient_checkpointing: Checkpointing | None = safe(None)
    """ON: recompute blocks in backward; ATTENTION_SAVED: but not attention;
    CPU_OFFLOADED: their inputs wait on the host too; IN_PARTS: and a block is
    recomputed part by part (default: fastest that fits)
    """
    layer_offload_fraction: Share | None = safe(None)
    """share of the blocks whose weights are streamed from the host (default: the
    fastest that fits, 0 where all do)
    """
    attention: Attention = safe("auto")
    """diffusers' name of what computes attention (auto: on a GPU the fastest of those
    installed, measured; else native)
    """
    compile: bool | Literal["auto"] = safe("auto")
    """compile each kind of block (auto: on a GPU, where the planned run saves more time
    than that takes)
    """
    cuda_graphs: bool | Literal["auto"] = safe("auto")
    """start a pass's kernels all at once, as a CUDA graph (auto: on a CUDA GPU, with
    settings that allow it)
    """
    sharding: Annotated[Literal["OFF", "FULL"], BeforeValidator(word)] = safe("OFF")
    """of several processes: FULL: each keeps a part of the denoiser's weights, and of
    what trains of them
    """
    context_parallel: int = safe(1, ge=1)
    """processes that share each sample, by its tokens (divides the number of processes)"""
    timestep_distribution: Timesteps | None = override(None)
    """how noise levels are drawn (default: the family's)"""
    timestep_shift: Annotated[float, Field(gt=0)] | Literal["resolution"] | None = (
        override(None)
    )
    """moves the draws toward noise; resolution: by each bucket's tokens, if published
    (default: the family's)
    """
    timestep_mean: float | None = override(
        None, goes_with=("timestep_distribution", ("LOGIT_NORMAL",))
    )
    """LOGIT_NORMAL: mean of logit(t) before the shift (default: 0)"""
    timestep_std: float | None = override(
        None, gt=0, goes_with=("timestep_distribution", ("LOGIT_NORMAL",))
    )
    """LOGIT_NORMAL: its standard deviation (default: 1)"""
    timestep_scale: float | None = override(
        None, goes_with=("timestep_distribution", ("SIGMOID", "MODE"))
    )
    """SIGMOID: the spread (default: 1); MODE: weight of the middle, from -1 to 1.75
    (default: 1.29)
    """
    timestep_alpha: float | None = override(
        None, gt=0, goes_with=("timestep_distribution", ("BETA",))
    )
    """BETA: the first of its numbers (default: 2)"""
    timestep_beta: float | None = override(
        None, gt=0, goes_with=("timestep_distribution", ("BETA",))
    )
    """BETA: the second; the larger, the less noise (default: 2)"""
    timestep_min: Share = override(0.0)
    """noise levels below it are not trained; the distribution is truncated"""
    timestep_max: Share = override(1.0)
    """noise levels from it on are not trained; 1: no limit"""
    timestep_stratified: bool = override(False)
    """the samples of a step draw from equal parts of the distribution, one each"""
    loss: Literal["mse", "huber", "pseudo_huber"] = override("mse")
    """what an error costs: its square; huber, pseudo_huber: beyond loss_delta in
    proportion to it
    """
    loss_delta: float = override(
        0.1, gt=0, goes_with=("loss", ("huber", "pseudo_huber"))
    )
    """huber, pseudo_huber: the error about which the square gives way"""
    distilled_guidance: float | None = override(None, gt=1, le=100)
    """guidance scale that the base model was distilled with: the target then keeps its
    guidance, which plain clips would train away; costs two passes of the base model a
    step
    """
    generate: (
        Annotated[
            list[Literal["video", "sound"]],
            Field(min_length=1),
            short_for(str, lambda value: [value]),
        ]
        | None
    ) = fatal(None)
    """models that make sound: what is learnt, [video, sound] or one of them, which the
    other is given to as a clean condition (default: the video alone, without sound)
    """
    sound: SoundConfig = Field(default_factory=SoundConfig)
    """the clips' sound"""
    loss_mask: LossMask = Field(default_factory=LossMask)
    """weights of the loss by each clip's mask"""
    loss_weighting: Literal["none", "min_snr"] = override("none")
    """weight of each noise level; flow takes none"""
    loss_weighting_gamma: float = override(
        5.0, gt=0, goes_with=("loss_weighting", ("min_snr",))
    )
    """min_snr: the signal-to-noise ratio from which on it caps"""
    caption_dropout: Share = override(0.1)
    """share of samples trained with the empty caption (default for EMBEDDING: 0)"""
    first_frame_probability: Share | None = override(None)
    """share of samples conditioned on their clip's first frame (default: the family's)
    """
    conditions: list[Condition] = override([])
    """[{"type", "probability", "latent_frames"}]: parts of the clip that are given clean:
    last_frame, prefix, suffix, mask, or files beside it: reference, control;
    first_frame is first_frame_probability
    """
    missing_caption: Literal["error", "skip", "empty", "text"] = data("error")
    """what a clip without a caption does; text: it takes missing_caption_text"""
    missing_caption_text: str | None = data(None, min_length=1)
    """the caption of clips that have none"""
    caption_lines: Literal["variants", "join"] = data("variants")
    """how a caption file of several lines is read; variants: each line is a caption;
    join: all lines are one caption
    """
    dataloader_threads: int = safe(2, ge=0, le=256)
    """threads that decode clips and read batches ahead; 0: none"""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = data(0.1)
    """share of source videos kept aside for checking, from 20 source videos up"""
    validate_every: int | None = safe(None, ge=0)
    """steps between validations; 0: never (default: such that validation takes 4.5 % of
    the run)
    """
    validate_every_epochs: float | None = safe(None, gt=0)
    """passes over the data between validations, instead of validate_every"""
    validation_windows: int | None = safe(None, ge=3)
    """number of windows that a validation reads, a third of them of training clips
    (default: 6 to 24)
    """
    early_stopping: int | None = safe(None, ge=1)
    """number of verdicts OVERFITTING in a row that end the run; the best checkpoint is
    exported (default: never)
    """
    save_every: int = safe(250, ge=0)
    """steps between checkpoints; 0: only at the end"""
    save_every_epochs: float | None = safe(None, gt=0)
    """passes over the data between checkpoints, instead of save_every"""
    save_keep: int | None = safe(None, ge=1)
    """number of newest checkpoints to keep, beside the best one (default: all)"""
    backup_after: float = safe(30.0, ge=0)
    """minutes after the last checkpoint at which a backup is saved; 0: never"""
    backup_every: int = safe(0, ge=0)
    """steps between backups; 0: only by backup_after"""
    backup_keep: int = safe(2, ge=1)
    """number of newest backups to keep"""
    sample_after: int | None = safe(None, ge=0)
    """steps between previews, step 0 too; 0: never (default: such that monitoring as a
    whole takes 8 % of the run)
    """
    sample_after_epochs: float | None = safe(None, gt=0)
    """passes over the data between previews, instead of sample_after"""
    samples: Annotated[
        Annotated[int, Field(ge=0)] | list[str | Prompt],
        short_for(str, lambda value: [value]),
    ] = safe(2)
    """prompts of the previews (text, or {prompt, negative, seed …}), a file of them, or
    how many captions to take
    """
    sample: Sample = Field(default_factory=Sample)
    """how previews are sampled"""
    trackers: Annotated[list[TrackerName], short_for(str, lambda value: [value])] = (
        safe([])
    )
    """curves, validations and previews for tensorboard, wandb, trackio or mlflow too,
    or for a list of them
    """
    tracker_project: str = safe("videotune", pattern=r"^[\w.-]{1,64}$")
    """the project (MLflow: the experiment) under which trackers list the run"""
    sample_metrics: SampleMetrics = Field(default_factory=SampleMetrics)
    """small samples that are measured at checkpoints"""
    forgetting: Forgetting = Field(default_factory=Forgetting)
    """what the training costs the base model"""

    output_model_destination: str | None = safe(None, min_length=1)
    """folder of the exported LoRA (default: RUN/export)"""
    output_model_format: (
        ExportFormat | Annotated[list[ExportFormat], Field(min_length=1)] | None
    ) = safe(None)
    """diffusers, comfyui, peft, or a list of them (default: diffusers and comfyui, as far
    as the model and the method have them, else peft)
    """
    output_dtype: ExportDtype | None = safe(None)
    """dtype of exported weights (default: adapters FLOAT_32, models train_dtype; merged
    models keep the base's)
    """
    push_to: str | None = safe(None, pattern=r"^\w[\w.-]*(/\w[\w.-]*)?$", max_length=96)
    """id of a repository of the Hugging Face Hub, made private, to which the end of the
    run uploads the exports
    """
    push_checkpoints_to: str | None = safe(
        None, pattern=r"^\w[\w.-]*(/\w[\w.-]*)?$", max_length=96
    )
    """id of a repository of the Hub, made private, to which each checkpoint is uploaded
    beside the training, to resume from elsewhere
    """
    push_checkpoints_keep: int = safe(1, ge=1, le=100)
    """number of newest checkpoints that stay in that repository"""
    notify: Annotated[list[NotifyAddress], short_for(str, lambda value: [value])] = (
        safe([], max_length=10)
    )
    """where messages about the run go: names of environment variables that hold URLs of
    Apprise, or such URLs
    """
    notify_on: Annotated[
        list[NotifyEvent],
        Field(min_length=1),
        short_for(str, lambda value: [value]),
    ] = safe(["done", "failed", "stopped", "verdict"])
    """what a message is sent for; verdict: another verdict than before, such as
    OVERFITTING
    """

    @property
    def condition_shares(self) -> dict[str, float]:
        """Share of the samples that have each condition, by its type."""
        shares: dict[str, float] = {}
        for condition in self.conditions:
            shares[condition.type] = condition.probability
        shares["first_frame"] = self.first_frame_probability or 0.0
        return shares

    @property
    def condition_types(self) -> frozenset[str]:
        """Types of the conditions that some samples have."""
        types = {condition.type for condition in self.conditions}
        return frozenset(
            types | {"first_frame"} if self.first_frame_probability else types
        )

    @property
    def reads_sound(self) -> bool:
        """Whether samples have the sound of their clips."""
        return self.generate is not None

    @property
    def learns_sound(self) -> bool:
        """Whether the sound is learnt."""
        return self.generate is not None and "sound" in self.generate

    @property
    def learns_video(self) -> bool:
        """Whether the video is learnt."""
        return self.generate is None or "video" in self.generate

    @property
    def trains_connectors(self) -> bool:
        """Whether an adapter trains on the networks between text encoder and denoiser,
        which then run in the step.
        """
        return self.training_method == "LORA" and self.lora.names_connectors

    @property
    def text_in_step(self) -> bool:
        """Whether text is encoded in the step, because its encoder trains.

        The cache then holds only latents.
        """
        return self.training_method == "EMBEDDING" or self.text_encoder.train


def leaves(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key of the config by its dotted name, with its pydantic field."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= leaves(kind, f"{prefix}{name}.")
        elif name == "datasets":
            fields |= {
                f"datasets.{key}": value for key, value in Dataset.model_fields.items()
            }
        else:
            fields[f"{prefix}{name}"] = field
    return fields
