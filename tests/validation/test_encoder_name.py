"""The name of an image encoder, by which frames of two encoders are never compared."""

from types import SimpleNamespace
from typing import Any

import torch

from videotune.validation.embeddings import _encoder_name


def model(seed: int = 0, layers: int = 2, model_type: str = "clip") -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: Any = torch.nn.Sequential(
            *(torch.nn.Linear(3, 3) for _ in range(layers))
        )
    network.config = SimpleNamespace(model_type=model_type)
    return network


def test_it_is_that_of_its_kind_its_folder_and_its_weights() -> None:
    name = _encoder_name(model(), "models/vit")
    assert name.startswith("clip-")
    assert len(name) == len("clip-") + 8
    for source in ("models/vit/", "elsewhere/vit"):
        assert _encoder_name(model(), source) == name, "not where its folder lies"

    others = {
        _encoder_name(model(seed=1), "models/vit"),
        _encoder_name(model(), "models/vit-large"),
        _encoder_name(model(model_type="siglip"), "models/vit"),
    }
    assert len(others | {name}) == 4


def test_the_first_eight_parameters_say_which_weights_they_are() -> None:
    """The eighth counts, the ninth does not: a sum of all would read a large file."""
    name = _encoder_name(model(layers=5), "vit")
    for position, differs in ((0, True), (7, True), (8, False)):
        changed = model(layers=5)
        with torch.no_grad():
            list(changed.parameters())[position] += 1
        assert (_encoder_name(changed, "vit") != name) == differs, position


def test_rounding_hides_what_another_device_computes() -> None:
    name = _encoder_name(model(), "vit")
    changed = model()
    with torch.no_grad():
        next(changed.parameters()).add_(1e-6)
    assert _encoder_name(changed, "vit") == name
