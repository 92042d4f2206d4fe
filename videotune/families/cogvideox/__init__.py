"""CogVideoX 2B, 5B and 1.5 5B (Yang et al. 2024, arXiv 2408.06072): v-prediction, T5 text, a causal video VAE.

From text, and from a first image whose latents stand beside the noisy ones on the channels.
"""

from videotune.families.cogvideox.facts import SPEC, read_spec
from videotune.families.cogvideox.model import CogVideoX, open_family
from videotune.families.cogvideox.tiny import VARIANTS, oracle, tiny
from videotune.families.text import token_lengths

__all__ = ["SPEC", "VARIANTS", "CogVideoX", "open_family", "oracle", "read_spec", "tiny", "token_lengths"]
