"""Distributions of the trained noise levels t in [0, 1], shifted and truncated exactly.

Nothing random happens here: each distribution is its inverse CDF, a function from a
uniform u to t, and the u's come from ``videotune.rng``. Everything is computed in float64 and
cast once, at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from videotune.errors import VideotuneError
from videotune.lazy import scipy_special

MODE_SCALE = 1.29
"""The scale that Esser et al. 2024 report in table 1."""

STRETCHED = (-2.5758, 3.0902)
"""z-values of the 0.5th and 99.9th percentile, which STRETCHED_LOGIT_NORMAL maps to t = 0
and 1.
"""

REFLECTED = 1e-3
"""STRETCHED_LOGIT_NORMAL: values that fall below it are mirrored above it."""

UNIFORM_SHARE = 0.1
"""STRETCHED_LOGIT_NORMAL: share of draws that are uniform above ``REFLECTED``."""


def logit_normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return t for which logit(t) is normal: most weight in the middle.

    Source: Esser et al. 2024, eq. 19.
    """
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def mode(u: Tensor, scale: float = MODE_SCALE) -> Tensor:
    """Return t with more weight in the middle for scale > 0, and at the ends for scale
    < 0.

    The paper's map 1 - u - s·(cos²(πu/2) - 1 + u), at 1 - u so that it rises with u as
    an inverse CDF does. Source: Esser et al. 2024, eq. 20; monotone for scale in [-1,
    2/(π - 2)].
    """
    return u - scale * (torch.sin(torch.pi / 2 * u).square() - u)


def beta(u: Tensor, a: float, b: float) -> Tensor:
    """Return t of the beta distribution.

    Most weight is at (a - 1)/(a + b - 2) for a, b > 1, and at the ends for a, b < 1.
    """
    least = 1e-100  # below it scipy returns NaN, and every draw is 0 in float32
    probabilities = u.double().clamp(min=least).numpy()
    return torch.as_tensor(scipy_special.betaincinv(a, b, probabilities))


def shift_of_tokens(tokens: int, rule: tuple[float, float, float, float]) -> float:
    """Return the shift e^μ of a sample with a number of tokens.

    Larger pictures need more noise to be destroyed. Source: Esser et al. 2024, section
    5.3.2. The line is diffusers' ``calculate_shift``, and e^μ t/(1 + (e^μ - 1) t) is
    what its flow scheduler does with μ.

    Args:
        tokens: Number of tokens.
        rule: (tokens, μ there, other tokens, μ there); μ is linear in the tokens.
    """
    first_tokens, first_mu, second_tokens, second_mu = rule
    mu_difference = second_mu - first_mu
    token_difference = second_tokens - first_tokens
    rise = mu_difference * (tokens - first_tokens) / token_difference
    return math.exp(first_mu + rise)


def shifted(t: Tensor, shift: float) -> Tensor:
    """Move t towards noise (shift > 1) or data (shift < 1).

    Source: Esser et al. 2024, eq. 23.
    """
    return shift * t / (1 + (shift - 1) * t)


def unshifted(t: Tensor, shift: float) -> Tensor:
    """Return the inverse of ``shifted``."""
    return t / (shift - (shift - 1) * t)


def stretched_cdf(t: Tensor, shift: float) -> Tensor:
    """Return the probability below t of LTX-2's law, float64.

    It is a logit-normal with mean log(shift). Its percentiles 0.5 and 99.9 are mapped
    linearly to 0 and 1; what falls below ``REFLECTED`` is mirrored above it, what falls
    above 1 becomes 1. A tenth of the draws is uniform instead. Source: the sampler
    ShiftedLogitNormalTimestepSampler of the authors' trainer.
    """
    t = t.double()
    mean = math.log(shift)
    # s = sigmoid(mean + z) is the noise level before stretching, z standard normal. What
    # is computed is 1 - s: for many tokens s is too close to 1 to tell levels apart.
    # At the two percentiles, which become the levels 0 and 1, it is:
    low_z, high_z = STRETCHED
    complement_at_0 = 1 / (1 + math.exp(mean + low_z))
    complement_at_1 = 1 / (1 + math.exp(mean + high_z))

    def normal_cdf(level: Tensor) -> Tensor:
        # Stretching is linear, so 1 - s is linear in the stretched level.
        complement = complement_at_0 + level * (complement_at_1 - complement_at_0)
        z = -torch.logit(complement.clamp(0, 1)) - mean
        return torch.special.ndtr(z)

    # Levels that are mirrored at ``REFLECTED`` add to those above it.
    mirrored_t = 2 * REFLECTED - t
    of_normal = normal_cdf(t) - normal_cdf(mirrored_t)
    of_uniform = (t - REFLECTED) / (1 - REFLECTED)
    mixed = (1 - UNIFORM_SHARE) * of_normal + UNIFORM_SHARE * of_uniform
    mixed = torch.where(t < REFLECTED, torch.zeros_like(t), mixed)
    return torch.where(t >= 1, torch.ones_like(t), mixed)


