"""The beta distribution on [0, 1] in double precision: its CDF and the inverse. torch has neither."""

from __future__ import annotations

import math

ROUNDS = 300
"""Terms of the continued fraction; some hundred are enough for parameters of a thousand."""


def beta_cdf(x: float, a: float, b: float) -> float:
    """I_x(a, b), the probability below x in [0, 1].

    Source: the continued fraction of DLMF 8.17.22, evaluated by Lentz's method, on the side where it converges fast.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + _log_scale(a, b)) / a
    return front * _fraction(x, a, b)


def beta_inverse(p: float, a: float, b: float) -> float:
    """x with probability p below it, to the last bits: Newton's steps, halving wherever one would leave its bracket."""
    if p <= 0 or p >= 1:
        return float(p >= 1)
    lo, hi, x = 0.0, 1.0, a / (a + b)
    for _ in range(200):
        error = beta_cdf(x, a, b) - p
        if error == 0:
            return x
        lo, hi = (lo, x) if error > 0 else (x, hi)
        density = math.exp((a - 1) * math.log(x) + (b - 1) * math.log1p(-x) + _log_scale(a, b))
        step = x - error / density if density > 0 else lo
        new = step if lo < step < hi else (lo + hi) / 2
        if abs(new - x) <= 1e-16 * x or new in (lo, hi):
            return new
        x = new
    return x


def _log_scale(a: float, b: float) -> float:
    """-log B(a, b)."""
    return math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)


def _fraction(x: float, a: float, b: float) -> float:
    """1/(1 + d1/(1 + d2/(1 + …)))."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, ROUNDS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d or tiny), 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value
