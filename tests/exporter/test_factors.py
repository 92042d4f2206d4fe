"""The scale of a file's module, and how many singular values an update needs."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from videotune.errors import VideotuneError
from videotune.exporter import lora_factors
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.lora_factors import (
    low_rank_factors,
    product_norm,
    rank_for,
    sum_factors,
    svd_of,
    truncate_svd,
)
from videotune.exporter.read_scale import read_scale

MODULE = "blocks.0.attn1.to_q"
LORA = {"lora_A": torch.ones(4, 8), "lora_B": torch.ones(8, 4)}
FULL_LOKR = {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(4, 4)}
LOKR = {
    "lokr_w1": torch.ones(2, 2),
    "lokr_w2_a": torch.ones(4, 2),
    "lokr_w2_b": torch.ones(2, 4),
}


def file_with(folder: Path, **settings: object) -> AdapterFile:
    """A LoRA file with PEFT's settings in its header, if there are any."""
    path = folder / "x.safetensors"
    header = {"lora_adapter_metadata": json.dumps(settings)} if settings else None
    save_file({f"{MODULE}.lora_A.weight": torch.ones(4, 8)}, path, header)
    return AdapterFile(path)


@pytest.mark.parametrize(
    ("parts", "alpha", "settings", "expected"),
    [
        (LORA, None, {}, (1.0, "")),
        (LORA, 2.0, {}, (0.5, "tensor")),
        (LORA, 4000.0, {}, (1000.0, "tensor")),
        (LORA, None, {"lora_alpha": 2}, (0.5, "header")),
        (LORA, None, {"lora_alpha": 2, "use_rslora": True}, (1.0, "header")),
        (LORA, None, {"lora_alpha": 2, "use_rslora": False}, (0.5, "header")),
        # The rank of the tensors counts, whatever the header says.
        (LORA, None, {"lora_alpha": 2, "r": 16}, (0.5, "header")),
        (LORA, 2.0, {"lora_alpha": 2}, (0.5, "tensor")),
        (LORA, 2.001, {"lora_alpha": 2}, (0.50025, "tensor")),
        (LORA, None, {"lora_alpha": 2, "alpha_pattern": {MODULE: 8}}, (2.0, "header")),
        (LORA, None, {"lora_alpha": 2, "alpha_pattern": {"to_q": 8}}, (2.0, "header")),
        (LORA, None, {"lora_alpha": 2, "alpha_pattern": {"o_q": 8}}, (0.5, "header")),
        (FULL_LOKR, 8.0, {}, (1.0, "tensor")),
        (LOKR, 8.0, {}, (4.0, "tensor")),
        (FULL_LOKR, None, {"alpha": 8, "r": 16}, (0.5, "header")),
        (LOKR, None, {"alpha": 8}, (4.0, "header")),
        (FULL_LOKR, None, {"alpha": 8}, (8.0, "header")),
        (LOKR, None, {"alpha": 8, "r": 16, "rank_pattern": {MODULE: 2}}, (4.0, "header")),
    ],
)  # fmt: skip
def test_a_module_s_scale_is_alpha_over_rank(
    parts: dict[str, torch.Tensor],
    alpha: float | None,
    settings: dict[str, object],
    expected: tuple[float, str],
    tmp_path: Path,
) -> None:
    """Of a LoKr with full factors only as PEFT does it."""
    tensor = None if alpha is None else torch.tensor(alpha)
    scale, source = read_scale(file_with(tmp_path, **settings), parts, tensor, MODULE)
    assert scale == pytest.approx(expected[0])
    assert source == expected[1]


