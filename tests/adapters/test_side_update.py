"""What is added to a network's outputs for a while, against products in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from videotune.adapters.lora import ADAPTER
from videotune.adapters.side_update import SideUpdate, set_strength


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_update_is_added_in_the_dtype_of_the_input_and_ends(
    dtype: torch.dtype,
) -> None:
    """Of two modules: one gets factors and a bias, the other one a bias only."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    factor_a = torch.randn(1, 3, generator=generator)
    factor_b = torch.randn(4, 1, generator=generator)
    biases = [torch.randn(size, generator=generator) for size in (4, 2)]
    update = SideUpdate({"0": (factor_a, factor_b)}, {"0": biases[0], "1": biases[1]})
    x = torch.randn(5, 3, generator=generator).to(dtype)
    before = net(x)

    changed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    changed.load_state_dict(net.state_dict())
    with torch.no_grad():
        changed[0].weight += factor_b.double() @ factor_a.double()
        for layer, bias in zip(changed, biases, strict=True):
            layer.bias += bias.double()
    expected = changed(x.double())

    undo = update.add_to(net)
    for _ in range(2):  # the first pass keeps the tensors in the input's dtype
        output = net(x)
        assert output.dtype == dtype
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-12
        torch.testing.assert_close(
            output.double(), expected, rtol=tolerance, atol=tolerance
        )
    undo()
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0, 0.0])
def test_an_adapter_has_another_strength_for_a_while(strength: float) -> None:
    """Only the run's own adapter, in modules that have one."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    net[0].scaling = {ADAPTER: 2.0, "other": 3.0}  # type: ignore[assignment]
    net[1].scaling = SimpleNamespace()  # type: ignore[assignment]
    undo = set_strength(net, strength)
    assert net[0].scaling == {ADAPTER: 2.0 * strength, "other": 3.0}
    undo()
    assert net[0].scaling == {ADAPTER: 2.0, "other": 3.0}

    undo = set_strength(net, strength)
    del net
    undo()