def stretched(u: Tensor, shift: float) -> Tensor:
    """Return t of the law of ``stretched_cdf``."""
    return _bisected(lambda t: stretched_cdf(t, shift), u)


@dataclass(frozen=True)
class TimestepSampler:
    """A distribution of t, then the shift, then cut to [lo, hi)."""

    distribution: str = "UNIFORM"
    """UNIFORM, LOGIT_NORMAL, SIGMOID (LOGIT_NORMAL around the middle), MODE, BETA or
    STRETCHED_LOGIT_NORMAL.
    """

    shift: float = 1.0
    lo: float = 0.0
    hi: float = 1.0

    mean: float = 0.0
    """Mean of LOGIT_NORMAL."""
    std: float = 1.0
    """Standard deviation of LOGIT_NORMAL."""
    mode_scale: float = MODE_SCALE
    """Scale of MODE."""
    scale: float = 1.0
    """Standard deviation of SIGMOID."""
    alpha: float = 2.0
    beta: float = 2.0
    """Parameters of BETA."""

    num_timesteps: int | None = None
    """K of a path that is a table: each draw becomes k/(K - 1).

    [0, 1] is cut into K equal cells, so that UNIFORM draws every k equally often, also
    the ends.
    """

    def __post_init__(self) -> None:
        """Raise VideotuneError for numbers that define no distribution."""
        problem = self._problem()
        if problem is not None:
            raise VideotuneError(
                f"timestep_distribution {self.distribution}: {problem}"
            )

    def _problem(self) -> str | None:
        """Return what is wrong with the numbers, beyond the bounds of the config's
        schema.
        """
        largest_scale = 2 / (math.pi - 2)
        if not self.scale > 0:
            return f"the scale of SIGMOID is {self.scale}. Set a number above 0"
        if not -1 <= self.mode_scale <= largest_scale:
            return (
                f"the scale of MODE is {self.mode_scale}. "
                f"Set a number between -1 and {largest_scale:.4f}"
            )
        if not (0 < self.alpha <= 1000 and 0 < self.beta <= 1000):
            return (
                f"the numbers of BETA are {self.alpha} and {self.beta}. "
                f"Set two above 0, at most 1000"
            )

        if self.num_timesteps is not None and self.num_timesteps < 2:
            return (
                f"a schedule of {self.num_timesteps} timesteps cannot be trained; "
                f"it needs at least 2"
            )
        if self._is_empty():
            return (
                f"with shift {self.shift} it has no timestep in [{self.lo}, {self.hi}). "
                f"Widen the range, which must be in [0, 1], or change the shift"
            )
        return None

    def _is_empty(self) -> bool:
        """Whether no timestep can be drawn."""
        if not 0 <= self.lo < self.hi <= 1:
            return True
        first: float
        last: float
        if self.num_timesteps is None:
            first, last = _float32_inside(self.lo, self.hi)
        else:
            first, last = _grid_inside(self.lo, self.hi, self.num_timesteps)
        if first > last:
            return True
        cdf_lo, cdf_hi = _cdf_of_range(self)
        return cdf_lo >= cdf_hi

    @property
    def of_logit(self) -> tuple[float, float]:
        """Mean and standard deviation of logit(t), if it is normal."""
        if self.distribution == "SIGMOID":
            return 0.0, self.scale
        return self.mean, self.std

    def within(self, lo: float, hi: float) -> "TimestepSampler":
        """Return the distribution cut to [lo, hi) too; VideotuneError if it is empty."""
        return replace(self, lo=max(lo, self.lo), hi=min(hi, self.hi))

    def draw(self, u: Tensor) -> Tensor:
        """Return t (B,) float32 for uniform numbers u (B,).

        t = F⁻¹(F(lo) + u·(F(hi) - F(lo))): exact, with one u a draw and nothing
        rejected. It is in [lo, hi) also after rounding to float32.
        """
        cdf_lo, cdf_hi = _cdf_of_range(self)
        probability = cdf_lo + u.double() * (cdf_hi - cdf_lo)
        t = _inverse(self, probability)
        if self.num_timesteps is None:
            return t.float().clamp(*_float32_inside(self.lo, self.hi))

        first, last = _grid_inside(self.lo, self.hi, self.num_timesteps)
        k = (t * self.num_timesteps).floor().clamp(first, last)
        return (k / (self.num_timesteps - 1)).float()

    def cdf(self, t: Tensor) -> Tensor:
        """Return the probability of a draw below t, float64, before it is put on a
        grid.
        """
        cdf_lo, cdf_hi = _cdf_of_range(self)
        probability = _cdf(self, t.double())
        share_of_range = (probability - cdf_lo) / (cdf_hi - cdf_lo)
        return share_of_range.clamp(0, 1)

    def quantiles(self, n: int) -> Tensor:
        """Return the t in the middle of each of n equally likely ranges, (n,) float32."""
        ranges = torch.arange(n, dtype=torch.float64)
        middles = (ranges + 0.5) / n
        return self.draw(middles)

    def at(self, shares: Sequence[float]) -> Tensor:
        """Return the noise levels below which these shares of the draws are."""
        return self.draw(torch.tensor(shares, dtype=torch.float64))

    def mass(self, lo: float, hi: float) -> float:
        """Return the probability of a draw in [lo, hi), before it is put on a grid."""
        ends = torch.tensor([lo, hi], dtype=torch.float64)
        cdf_lo, cdf_hi = self.cdf(ends).tolist()
        return cdf_hi - cdf_lo


