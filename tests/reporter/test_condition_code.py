"""The report's code that calls diffusers with what a run learnt to be given. It is run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import reports
from videotune.reporter.condition_code import ConditionCode, condition_code
from videotune.reporter.read import read_run

ALL_OF_VACE = (
    "first_frame",
    "last_frame",
    "prefix",
    "suffix",
    "mask",
    "control",
    "reference",
)
ALL_OF_LTX = ("first_frame", "last_frame", "prefix", "suffix")

ALL_OF_LTX2 = ("first_frame", "last_frame", "prefix", "reference")

SETS_OF_VACE = (("control",), ("mask", "suffix"), ALL_OF_VACE)
SETS_OF_LTX2 = (("first_frame",), ("last_frame",), ("reference",), ALL_OF_LTX2)
SETS_OF_LTX = (("first_frame",), ("last_frame",), ("prefix",), ("suffix",), ALL_OF_LTX)


def code_of(
    folder: Path, pipeline: str, types: Sequence[str], shape: tuple[int, int, int]
) -> ConditionCode | None:
    folder.mkdir()
    reports.write_journal(folder, [reports.start()])
    rows = [
        {
            "type": name,
            "probability": 1.0,
            "latent_frames": 2 if name in ("prefix", "suffix") else None,
            "in_diffusers": True,
        }
        for name in types
    ]
    reports.write_file(folder, "plan.json", {"conditions": rows})
    return condition_code(read_run(folder), [pipeline], shape)


def picture(_: str) -> Image.Image:
    return Image.fromarray(np.full((40, 56, 3), 90, np.uint8))


def pictures(_: str) -> list[Image.Image]:
    return [picture("")] * 40


def call_with(code: ConditionCode, pipe: Any, **arguments: Any) -> Any:
    """Run the code, with other files, and return the pipeline's frames."""
    names: dict[str, Any] = {
        "load_image": picture,
        "load_video": pictures,
        "pipe": pipe,
        "rest": arguments,
    }
    call = f"result = pipe({', '.join(code.arguments)}, **rest).frames[0]"
    text = "\n".join([*code.imports, *code.lines, call])
    exec(compile(text, "report", "exec"), names)
    return names["result"]


@pytest.mark.parametrize(
    ("family", "variant", "shape", "sets"),
    [
        ("wan_vace", "vace", (13, 16, 32), SETS_OF_VACE),
        ("ltx_video", "0.9.7", (41, 64, 96), SETS_OF_LTX),
        ("ltx2", "2.3", (33, 64, 96), SETS_OF_LTX2),
    ],
)
def test_it_runs(
    family: str,
    variant: str,
    shape: tuple[int, int, int],
    sets: Sequence[tuple[str, ...]],
    tmp_path: Path,
    tiny_family: Callable[..., Any],
) -> None:
    """With few conditions and with all; each set is another video."""
    model = tiny_family(family, variant=variant)
    frames, height, width = shape
    pipe = model.pipeline_class().from_pretrained(model.folder)
    pipe.set_progress_bar_config(disable=True)
    results = []
    for number, types in enumerate(sets):
        name = type(pipe).__name__
        code = code_of(tmp_path / str(number), name, types, shape)
        if types == ("first_frame",) and family == "ltx_video":
            assert code is None, "an argument of the pipeline is enough"
            continue
        assert code is not None
        result = call_with(
            code,
            pipe,
            num_frames=frames,
            height=height,
            width=width,
            num_inference_steps=2,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            prompt="a cat",
        )
        assert result.shape == (frames, height, width, 3)
        results.append(result)
    assert len({result.tobytes() for result in results}) == len(results)


def test_it_needs_a_shape_and_a_pipeline_that_is_known(tmp_path: Path) -> None:
    known = code_of(tmp_path / "a", "WanVACEPipeline", ["mask"], (17, 32, 48))
    assert known is not None
    other = code_of(tmp_path / "b", "OtherPipeline", ["mask"], (17, 32, 48))
    assert other is None
    run = read_run(tmp_path / "a")
    assert condition_code(run, ["WanVACEPipeline"], None) is None
    assert hasattr(diffusers, "WanVACEPipeline")
