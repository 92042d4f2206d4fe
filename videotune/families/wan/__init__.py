"""Wan 2.1 and 2.2 (Wan team 2025, arXiv 2503.20314): flow matching, UMT5 text, a causal video VAE.

2.1 from text (1.3B, 14B) and from an image (14B), 2.2 TI2V-5B from either, 2.2 A14B from text and from an image, with an
expert for high noise and one for low.
"""

from videotune.families.wan.facts import SPEC, read_spec
from videotune.families.wan.model import Wan, open_family
from videotune.families.wan.nets import native, token_lengths
from videotune.families.wan.tiny import VARIANTS, oracle, tiny

__all__ = ["SPEC", "VARIANTS", "Wan", "native", "open_family", "oracle", "read_spec", "tiny", "token_lengths"]
