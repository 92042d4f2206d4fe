"""Sound of LTX-2: what acts on it, its spectrogram, and its autoencoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch, transformers
from videotune.model_spec import SoundRules
from videotune.models.loading import load_model
from videotune.models.model_files import model_parts, read_config

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.types import ClipShape, Networks

AUDIO_VAE = "audio_vae"
VOCODER = "vocoder"
"""Folders of the parts that encode and decode sound."""

VOCODERS = ("LTX2Vocoder", "LTX2VocoderWithBWE")
"""Classes of the vocoder, in diffusers."""

WINDOW = 1024
"""Numbers of a window of the spectrogram. No config of diffusers says it; it is that of
the authors' trainer.
"""

QUIETEST = 1e-5
"""Magnitudes below it count as it."""

LATENT_STRIDE = 4
"""Windows of a latent, and bands of the spectrogram in one of its rows. No config says
it.
"""

LEAST_LATENTS = 4
MOST_LATENTS = 200
"""Latents a second of a model that can be one of this family."""

_TO = r"(to_q|to_k|to_v|to_out\.0)"
_FEED_FORWARD = r"(net\.0\.proj|net\.2)"

SOUND_TARGETS = (
    rf"transformer_blocks\.\d+\.audio_attn[12]\.{_TO}",
    rf"transformer_blocks\.\d+\.audio_ff\.{_FEED_FORWARD}",
)
"""Linear modules of the sound alone."""

CROSS_MODAL_TARGETS = (
    rf"transformer_blocks\.\d+\.(audio_to_video|video_to_audio)_attn\.{_TO}",
)
"""Those with which the sound attends to the video, and the video to the sound."""

TARGETS_WITH_SOUND = {
    "attention": (
        rf"transformer_blocks\.\d+\.(audio_)?attn[12]\.{_TO}",
        *CROSS_MODAL_TARGETS,
    ),
    "feed_forward": (rf"transformer_blocks\.\d+\.(audio_)?ff\.{_FEED_FORWARD}",),
    "linear": (
        rf"transformer_blocks\.\d+\.(audio_)?attn[12]\.{_TO}",
        *CROSS_MODAL_TARGETS,
        rf"transformer_blocks\.\d+\.(audio_)?ff\.{_FEED_FORWARD}",
    ),
    "self_attention": (rf"transformer_blocks\.\d+\.(audio_)?attn1\.{_TO}",),
    "cross_attention": (rf"transformer_blocks\.\d+\.(audio_)?attn2\.{_TO}",),
}
"""Presets of targets of a run with sound, where they are others than without."""

KEYFRAMES = "keyframes_abs_pos"
"""The embedding of keyframes, which none of the pipelines used here applies."""

SOUND_PATHS = (
    r"((transformer_blocks\.\d+\.)?"
    f"(audio_|video_to_audio|video_a2v|av_cross_attn|{KEYFRAMES})"
    r"|connectors\.audio_connector\.)"
)
"""Modules and parameters that act on sound or between sound and video, and the embedding
of keyframes.
"""


def sound_rules(folder: Path, transformer: Mapping[str, Any]) -> SoundRules:
    """Return how a checkpoint takes and makes sound.

    Args:
        folder: the checkpoint.
        transformer: the config of its transformer.

    Raises:
        VideotuneError: if the sound's VAE and the transformer do not fit together.
    """
    config = read_config(folder / AUDIO_VAE / "config.json")
    rate = config.get("sample_rate", 16000)
    hop = config.get("mel_hop_length", 160)
    channels = transformer.get("audio_in_channels", 128)
    latent_rows = config.get("mel_bins", 64) // LATENT_STRIDE
    encoded = config["latent_channels"] * latent_rows
    if encoded != channels:
        raise VideotuneError(
            f"{folder} mixes two models: its audio_vae gives {encoded} numbers a latent, its "
            f"transformer takes {channels}. Take both parts from one checkpoint."
        )
    latents_per_second = rate / hop / LATENT_STRIDE
    if not LEAST_LATENTS <= latents_per_second <= MOST_LATENTS:
        raise VideotuneError(
            f"{folder / AUDIO_VAE / 'config.json'}: {latents_per_second:g} latents of sound a second; "
            "the published models have 25"
        )
    return SoundRules(
        sample_rate=rate,
        latents_per_second=latents_per_second,
        channels=channels,
        lora_targets=TARGETS_WITH_SOUND,
        modules=(SOUND_PATHS,),
        idle_paths=idle_paths(transformer["num_layers"]),
    )


def idle_paths(blocks: int) -> dict[str, tuple[str, ...]]:
    """Return what has no effect in a step with sound, by what is learnt.

    The output of what is given is not read, so neither is what only leads to it. In the
    last block that is what comes after the two attentions between video and sound: the
    attentions before still lead to the other modality.
    """
    last = rf"transformer_blocks\.{blocks - 1}\."
    of_sound = ("audio_proj_out", "audio_norm_out", "audio_scale_shift_table")
    of_video = ("proj_out", "norm_out", "scale_shift_table")
    return {
        "video and sound": (KEYFRAMES,),
        "video": (
            KEYFRAMES,
            *of_sound,
            rf"{last}(audio_ff|audio_norm3|video_to_audio_attn)\.",
        ),
        "sound": (
            KEYFRAMES,
            *of_video,
            rf"{last}(ff|norm3|audio_to_video_attn)\.",
        ),
    }


def log_mel(waveform: Tensor, rate: int, hop: int, bands: int) -> Tensor:
    """Return the log-mel spectrogram (2,windows,bands) of a waveform (2,n).

    As the authors' trainer makes it: magnitudes of Hann windows, centred and mirrored at
    the ends, in Slaney's bands with Slaney's norm.
    """
    # Mirroring needs more than half a window.
    missing = max(0, WINDOW - waveform.shape[-1])
    waveform = torch.nn.functional.pad(waveform, (0, missing))
    spectrum = torch.stft(
        waveform,
        WINDOW,
        hop,
        window=torch.hann_window(WINDOW, device=waveform.device),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    filters = transformers.audio_utils.mel_filter_bank(
        num_frequency_bins=WINDOW // 2 + 1,
        num_mel_filters=bands,
        min_frequency=0.0,
        max_frequency=rate / 2,
        sampling_rate=rate,
        norm="slaney",
        mel_scale="slaney",
    )
    bank = torch.from_numpy(filters).to(spectrum.device, torch.float32)
    mel = spectrum.abs().transpose(1, 2) @ bank
    return mel.clamp(min=QUIETEST).log()


def load_audio_vae(folder: Path, device: torch.device) -> Any:
    """Load the sound's VAE in float32.

    Raises:
        VideotuneError: if it has no statistics of its latents, which diffusers would take
            for 0 and 1.
    """
    cls = diffusers.AutoencoderKLLTX2Audio
    vae: Any = load_model(cls, folder / AUDIO_VAE, torch.float32, device)
    if not vae.latents_mean.any() and bool((vae.latents_std == 1).all()):
        raise VideotuneError(
            f"{folder / AUDIO_VAE}: its weights lack latents_mean and latents_std, which "
            "normalise the latents. Take the file that comes with the checkpoint"
        )
    return vae


def load_vocoder(folder: Path, device: torch.device) -> Any:
    """Load what makes a waveform of a spectrogram, in float32.

    Raises:
        VideotuneError: if the checkpoint has none that is known.
    """
    index = folder / "model_index.json"
    _, name = model_parts(read_config(index)).get(VOCODER, ("", ""))
    if name not in VOCODERS:
        raise VideotuneError(
            f"{index}: {VOCODER} is {name or 'missing'}; LTX-2 has {' or '.join(VOCODERS)}"
        )
    check_vocoder(folder, name)
    cls = getattr(diffusers.pipelines.ltx2, name)
    return load_model(cls, folder / VOCODER, torch.float32, device)


def check_vocoder(folder: Path, name: str) -> None:
    """Raise VideotuneError for a vocoder that does not keep the time of a spectrogram:
    it makes a certain count of numbers of each of its windows.
    """
    path = folder / VOCODER / "config.json"
    config = read_config(path)
    spectrogram = read_config(folder / AUDIO_VAE / "config.json")
    hop = spectrogram.get("mel_hop_length", 160)
    rate = spectrogram.get("sample_rate", 16000)

    factors = config.get("upsample_factors", [])
    made_rate = config.get("output_sampling_rate", 24000)
    if name == VOCODERS[1]:
        made_rate = config.get("input_sampling_rate", 16000)
        widening = math.prod(config.get("bwe_upsample_factors", []))
        wanted = config.get("hop_length", 80) * config.get(
            "output_sampling_rate", 48000
        )
        if widening * made_rate != wanted:
            raise VideotuneError(
                f"{path}: bwe_upsample_factors do not lead from input_sampling_rate to "
                "output_sampling_rate. Take the file that comes with the checkpoint"
            )
    if math.prod(factors) * rate != hop * made_rate:
        raise VideotuneError(
            f"{path}: upsample_factors do not lead from the spectrogram's rate to the sound's. "
            "Take the file that comes with the checkpoint"
        )


def encode_waveform(
    vae: Any, waveform: Tensor, rules: SoundRules, shape: ClipShape
) -> Tensor:
    """Encode a waveform (2,n) to normalised latents (C,L), float32.

    The VAE gives a latent more than the pipeline draws for some lengths; it is cut off.
    """
    config = vae.config
    mel = log_mel(waveform, config.sample_rate, config.mel_hop_length, config.mel_bins)
    latents = vae.encode(mel[None]).latent_dist.mode()[0]  # (channels, windows, rows)
    tokens = latents.transpose(0, 1).flatten(1)  # (windows, C)
    tokens = (tokens - vae.latents_mean) / vae.latents_std

    count = rules.latents(shape)
    assert len(tokens) >= count, f"{len(tokens)} latents of sound for {count}"
    normalised: Tensor = tokens[:count].T.float()
    return normalised


def decode_waveform(vae: Any, vocoder: Any, latents: Tensor) -> Tensor:
    """Decode normalised latents (C,L) to a waveform (2,n) in [-1, 1], float32."""
    tokens = latents.T * vae.latents_std + vae.latents_mean
    rows = vae.config.mel_bins // LATENT_STRIDE
    spectrum = tokens.unflatten(1, (-1, rows)).transpose(0, 1)
    mel = vae.decode(spectrum[None], return_dict=False)[0]
    waveform: Tensor = vocoder(mel)[0].clamp(-1, 1).float()
    return waveform


class GivenNetworks(Mapping[str, Any]):
    """Networks that are always fed the clean latents of what samples are given.

    A pipeline noises and denoises both video and sound. What the networks read of the
    given one is clean here, at timestep 0, as in training.

    Args:
        nets: the networks.
        video: tokens (B,S,C) of the given video. None: it is drawn.
        sound: tokens (B,L,C) of the given sound. None: it is drawn.
    """

    def __init__(
        self, nets: Networks, video: Tensor | None, sound: Tensor | None
    ) -> None:
        self.nets = nets
        self.video = video
        self.sound = sound

    def __getitem__(self, name: str) -> Any:
        return _GivenNetwork(self.nets[name], self.video, self.sound)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nets)

    def __len__(self) -> int:
        return len(self.nets)


class _GivenNetwork:
    """A network, see ``GivenNetworks``."""

    def __init__(self, net: Any, video: Tensor | None, sound: Tensor | None) -> None:
        self.net = net
        self.video = video
        self.sound = sound

    def __call__(self, **inputs: Any) -> Any:
        timestep = inputs["timestep"]
        sigma = inputs["sigma"]
        inputs["audio_timestep"] = inputs.get("audio_timestep", timestep)
        inputs["audio_sigma"] = inputs.get("audio_sigma", sigma)
        if self.video is not None:
            tokens = inputs["hidden_states"]
            inputs["hidden_states"] = _repeated(self.video, tokens)
            inputs["timestep"] = torch.zeros_like(timestep)
            inputs["sigma"] = torch.zeros_like(sigma)
        if self.sound is not None:
            tokens = inputs["audio_hidden_states"]
            inputs["audio_hidden_states"] = _repeated(self.sound, tokens)
            inputs["audio_timestep"] = torch.zeros_like(inputs["audio_timestep"])
            inputs["audio_sigma"] = torch.zeros_like(inputs["audio_sigma"])
        return self.net(**inputs)

    def cache_context(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Return the network's own."""
        context: AbstractContextManager[Any] = self.net.cache_context(*args, **kwargs)
        return context


def _repeated(clean: Tensor, tokens: Tensor) -> Tensor:
    """Return given tokens for a batch: with guidance it has each sample twice."""
    return clean.to(tokens).repeat(len(tokens) // len(clean), 1, 1)


def to_tokens(latents: Tensor) -> Tensor:
    """Return latents (B,C,…) as tokens (B,S,C)."""
    return latents.flatten(2).transpose(1, 2)
