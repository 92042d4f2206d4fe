"""Text connectors in the step, on the stand-in card: their blocks run before the
network's own forward pass.
"""

from pathlib import Path
from typing import Any

from tests.simcuda.child import on_card
from tests.simcuda.lab import Lab, faults

WAYS = {
    "resident": ("gradient_checkpointing=OFF", "layer_offload_fraction=0"),
    "inputs on the host": (
        "gradient_checkpointing=CPU_OFFLOADED",
        "layer_offload_fraction=0",
    ),
    "half of the blocks": ("gradient_checkpointing=ON", "layer_offload_fraction=0.5"),
    "all, with inputs": (
        "gradient_checkpointing=CPU_OFFLOADED",
        "layer_offload_fraction=1",
    ),
    "all, in INT_8": ("weight_dtype=INT_8", "layer_offload_fraction=1"),
}


def stepped(folder: str) -> dict[str, Any]:
    """What the card sees of steps with the blocks kept in each of these ways."""
    lab = Lab(Path(folder))
    targets = 'lora.targets=["attention", "connectors"]'
    return {
        name: lab.steps(name.replace(" ", "-"), lab.words("ltx2", targets, *sets))
        for name, sets in WAYS.items()
    }


def test_connectors_stream_with_the_blocks(tmp_path: Path) -> None:
    """No error, no growth, no wait of the host, and the losses of resident blocks."""
    seen = on_card(stepped, tmp_path)
    wrong = {name: faults(each) for name, each in seen.items()}
    assert {name: found for name, found in wrong.items() if found} == {}
    for name in ("inputs on the host", "half of the blocks", "all, with inputs"):
        assert seen[name]["losses"] == seen["resident"]["losses"], name
