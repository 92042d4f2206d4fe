"""What is true of a HiDream-I1 checkpoint, read from its configs without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.families.find import read_config
from videotune.families.parts import model_parts
from videotune.families.text import count_tokens
from videotune.types import Expert, FamilySpec, VideoRules

ENCODERS = {
    "text_encoder": ("tokenizer", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("tokenizer_2", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("tokenizer_3", "T5EncoderModel"),
    "text_encoder_4": ("tokenizer_4", "LlamaForCausalLM"),
}
"""The folder of each text encoder, its tokenizer's, and its class in transformers: CLIP-L, CLIP-G, T5-XXL, Llama 3.1 8B."""

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
"""The fourth text encoder, which HiDream's own repositories leave out."""

_BLOCKS = r"(double|single)_stream_blocks\.\d+\.block\."
ATTENTION = (_BLOCKS + r"attn1\.(to_q|to_k|to_v|to_out)(_t)?",)
FEED_FORWARD = (_BLOCKS + r"(ff_i\.shared_experts|ff_t)\.(w1|w2|w3)",)
ROUTED = (_BLOCKS + r"ff_i\.experts\.\d+\.(w1|w2|w3)",)

DISTILLED = "FlowMatchLCMScheduler"
"""The scheduler of Dev and Fast, which draw without guidance."""

SPEC = FamilySpec(
    name="hidream",
    aliases=("HiDreamImagePipeline", "hidream-i1", "hidream-i1-full", "hidream-i1-dev", "hidream-i1-fast"),
    title="HiDream-I1 Full",
    path="flow",
    rules=VideoRules(0, 1, 16, 1.0, 8, 1, most_frames=1, most_area=1024 * 1024),
    latent_channels=16,
    patch=(1, 2, 2),
    text_tokens=128,
    text_width=4096,
    given="none",
    experts=(Expert("transformer"),),
    blocks=("double_stream_blocks", "single_stream_blocks"),
    lora_targets={
        "attention": ATTENTION,
        "feed_forward": FEED_FORWARD,
        "experts": ROUTED,
        "linear": ATTENTION + FEED_FORWARD,
        "all": (_BLOCKS + ".+",),
    },
    default_resolution=1024,
    timestep_distribution="LOGIT_NORMAL",
    timestep_shift=3.0,
    sample_steps=50,
    sample_guidance=5.0,
    fp16_safe=False,
    licence="MIT (its text encoder Llama 3.1: Llama 3.1 Community License)",
    sample_shape=(1, 1024, 1024),
    keeps_variance=True,
    text_extras=32 * 128 * 4096 + 2048,
    padded_tokens=4096,
)


def read_spec(folder: Path) -> FamilySpec:
    """The facts of a checkpoint from its own configs, without torch.

    Its rate of 1 means that of a clip a frame a second is shown. Full, Dev and Fast have one network; they are told apart
    by their schedulers: Dev and Fast are drawn without guidance, at the shifts 6 and 3, in 28 and 16 steps.

    Raises VideotuneError for a checkpoint without its fourth text encoder, and for one whose parts do not fit.
    """
    index = read_config(folder / "model_index.json")
    _refuse_without_llama(folder, model_parts(index))
    net, vae = (read_config(folder / part / "config.json") for part in ("transformer", "vae"))
    if net["in_channels"] != vae["latent_channels"]:
        raise VideotuneError(
            f"{folder}: its transformer reads {net['in_channels']} channels, and its VAE's latents have "
            f"{vae['latent_channels']}: it is a variant of HiDream-I1 (E1 edits images) that videotune does not know"
        )
    scheduler = read_config(folder / "scheduler" / "scheduler_config.json")
    shift = float(scheduler.get("flow_shift", scheduler.get("shift", SPEC.timestep_shift)))
    fast, distilled = shift < 4, scheduler.get("_class_name") == DISTILLED
    stride, patch = 2 ** (len(vae["block_out_channels"]) - 1), net["patch_size"]
    rows, columns = net["max_resolution"]
    most, side = rows * columns // patch**2, stride * patch
    area = most * side**2
    longest = round(area**0.5) // side * side
    width, layers = net["caption_channels"][1], max(net["llama_layers"]) + 1
    return replace(
        SPEC,
        title=f"HiDream-I1 {'Full' if not distilled else 'Fast' if fast else 'Dev'}",
        rules=VideoRules(0, 1, side, SPEC.rules.fps, stride, 1, most_frames=1, most_area=area),
        latent_channels=vae["latent_channels"],
        patch=(1, patch, patch),
        text_width=net["caption_channels"][0],
        default_resolution=longest,
        timestep_shift=shift,
        sample_steps=SPEC.sample_steps if not distilled else 16 if fast else 28,
        sample_guidance=1.0 if distilled else SPEC.sample_guidance,
        sample_shape=(1, longest, longest),
        text_extras=layers * SPEC.text_tokens * width + net["text_emb_dim"],
        padded_tokens=most,
    )


def _refuse_without_llama(folder: Path, parts: dict[str, tuple[str, str]]) -> None:
    """VideotuneError that says where Llama comes from, for a checkpoint that has text encoders but not that one."""
    if "text_encoder" in parts and "text_encoder_4" not in parts:
        raise VideotuneError(
            f"{folder} has no text_encoder_4: HiDream-I1 reads captions with {LLAMA} too, whose licence you accept on "
            "its own page, and whose weights HiDream's repositories leave out. Fetch both, and join them into a folder "
            "that takes no room: python -m videotune.families.hidream HIDREAM_FOLDER LLAMA_FOLDER NEW_FOLDER; then "
            "base_model_name=NEW_FOLDER"
        )


def token_lengths(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """The most tokens that any of the tokenizers makes of each caption, marks included, without torch.

    None without a tokenizer.json of T5 and of Llama; CLIP's counts where it has one.
    """
    flat = [" ".join(caption.split()) for caption in captions]  # T5's tokenizer takes any white space for one space
    folders = [folder / tokenizer for tokenizer, _ in ENCODERS.values()]
    counts = [count_tokens(place, flat if i == 2 else captions) for i, place in enumerate(folders)]
    if None in counts[2:]:
        return None
    return [max(each) for each in zip(*filter(None, counts), strict=True)] if captions else []
