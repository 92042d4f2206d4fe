"""Which noise levels are trained: distributions of t in [0, 1], shifted, and exactly truncated to an expert's range.

Nothing here draws: each distribution is its inverse CDF, a function from a uniform u to t, and the u's are counted
randomness made elsewhere on the CPU. Everything is computed in float64 and cast once, at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from videotune.errors import VideotuneError
from videotune.lazy import scipy_special

MODE_SCALE = 1.29  # the scale that Esser et al. 2024 report in table 1


def logit_normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Most weight in the middle: logit(t) is normal. Source: Esser et al. 2024, eq. 19."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def mode(u: Tensor, scale: float = MODE_SCALE) -> Tensor:
    """More weight in the middle for scale > 0, at the ends for scale < 0, and nowhere none.

    The paper's map 1 - u - s·(cos²(πu/2) - 1 + u), taken at 1 - u so that it rises with u, as an inverse CDF does.
    Source: Esser et al. 2024, eq. 20; monotone for scale in [-1, 2/(π - 2)].
    """
    return u - scale * (torch.sin(torch.pi / 2 * u).square() - u)


def beta(u: Tensor, a: float, b: float) -> Tensor:
    """The beta distribution: most weight at (a - 1)/(a + b - 2) for a, b > 1, at the ends below 1."""
    least = 1e-100  # below it scipy gives NaN, and every draw is 0 in float32
    return torch.as_tensor(scipy_special.betaincinv(a, b, u.double().clamp(min=least).numpy()))


def shift_of_tokens(tokens: int, rule: tuple[float, float, float, float]) -> float:
    """The shift e^μ of a sample of so many tokens; ``rule`` (tokens, μ at them, other tokens, μ at those), linear between.

    Larger pictures need more noise to be destroyed. Source: Esser et al. 2024, section 5.3.2; the line is diffusers'
    ``calculate_shift`` and its e^μ t/(1 + (e^μ - 1) t) what its flow scheduler does with μ.
    """
    first, low, second, high = rule
    return math.exp(low + (high - low) * (tokens - first) / (second - first))


def shifted(t: Tensor, shift: float) -> Tensor:
    """Move t towards noise (shift > 1) or data (shift < 1). Source: Esser et al. 2024, eq. 23."""
    return shift * t / (1 + (shift - 1) * t)


def unshifted(t: Tensor, shift: float) -> Tensor:
    """The inverse of ``shifted``."""
    return t / (shift - (shift - 1) * t)


@dataclass(frozen=True)
class TimestepSampler:
    """A distribution of t, then the shift, then cut to [lo, hi).

    UNIFORM; LOGIT_NORMAL (mean, std); SIGMOID (scale), which is LOGIT_NORMAL about the middle with scale for std; MODE
    (mode_scale); BETA (alpha, beta).

    ``num_timesteps`` K, where the path is a table, brings each draw to k/(K - 1): [0, 1] is cut into K equal cells, so
    that UNIFORM gives every k alike, the ends too.
    """

    distribution: str = "UNIFORM"
    shift: float = 1.0
    lo: float = 0.0
    hi: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    mode_scale: float = MODE_SCALE
    scale: float = 1.0
    alpha: float = 2.0
    beta: float = 2.0
    num_timesteps: int | None = None

    def __post_init__(self) -> None:
        """Raise VideotuneError for numbers that define no distribution and that no bound in the config's schema refuses."""
        top = 2 / (math.pi - 2)
        inside = _float32_inside(self.lo, self.hi)
        if self.num_timesteps is not None:
            inside = _grid_inside(self.lo, self.hi, self.num_timesteps)
        if not self.scale > 0:
            problem = f"the scale of SIGMOID is {self.scale}; give a number above 0"
        elif not -1 <= self.mode_scale <= top:
            problem = (
                f"the scale of MODE is {self.mode_scale}; it must lie between -1 and {top:.4f}"
            )
        elif not (0 < self.alpha <= 1000 and 0 < self.beta <= 1000):
            problem = f"the numbers of BETA are {self.alpha} and {self.beta}; give two above 0, at most 1000"
        elif self.num_timesteps is not None and self.num_timesteps < 2:
            problem = f"a schedule of {self.num_timesteps} timesteps cannot be trained; it needs at least 2"
        elif (
            not 0 <= self.lo < self.hi <= 1
            or inside[0] > inside[1]
            or _cut(self)[0] >= _cut(self)[1]
        ):
            problem = (
                f"with shift {self.shift} it has no timestep in [{self.lo}, {self.hi}); widen the range, which lies in "
                "[0, 1], or change the shift"
            )
        else:
            return
        raise VideotuneError(f"timestep_distribution {self.distribution}: {problem}")

    @property
    def of_logit(self) -> tuple[float, float]:
        """Mean and standard deviation of logit(t) where it is normal."""
        return (0.0, self.scale) if self.distribution == "SIGMOID" else (self.mean, self.std)

    def within(self, lo: float, hi: float) -> "TimestepSampler":
        """The same cut to [lo, hi) too; raises VideotuneError where nothing is left."""
        return replace(self, lo=max(lo, self.lo), hi=min(hi, self.hi))

    def draw(self, u: Tensor) -> Tensor:
        """t (B,) float32 for uniform numbers u (B,); always inside [lo, hi), also after rounding to float32.

        t = F⁻¹(F(lo) + u·(F(hi) - F(lo))): exact, one u a draw, nothing rejected.
        """
        below, upto = _cut(self)
        t = shifted(_inverse(self, below + u.double() * (upto - below)), self.shift)
        if self.num_timesteps is None:
            return t.float().clamp(*_float32_inside(self.lo, self.hi))
        k = (
            (t * self.num_timesteps)
            .floor()
            .clamp(*_grid_inside(self.lo, self.hi, self.num_timesteps))
        )
        return (k / (self.num_timesteps - 1)).float()

    def cdf(self, t: Tensor) -> Tensor:
        """The probability of a draw below t, float64, before a draw is brought to a grid."""
        below, upto = _cut(self)
        return ((_cdf(self, t.double()) - below) / (upto - below)).clamp(0, 1)

    def quantiles(self, n: int) -> Tensor:
        """(n,) float32: t at the middle of each of n equally likely ranges, which stands for the whole distribution."""
        return self.draw((torch.arange(n, dtype=torch.float64) + 0.5) / n)

    def at(self, shares: Sequence[float]) -> Tensor:
        """The noise levels below which these shares of the draws lie."""
        return self.draw(torch.tensor(shares, dtype=torch.float64))

    def mass(self, lo: float, hi: float) -> float:
        """The probability of a draw in [lo, hi), before a draw is brought to a grid."""
        below, upto = self.cdf(torch.tensor([lo, hi], dtype=torch.float64)).tolist()
        return upto - below