@pytest.mark.parametrize(
    ("alpha", "settings"),
    [
        (torch.tensor(0.0), {}),
        (torch.tensor(-1.0), {}),
        (torch.tensor(4001.0), {}),
        (torch.ones(2), {}),
        (torch.tensor(2.01), {"lora_alpha": 2}),
        (None, {"lora_alpha": True}),
        (None, {"lora_alpha": "2"}),
        (None, {"lora_alpha": 2, "alpha_pattern": {"to_.*": 8}}),
        (None, {"lora_alpha": 2, "alpha_pattern": ["to_q"]}),
    ],
)
def test_an_alpha_that_is_no_scale_is_refused(
    alpha: torch.Tensor | None, settings: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(VideotuneError, match="alpha"):
        read_scale(file_with(tmp_path, **settings), LORA, alpha, MODULE)


@pytest.mark.parametrize(
    ("sigma", "error", "rank"),
    [
        ([4.0, 3.0], 0.6, 1),  # 3 of 5 is lost, exactly what may be
        ([4.0, 3.0], 0.59, 2),
        ([4.0, 3.0, 0.0], 0.0, 2),
        ([12.0, 4.0, 3.0], 5 / 13, 1),
        ([12.0, 4.0, 3.0], 3 / 13, 2),
        ([12.0, 4.0, 3.0], 0.0, 3),
        ([4.0, 3.0], 1.0, 1),
        ([0.0, 0.0], 0.5, 1),
    ],
)
def test_the_rank_is_the_lowest_that_loses_no_more_than_may_be(
    sigma: list[float], error: float, rank: int
) -> None:
    assert rank_for(torch.tensor(sigma, dtype=torch.float64), error) == rank


def test_factors_are_summed_measured_and_cut_as_their_products() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    first, second = (draw(6, 2), draw(2, 5)), (draw(6, 1), draw(1, 5))
    whole = first[0] @ first[1] + second[0] @ second[1]
    both = sum_factors(first, second)
    torch.testing.assert_close(both[0] @ both[1], whole)
    assert product_norm(both) == pytest.approx(float(whole.norm()))

    u, sigma, v = svd_of(both)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(whole)[:3])
    torch.testing.assert_close((u * sigma) @ v, whole)
    for b, a in (truncate_svd((u, sigma, v), 2), low_rank_factors(whole, 2)):
        assert (b.shape, a.shape) == ((6, 2), (2, 5))
        lost = float((b @ a - whole).norm())
        assert lost == pytest.approx(float(sigma[2]))
        # √σ is in each of them.
        expected = [math.sqrt(value) for value in sigma[:2].tolist()]
        assert b.norm(dim=0).tolist() == pytest.approx(expected)
        assert a.norm(dim=1).tolist() == pytest.approx(expected)


def test_factors_have_no_more_ranks_than_the_shorter_side() -> None:
    """Of factors that are longer than the sides of their product, too."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    a = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    for u, sigma, v in (svd_of((b, a)), svd_of((a.T, b.T))):
        assert (u.shape[1], len(sigma), len(v)) == (2, 2, 2)
    short_b, short_a = low_rank_factors(b @ a, 4)
    assert (short_b.shape, short_a.shape) == ((2, 2), (2, 5))
    torch.testing.assert_close(short_b @ short_a, b @ a)


def test_a_randomized_svd_is_refined_until_little_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Singular values that fall by 3 % each; half as many rounds lose 3e-4 more."""
    monkeypatch.setattr(lora_factors, "FULL_SVD_LIMIT", 8)
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(
        torch.randn(60, 50, generator=generator, dtype=torch.float64)
    ).Q
    right = torch.linalg.qr(
        torch.randn(50, 50, generator=generator, dtype=torch.float64)
    ).Q
    sigma = 0.97 ** torch.arange(50, dtype=torch.float64)
    matrix = (left * sigma) @ right
    b, a = low_rank_factors(matrix, 4)
    least = float(sigma[4:].norm())
    assert float((b @ a - matrix).norm()) <= (1 + 5e-5) * least


@pytest.mark.parametrize("side", [20, 21])
def test_a_matrix_up_to_the_bound_is_cut_by_its_full_svd(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is at least the directions of a randomized SVD: 4 and 16 beyond."""
    monkeypatch.setattr(lora_factors, "FULL_SVD_LIMIT", 8)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, side, generator=generator, dtype=torch.float64)
    full = truncate_svd(torch.linalg.svd(matrix, full_matrices=False), 4)
    pairs = zip(low_rank_factors(matrix, 4), full, strict=True)
    assert all(torch.equal(cut, exact) for cut, exact in pairs) is (side == 20)