def _inverse(ts: TimestepSampler, p: Tensor) -> Tensor:
    """Return the t with probability p below it, shifted, before truncation."""
    match ts.distribution:
        case "STRETCHED_LOGIT_NORMAL":
            return stretched(p, ts.shift)  # it is stretched after the shift
        case "LOGIT_NORMAL" | "SIGMOID":
            t = logit_normal(p, *ts.of_logit)
        case "MODE":
            t = mode(p, ts.mode_scale)
        case "BETA":
            t = beta(p, ts.alpha, ts.beta)
        case _:
            t = p
    return shifted(t, ts.shift)


def _cdf(ts: TimestepSampler, t: Tensor) -> Tensor:
    """Return the probability below t, before truncation."""
    t = t.clamp(0, 1)
    if ts.distribution == "STRETCHED_LOGIT_NORMAL":
        return stretched_cdf(t, ts.shift)

    t = unshifted(t, ts.shift)
    match ts.distribution:
        case "LOGIT_NORMAL" | "SIGMOID":
            mean, std = ts.of_logit
            return torch.special.ndtr((torch.logit(t) - mean) / std)
        case "MODE":
            inside = _bisected(lambda p: mode(p, ts.mode_scale), t)
            inside = torch.where(t <= 0, torch.zeros_like(t), inside)
            return torch.where(t >= 1, torch.ones_like(t), inside)
        case "BETA":
            return torch.as_tensor(
                scipy_special.betainc(ts.alpha, ts.beta, t.double().numpy())
            )
    return t


def _bisected(rising: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Return where in [0, 1] a rising function has a value; for functions without a
    closed inverse, in float64.
    """
    lo = torch.zeros_like(value)
    hi = torch.ones_like(value)
    for _ in range(60):
        middle = (lo + hi) / 2
        above = rising(middle) > value
        lo = torch.where(above, lo, middle)
        hi = torch.where(above, middle, hi)
    return (lo + hi) / 2


@lru_cache(maxsize=64)
def _cdf_of_range(ts: TimestepSampler) -> tuple[float, float]:
    """Return (F(lo), F(hi)); on a grid, for the cells of the timesteps in [lo, hi)."""
    lo = ts.lo
    hi = ts.hi
    if ts.num_timesteps is not None:
        first, last = _grid_inside(lo, hi, ts.num_timesteps)
        lo = first / ts.num_timesteps
        hi = (last + 1) / ts.num_timesteps
    ends = torch.tensor([lo, hi], dtype=torch.float64)
    cdf_lo, cdf_hi = _cdf(ts, ends).tolist()
    return cdf_lo, cdf_hi


def _grid_inside(lo: float, hi: float, num: int) -> tuple[int, int]:
    """Return the first and last k with k/(num - 1) in [lo, hi); hi = 1 includes the
    last k.
    """
    slack = 1e-9  # so that lo = k/(num - 1), itself rounded, still means k
    first = math.ceil(lo * (num - 1) - slack)
    last = num - 1 if hi >= 1 else math.ceil(hi * (num - 1) - slack) - 1
    return first, last


def _float32_inside(lo: float, hi: float) -> tuple[float, float]:
    """Return the least and greatest float32 in [lo, hi)."""
    least = torch.tensor(lo, dtype=torch.float32)
    most = torch.tensor(hi, dtype=torch.float32)
    if least.item() < lo:
        least = torch.nextafter(least, torch.tensor(math.inf))
    if most.item() >= hi:
        most = torch.nextafter(most, torch.tensor(-math.inf))
    return least.item(), most.item()