def _inverse(ts: TimestepSampler, p: Tensor) -> Tensor:
    """t with probability p below it, before the shift and truncation."""
    match ts.distribution:
        case "LOGIT_NORMAL" | "SIGMOID":
            return logit_normal(p, *ts.of_logit)
        case "MODE":
            return mode(p, ts.mode_scale)
        case "BETA":
            return beta(p, ts.alpha, ts.beta)
    return p


def _cdf(ts: TimestepSampler, t: Tensor) -> Tensor:
    """The probability below t, before truncation."""
    t = unshifted(t.clamp(0, 1), ts.shift)
    match ts.distribution:
        case "LOGIT_NORMAL" | "SIGMOID":
            mean, std = ts.of_logit
            return torch.special.ndtr((torch.logit(t) - mean) / std)
        case "MODE":
            return _mode_cdf(t, ts.mode_scale)
        case "BETA":
            return torch.as_tensor(scipy_special.betainc(ts.alpha, ts.beta, t.double().numpy()))
    return t


def _mode_cdf(t: Tensor, scale: float) -> Tensor:
    """MODE's CDF has no closed form: its rising inverse is bisected to the last bit of float64."""
    lo = torch.zeros_like(t)
    hi = torch.ones_like(t)
    for _ in range(60):
        middle = (lo + hi) / 2
        above = mode(middle, scale) > t
        lo = torch.where(above, lo, middle)
        hi = torch.where(above, middle, hi)
    return torch.where(
        t >= 1, torch.ones_like(t), torch.where(t <= 0, torch.zeros_like(t), (lo + hi) / 2)
    )


@lru_cache(maxsize=64)
def _cut(ts: TimestepSampler) -> tuple[float, float]:
    """(F(lo), F(hi)); on a grid, of the cells of the timesteps that lie in [lo, hi)."""
    lo = ts.lo
    hi = ts.hi
    if ts.num_timesteps is not None:
        first, last = _grid_inside(lo, hi, ts.num_timesteps)
        lo = first / ts.num_timesteps
        hi = (last + 1) / ts.num_timesteps
    below, upto = _cdf(ts, torch.tensor([lo, hi], dtype=torch.float64)).tolist()
    return below, upto


def _grid_inside(lo: float, hi: float, num: int) -> tuple[int, int]:
    """The first and last k with k/(num - 1) in [lo, hi), the last timestep of all belonging to hi = 1."""
    slack = 1e-9  # so that lo = k/(num - 1), itself rounded, still means k
    first = math.ceil(lo * (num - 1) - slack)
    last = num - 1 if hi >= 1 else math.ceil(hi * (num - 1) - slack) - 1
    return first, last


def _float32_inside(lo: float, hi: float) -> tuple[float, float]:
    """The least and greatest float32 in [lo, hi)."""
    least = torch.tensor(lo, dtype=torch.float32)
    most = torch.tensor(hi, dtype=torch.float32)
    if least.item() < lo:
        least = torch.nextafter(least, torch.tensor(math.inf))
    if most.item() >= hi:
        most = torch.nextafter(most, torch.tensor(-math.inf))
    return least.item(), most.item()
