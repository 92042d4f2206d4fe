"""The device is whatever torch.accelerator finds; what a kind of device lacks is not
asked of it.
"""

from typing import Any

import pytest
import torch
import typer
from torch import nn

from tests.support.command_line import Patch
from videotune.cli.doctor import doctor
from videotune.commands.doctor import KINDS, devices
from videotune.config.optimizers import Optimizer
from videotune.config.schema import Config
from videotune.distributed import join
from videotune.errors import VideotuneError
from videotune.memory.accelerator import (
    copy_stream,
    has_bf16,
    has_streams,
    local_device,
)
from videotune.models.registry import find
from videotune.planner import fit as fitting
from videotune.trainer import build
from videotune.trainer.optimizers import make_optimizer, step_if_finite
from videotune.types import BasePlace


def accelerator(monkeypatch: Patch, kind: str | None) -> None:
    """torch finds an accelerator of this kind."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: found
    )


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", None])
def test_the_device_is_what_torch_finds(kind: str | None, monkeypatch: Patch) -> None:
    accelerator(monkeypatch, kind)
    assert local_device() == (torch.device(kind, 0) if kind else torch.device("cpu"))
    assert has_streams(local_device()) == (kind in ("cuda", "xpu"))
    if kind in ("mps", None):
        assert copy_stream(local_device()) is None
        assert not has_bf16(local_device())
        assert fitting.requested_card(None, None) == (None, None)


def test_the_plan_of_an_xpu_is_for_its_memory(monkeypatch: Patch) -> None:
    accelerator(monkeypatch, "xpu")
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda device: (11 << 30, 16 << 30)
    )
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 1 << 30)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: "Intel Arc")
    assert fitting.requested_card(None, None) == (12 << 30, None)


def test_several_processes_on_mps_are_refused(monkeypatch: Patch) -> None:
    accelerator(monkeypatch, "mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(VideotuneError, match=r"MPS device. Start one"), join():
        pass


def test_weights_that_mps_has_no_dtype_for_are_refused(
    tiny_bases: Any, monkeypatch: Patch
) -> None:
    accelerator(monkeypatch, "mps")
    spec, base = find("wan").spec, BasePlace(str(tiny_bases("wan")), tiny_bases("wan"))
    opened: Any = build.open_models(spec, base, Config(weight_dtype="INT_8"))
    assert opened.device == torch.device("mps", 0)
    with pytest.raises(VideotuneError, match="Set INT_8"):
        build.open_models(spec, base, Config(weight_dtype="FLOAT_8"))


def test_where_the_fused_kernel_cannot_skip_a_step_the_host_decides(
    monkeypatch: Patch,
) -> None:
    """MPS's ignores ``found_inf``: here it is any kernel, on a device that is called
    so.
    """

    class Answer(torch.Tensor):
        device = torch.device("mps")

    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer({"all": [weight]}, Optimizer())
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = torch.ones(3)
    step_if_finite(optimizer, torch.tensor(False).as_subclass(Answer))
    assert weight.tolist() == [1, 1, 1]
    step_if_finite(optimizer, torch.tensor(True).as_subclass(Answer))
    assert weight.tolist() != [1, 1, 1]
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("kind", ["xpu", "mps", None])
def test_doctor_lists_each_kind_of_device_in_80_columns(
    kind: str | None, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator(monkeypatch, kind)
    assert {row[0] for row in devices() if row[1] == "yes"} == {
        "CPU",
        *([kind.upper()] if kind else []),
    }
    accelerator(monkeypatch, None)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(typer.Exit):
        doctor()
    out = capsys.readouterr().out
    table = out[out.index("\ndevices") :].splitlines()
    assert all(len(line) <= 80 for line in table)
    for name, what in KINDS.items():
        assert any(all(word in line for word in (name, *what)) for line in table), (
            "no cell is folded"
        )
