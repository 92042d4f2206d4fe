"""LTX-Video 0.9.x, 2B and 13B (HaCohen et al. 2024, arXiv 2501.00103): flow matching, T5 text, a VAE of 32 x 32 x 8.

From text, and from a first frame that is fed clean; where a frame lies in time is told in seconds, so fps counts.
"""

from videotune.families.ltx_video.facts import SPEC, read_spec
from videotune.families.ltx_video.model import LTXVideo, open_family
from videotune.families.ltx_video.tiny import VARIANTS, oracle, tiny, unpacked
from videotune.families.text import token_lengths

__all__ = ["SPEC", "VARIANTS", "LTXVideo", "open_family", "oracle", "read_spec", "tiny", "token_lengths", "unpacked"]
