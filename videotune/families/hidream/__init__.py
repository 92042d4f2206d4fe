"""HiDream-I1 (17B; HiDream.ai 2025, arXiv 2505.22705): images by flow matching, routed experts, four text encoders."""

from videotune.families.hidream.facts import SPEC, read_spec, token_lengths
from videotune.families.hidream.model import HiDream, open_family
from videotune.families.hidream.tiny import VARIANTS, oracle, tiny

__all__ = ["SPEC", "VARIANTS", "HiDream", "open_family", "oracle", "read_spec", "tiny", "token_lengths"]
