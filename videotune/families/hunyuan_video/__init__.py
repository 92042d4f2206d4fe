"""HunyuanVideo 13B from text (Kong et al. 2024, arXiv 2412.03603): flow matching, guidance distilled, Llama and CLIP."""

from videotune.families.hunyuan_video.facts import SPEC, read_spec, token_lengths
from videotune.families.hunyuan_video.model import HunyuanVideo, open_family
from videotune.families.hunyuan_video.tiny import VARIANTS, oracle, tiny

__all__ = ["SPEC", "VARIANTS", "HunyuanVideo", "open_family", "oracle", "read_spec", "tiny", "token_lengths"]
