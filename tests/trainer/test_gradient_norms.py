"""The norms of a step's gradients, by their places among what trains."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from videotune.trainer.gradient_norms import GradientNorms

CPU = torch.device("cpu")


def norms_of(most: int = 4) -> GradientNorms:
    """Those of even steps are wanted."""
    return GradientNorms(lambda step: step % 2 == 0, most, CPU)


def with_gradients(*gradients: Tensor | None) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def read(norms: GradientNorms, step: int) -> Sequence[float] | None:
    kept = norms.read(step)
    if kept is None:
        return None
    assert kept.dtype == torch.float64
    assert kept.device == CPU
    values: list[float] = kept.tolist()
    return values


def test_each_norm_has_the_place_of_its_parameter() -> None:
    """All others are 0, whatever they were before; other steps are not kept."""
    norms = norms_of()
    assert norms.expert is None
    assert read(norms, 2) is None
    all_four = [torch.tensor([3.0, 4.0])] * 4
    norms.keep(2, with_gradients(*all_four), "high")
    assert (read(norms, 2), norms.expert) == ([5.0] * 4, "high")

    some = with_gradients(None, torch.tensor([6.0, 8.0]), torch.tensor([0.0, 2.0]))
    norms.keep(3, some, "low")
    assert (read(norms, 2), read(norms, 3)) == ([5.0] * 4, None)
    norms.keep(4, some, "low")
    assert read(norms, 2) is None
    assert (read(norms, 4), norms.expert) == ([0.0, 10.0, 2.0, 0.0], "low")
    norms.keep(6, with_gradients(None, None), None)
    assert (read(norms, 6), norms.expert) == ([0.0] * 4, None)


def test_norms_that_are_known_are_kept_by_name() -> None:
    norms = norms_of()
    measured = {"c": torch.tensor(7.0), "a": torch.tensor(5.0)}
    norms.keep_norms(1, measured, ["a", "b", "c"], "high")
    assert (read(norms, 1), norms.expert) == (None, None)
    norms.keep_norms(2, measured, ["a", "b", "c"], "high")
    assert (read(norms, 2), norms.expert) == ([5.0, 0.0, 7.0, 0.0], "high")


def test_no_norm_is_taken_for_another_kind_of_device() -> None:
    """Memory is taken at once, for those on a card and those of weights on the host."""
    norms = GradientNorms(lambda step: True, 3, torch.device("meta"))
    shapes = {key: value.shape for key, value in norms._norms_by_device.items()}
    assert shapes == {"meta": (3,), "cpu": (3,)}
    assert norms._norms_by_device["meta"].is_meta
    assert not norms._norms_by_device["cpu"].is_meta
    assert list(norms_of()._norms_by_device) == ["cpu"]
