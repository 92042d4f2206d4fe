"""The base class of model families: the denoiser and the pipeline of a diffusers
checkpoint.

A family is a subclass that defines what differs. Each must define ``spec``,
``read_spec``, ``transformer_class``, ``vae_class``, ``pipelines``, ``variants`` and
``predict``; all else has a default. Shapes are those of
``videotune/types.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.models.frame_attention import isolate
from videotune.models.key_names import KeyRules, add_file_rules, rename_key
from videotune.models.model_files import read_config
from videotune.models.pipelines import (
    bare_pipeline,
    load_scheduler,
    network_stand_in,
    replace_scheduler,
)
from videotune.models.sample_groups import predict_in_groups
from videotune.models.text_encoding import TextEncodingCheckpoint
from videotune.models.tiny import build_pipeline
from videotune.types import Conditioning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.types import (
        Batch,
        Networks,
        SampleRequest,
        Velocity,
    )

FAMILIES: dict[str, type[DiffusersModel]] = {}
"""The family classes, by their names."""


class DiffusersModel(TextEncodingCheckpoint):
    """An opened checkpoint of a model family; the subclass is the family.

    Where code holds one, it is called ``family``: what it does is the family's, and its
    ``spec`` and weights are the checkpoint's.

    Methods that sample take ``nets``, the denoisers by expert. An expert is looked up at
    each of its steps, so the mapping may load it then.
    """

    series: ClassVar[str]
    """What people call all checkpoints of the family together.

    If it is not set, the title of ``spec``.
    """

    variants: ClassVar[tuple[str, ...]]
    """The kinds of checkpoint that ``tiny`` writes, the usual one first."""

    tiny_parts: ClassVar[Mapping[str, Any]] = {}
    """Configs of a tiny checkpoint, see ``tiny.build_pipeline``."""

    tiny_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """For each of ``variants`` the configs that differ from ``tiny_parts``."""

    comfyui_names: ClassVar[KeyRules] = ()
    """From a block module's path in diffusers to its name in ComfyUI, mostly the
    authors' name.
    """

    original_names: ClassVar[KeyRules | None] = None
    """From a parameter's name in diffusers to its name in the authors' checkpoints.

    None: such files are not written.
    """

    file_names: ClassVar[Sequence[KeyRules]] = ()
    """Rules of further layouts, in which single files are read only."""

    attention: ClassVar[str] = "attn1"
    """A block's attention over video tokens."""

    text_first: ClassVar[bool] = False
    """Whether the text's tokens come before the video's in ``attention``."""

    load_lora: ClassVar[str] = "pipe.load_lora_weights"
    """How code that samples with a pipeline ``pipe`` loads a LoRA file."""

    loads_comfyui_names: ClassVar[bool] = True
    """Whether that also reads files in ComfyUI's names."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """Keys that pipelines read and that older configs of the transformer lack."""

    no_cuda_graphs: ClassVar[str | None] = None
    """Why a pass of the network cannot be a CUDA graph. None: it can."""

    encoding: ClassVar[str] = ""
    """A name for how the VAE is called, if that is not diffusers' own way.

    It is in the names of cached latents, so those that were made otherwise are not used.
    """

    def __init_subclass__(cls) -> None:
        """Register a class that defines its own ``spec`` as a family.

        Raises:
            VideotuneError: if another family has the same name.
        """
        if "spec" not in vars(cls):
            return
        if "series" not in vars(cls):
            cls.series = cls.spec.title

        name = cls.spec.name
        existing = FAMILIES.setdefault(name, cls)
        if (existing.__module__, existing.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise VideotuneError(
                f"two families are named {name!r}: in {existing.__module__} and in "
                f"{cls.__module__}"
            )

        layouts = (*cls.file_names, cls.original_names or ())
        add_file_rules(cls.transformer_class, name, layouts)

    # the denoiser in training and in the pipeline

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v (B,C,F,H,W) float32 for noisy latents x_t at noise levels t (B,)."""
        raise NotImplementedError

    def predict_by_length(
        self,
        predict: Callable[[nn.Module, Tensor, Tensor, Batch], Tensor],
        net: nn.Module,
        x_t: Tensor,
        t: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Return v of all samples, predicted together where captions have one length.

        A network that reads text without a mask would take padding for text.

        Args:
            predict: returns v of samples whose captions have one length.
            net: the denoiser.
            x_t: noisy latents.
            t: noise levels (B,).
            batch: the samples.
        """
        lengths = batch.conditioning.text_lengths
        assert lengths is not None, "a batch has them with text_by_length in the spec"

        return predict_in_groups(partial(predict, net), lengths, x_t, t, batch)

    def predict_with_sound(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch, sound_x_t: Tensor
    ) -> Velocity:
        """Return v of the video and of the sound, float32.

        Args:
            net: the denoiser.
            x_t: noisy latents of the video.
            t: noise levels (B,) of the video.
            batch: the samples, with the noise levels of the sound.
            sound_x_t: noisy latents of the sound (B,C,L,1,1).
        """
        raise NotImplementedError

    def model_timesteps(self, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return the network's timestep input 1000 · t in float32.

        (B,), or (B,S) with one value a token if some cells are fed clean: 0 for their
        tokens. Models that read the image on channels ("concat") take one for all.
        """
        times = t.float() * 1000
        if self.spec.image_conditioning == "concat" or not batch.has_clean_frames:
            return times
        patch_frames, patch_rows, patch_columns = self.spec.patch
        cells = batch.conditioning_mask[:, 0].expand(-1, -1, *x_t.shape[3:])
        is_noisy = ~cells[:, ::patch_frames, ::patch_rows, ::patch_columns]
        return times[:, None] * is_noisy.flatten(1)

    def planning_mode(self) -> AbstractContextManager[Any]:
        """Return a context in which the network runs on fake tensors."""
        return nullcontext()

    def isolate_frames(self, net: nn.Module, on: bool) -> None:
        """Let video tokens attend only to their own latent frame and to the text, if
        ``on``.
        """
        isolate(net, self.video_attentions(net), on, self.token_frames, self.text_first)

    def video_attentions(self, net: nn.Module) -> list[nn.Module]:
        """Return the modules in which video tokens attend to each other."""
        attentions = []
        for name in self.spec.blocks:
            for block in net.get_submodule(name).children():
                attentions.append(getattr(block, self.attention))
        return attentions

    def token_frames(self, hidden_states: Tensor, **_: Any) -> int:
        """Return how many frames the video tokens have, from the transformer's inputs."""
        return hidden_states.shape[2] // self.spec.patch[0]

    def token_plan(self, net: Any) -> Mapping[str, Any]:
        """Return diffusers' plan of which tensors of a network are split by tokens over
        several processes, and which are gathered.
        """
        plan: Mapping[str, Any] = net._cp_plan
        return plan

    def scheduler(self, shift: float | None) -> Any:
        """Load the checkpoint's scheduler, with another timestep shift if one is
        passed.
        """
        return load_scheduler(self.folder, shift)

    def pipeline(
        self, nets: Networks, shift: float | None = None, cls: Any = None, **parts: Any
    ) -> Any:
        """Build the checkpoint's pipeline over ``nets``, without VAE and text encoders.

        Args:
            nets: denoisers by expert, looked up at each step.
            shift: timestep shift. None: the checkpoint's own.
            cls: class of the pipeline. None: ``pipeline_class()``.
            parts: further components.
        """
        for expert in self.spec.experts:
            part = self.spec.part_of(expert.name)
            config = {
                **self.config_defaults,
                **read_config(self.folder / part / "config.json"),
            }
            parts[part] = network_stand_in(
                nets, expert.name, config, dtype=self.dtype, device=self.device
            )

        cls = cls or self.pipeline_class()
        index = read_config(self.folder / "model_index.json")
        _, optional_names = cls._get_signature_keys(cls)
        # The index names components, as [library, class], and settings, as plain values.
        # Only the settings are taken: no optional component is needed here.
        settings = {
            name: index[name]
            for name in optional_names
            if name in index and not isinstance(index[name], list)
        }
        components = {"scheduler": self.scheduler(shift)} | settings | parts
        pipe = bare_pipeline(cls, **components)

        rules = self.spec.rules
        pipe.vae_scale_factor = rules.spatial_stride
        pipe.vae_scale_factor_spatial = rules.spatial_stride
        pipe.vae_scale_factor_temporal = rules.temporal_stride
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def prompt(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return a conditioning as arguments of the pipeline."""
        arguments = {"prompt_embeds": conditioning.text.to(self.device, self.dtype)}
        if conditioning.text_mask is not None:
            arguments["prompt_attention_mask"] = conditioning.text_mask.to(self.device)
        return arguments

    def sample(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> Tensor:
        """Sample normalised latents (B,C,F,H,W), float32, on the run's device.

        Args:
            nets: denoisers by expert.
            conditioning: the prompts, one per seed. If the family reads an image on
                extra channels, it is in the ``extras``, also in those of
                ``unconditional``.
            unconditional: the negative prompts, or None without guidance.
            request: shape, steps and seeds; noise is drawn on the CPU, with a generator
                per seed.
        """
        pipe = self.pipeline(nets, request.shift)
        return self.run_pipeline(pipe, conditioning, unconditional, request).float()

    def sample_with_sound(
        self,
        nets: Networks,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
    ) -> tuple[Tensor, Tensor]:
        """Sample the video, as ``sample`` does, and normalised latents (B,C,L) of its
        sound.
        """
        raise NotImplementedError

    def call_arguments(self, request: SampleRequest) -> dict[str, Any]:
        """Return size and guidance of a request as arguments of the pipeline's call."""
        return {
            "height": request.shape.height,
            "width": request.shape.width,
            "guidance_scale": request.guidance,
        }

    def run_pipeline(
        self,
        pipe: Any,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
        **arguments: Any,
    ) -> Tensor:
        """Return the latents that a pipeline samples.

        ``arguments`` are passed to the pipeline's call besides those that most
        pipelines take.
        """
        results = self.pipeline_results(
            pipe, conditioning, unconditional, request, **arguments
        )
        latents: Tensor = results[0]
        return latents

    def pipeline_results(
        self,
        pipe: Any,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        request: SampleRequest,
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """Return all that a pipeline samples, in latents, see ``run_pipeline``."""
        shape = request.shape
        self.check_shape(shape.frames, shape.height, shape.width)

        negative = {}
        if unconditional is not None:
            for name, value in self.prompt(unconditional).items():
                negative[f"negative_{name}"] = value

        usual: dict[str, Any] = {
            **self.call_arguments(request),
            "num_inference_steps": request.steps,
            "generator": [
                torch.Generator("cpu").manual_seed(seed) for seed in request.seeds
            ],
            "output_type": "latent",
            "return_dict": False,
        }
        if request.guidance_rescale:
            usual["guidance_rescale"] = request.guidance_rescale
        if request.scheduler is not None:
            replace_scheduler(
                pipe, request.scheduler, self.spec.prediction, usual["generator"]
            )
        accepted = signature(pipe.__call__).parameters
        if "num_frames" in accepted:
            usual["num_frames"] = shape.frames
        if "frame_rate" in accepted:
            usual["frame_rate"] = shape.fps

        results: tuple[Any, ...] = pipe(
            **self.prompt(conditioning), **(usual | negative | arguments)
        )
        return results

    # names in other programs

    def lora_formats(self) -> tuple[str, ...]:
        """Return the formats in which a LoRA of this checkpoint is written, sorted."""
        return ("comfyui", "diffusers")

    def to_comfyui_name(self, path: str) -> str:
        """Return ComfyUI's name of a block module in diffusers; several may share one."""
        return rename_key(path, self.comfyui_names)

    def original(self, name: str) -> str | None:
        """Return the authors' name of a parameter in diffusers, or None if it has none."""
        if self.original_names is None:
            return None
        return rename_key(name, self.original_names)

    def single_file_names(self) -> KeyRules | None:
        """Return the names of a transformer's weights in one file that ComfyUI reads,
        or None if no such layout is known.
        """
        if self.original_names is not None:
            return self.original_names
        return next(iter(self.file_names), None)

    # tiny checkpoints

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0, variant: str | None = None) -> Path:
        """Write a random checkpoint of about 50,000 parameters in the real layout.

        Args:
            folder: the new folder, which is also returned.
            seed: seed of the weights.
            variant: one of ``variants``. None: the usual one.
        """
        variant = variant or cls.variants[0]
        assert variant in cls.variants, (
            f"{variant!r} is none of {', '.join(cls.variants)}"
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            pipe = cls.tiny_pipeline(variant)
        pipe.save_pretrained(folder)
        return folder

    @classmethod
    def tiny_pipeline(cls, variant: str) -> Any:
        """Build a pipeline of tiny random networks for a kind of checkpoint."""
        return build_pipeline(cls.tiny_parts, cls.tiny_variants[variant])
