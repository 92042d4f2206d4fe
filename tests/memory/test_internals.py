"""What videotune uses of its libraries that is internal to them, and the versions with
which it was checked.
"""

import re
from pathlib import Path

import pytest
import torch

from videotune.errors import VideotuneError
from videotune.memory.device_buffers import TORCH, refuse_other_torch

PACKAGE = Path(__file__).parents[2] / "videotune"
assert TORCH == ("2.11", "2.13"), (
    "all tests ran with torch 2.13 and diffusers 0.42; with 2.11 a part of them, on CUDA"
)
INTERNAL = {
    "torch": {
        "torch._subclasses",  # FakeTensor: plans
        "torch.utils._python_dispatch",
        "torch.utils._pytree",
        "torch._dynamo",  # compiled blocks: how many graphs, and their bound
        "torch._inductor",  # where compiled code is kept
        "torch._foreach_copy_",
        "torch._foreach_sub",
        "torch._foreach_mul_",
        "torch._foreach_add_",
        "torch._foreach_norm",
        "torch._amp_foreach_non_finite_check_and_unscale_",  # the loss scale of float16
        "torch._amp_update_scale_",
        "torch._scaled_mm",  # products in eight bits
        "torch._int_mm",
        "_execution_engine",  # the end of a backward pass over streamed blocks
        "tensor._version",  # whether a block has changed its own weights
    },
    "diffusers": {
        "pipeline._prepare_video_ids",
        "pipeline._scale_video_ids",
        "gate._force_inference_output",
        "diffusers.models._modeling_parallel",  # how plans say what is split by tokens
    },
}
USED = re.compile(
    r"\btorch\.(?:utils\.)?_[a-zA-Z]\w+|\b_execution_engine\b|\b(?:tensor|pipeline|gate)\._[a-z]\w+"
    r"|\b(?:diffusers|transformers|peft|accelerate|bitsandbytes)\.(?:\w+\.)*_[a-z]\w*"
)


def test_internal_names_are_these_and_no_others() -> None:
    sources = [
        path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "studio"
    ]
    found = {name for text in sources for name in USED.findall(text)}
    assert found == set().union(*INTERNAL.values())


@pytest.mark.parametrize("other", ["2.12.1", "2.14.0", "3.0.0"])
def test_another_torch_is_refused_in_a_sentence(other: str) -> None:
    with pytest.raises(
        VideotuneError, match=f"torch {other}: videotune supports 2.11 or 2.13"
    ):
        refuse_other_torch(other)
    refuse_other_torch(torch.__version__.partition("+")[0])
    refuse_other_torch("2.11.0")
