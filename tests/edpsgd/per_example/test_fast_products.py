"""Products by oneDNN are those of double precision, and torch makes them wherever oneDNN is not asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edpsgd.per_example import UnitGradients, fast_products
from edpsgd.per_example.fast_products import add_product_, is_for_onednn, multiply, multiply_pairs
from edpsgd.per_example.ghost import LayerGradients
from tests.edpsgd.per_example.zoo import Sequences, made
from tests.helpers.unit_loop import Fast, check, trained

ROWS, INNER, COLUMNS = 160, 192, 176  # large enough for oneDNN
LAYOUTS = ("contiguous", "transposed", "strided", "some columns", "expanded")
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of what oneDNN made, on any processor that has it."""
    made: list[tuple[int, int]] = []
    by_onednn = fast_products._by_onednn

    def spy(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = by_onednn(left, right)
        made.append((found.shape[0], found.shape[1]))
        return found

    monkeypatch.setattr(fast_products, "_by_onednn", spy)
    monkeypatch.setattr(fast_products, "onednn_is_better", lambda: True)
    return made


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are left to oneDNN too."""
    monkeypatch.setattr(fast_products, "_LEAST_SIDE", 1)
    monkeypatch.setattr(fast_products, "_LEAST_STEPS", 1)


def laid_out(layout: str, rows: int, columns: int) -> torch.Tensor:
    """A random matrix that lies in the memory in some way."""
    return {
        "contiguous": lambda: torch.randn(rows, columns),
        "transposed": lambda: torch.randn(columns, rows).T,
        "strided": lambda: torch.randn(2 * rows, 3 * columns)[::2, ::3],
        "some columns": lambda: torch.randn(rows, columns + 5)[:, 2 : columns + 2],
        "expanded": lambda: torch.randn(1, columns).expand(rows, columns),
    }[layout]()


def assert_product(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Off by the rounding of sums in single precision, which is far less than that of rounded factors."""
    exact, sizes = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert found.dtype is torch.float32
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= 2e-6 * sizes).all())


def large_factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)


@needs_onednn
@pytest.mark.parametrize("right_layout", LAYOUTS)
@pytest.mark.parametrize("left_layout", LAYOUTS)
def test_products_of_large_matrices(left_layout: str, right_layout: str, products: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    left, right = laid_out(left_layout, ROWS, INNER), laid_out(right_layout, INNER, COLUMNS)
    assert_product(multiply(left, right), left, right)
    total = laid_out(left_layout, ROWS, COLUMNS).clone(memory_format=torch.preserve_format)
    begin = total.clone()
    add_product_(total, left, right)
    torch.testing.assert_close(total.double(), begin.double() + left.double() @ right.double(), rtol=1e-5, atol=1e-4)
    assert products == [(ROWS, COLUMNS)] * 2


@needs_onednn
def test_products_of_random_sizes(products: list[tuple[int, int]], of_any_size: None) -> None:
    """Also of vectors; empty ones are left to torch, whose product over nothing is zero."""
    torch.manual_seed(0)
    sizes = [[0, 5, 3], [5, 0, 3], [5, 3, 0], [0, 0, 0], [1, 1, 1], [1, 300, 1], [300, 1, 7], [1, 17, 64]]
    sizes += [torch.randint(1, 130, (3,)).tolist() for _ in range(40)]
    for rows, inner, columns in sizes:
        for layout in LAYOUTS[:4]:
            left, right = laid_out(layout, rows, inner), laid_out(layout, inner, columns)
            found = multiply(left, right)
            assert_product(found, left, right)
            total = torch.ones(rows, columns)
            add_product_(total, left, right)
            torch.testing.assert_close(total, found + 1.0)
    filled = [size for size in sizes if 0 not in size]
    assert len(products) == 2 * 4 * len(filled)


@needs_onednn
def test_pairs_of_matrices(products: list[tuple[int, int]]) -> None:
    """Units' products: of their rows with each other, and of turned rows with others."""
    torch.manual_seed(0)
    blocks, others = torch.randn(3, ROWS, INNER), torch.randn(3, ROWS, COLUMNS)
    for lefts, rights in ((blocks, blocks.mT), (blocks.mT, others)):
        for found, left, right in zip(multiply_pairs(lefts, rights), lefts, rights, strict=True):
            assert_product(found, left, right)
    assert products == [(ROWS, ROWS)] * 3 + [(INNER, COLUMNS)] * 3
    small, none = torch.randn(4, 5, 6), torch.randn(0, ROWS, INNER)
    assert torch.equal(multiply_pairs(small, small.mT), small @ small.mT)
    assert multiply_pairs(none, none.mT).shape == (0, ROWS, ROWS)
    assert len(products) == 6


@needs_onednn
def test_sums_are_made_in_parts(products: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_products, "_CHUNK", 50 * COLUMNS)
    left, right = large_factors()
    total = torch.zeros(ROWS, COLUMNS)
    add_product_(total, left.T.contiguous().T, right)
    assert_product(total, left, right)
    assert products == [(50, COLUMNS)] * 3 + [(10, COLUMNS)]


@needs_onednn
def test_what_is_not_a_number_stays_in_its_row(products: list[tuple[int, int]]) -> None:
    left, right = large_factors()
    left[3, 5], left[7, 0] = torch.nan, torch.inf
    others = torch.ones(ROWS, dtype=torch.bool)
    others[[3, 7]] = False
    found = multiply(left, right)
    assert not torch.isfinite(found[~others]).any()
    assert_product(found[others], left[others], right)
    assert products


@needs_onednn
@pytest.mark.parametrize("name", ["LSTM, padded, both ways, 2 layers", "LSTM, way around it", "tied", "attention"])
def test_norms_and_sums(
    name: str, products: list[tuple[int, int]], of_any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers whose gradients are kept in factors, as large ones are."""
    monkeypatch.setattr(LayerGradients, "_should_instantiate", lambda layer: False)
    model = made(name)
    with Fast():
        check(UnitGradients(trained(model)), model, model(Sequences(4, 3, 0)))
    assert products


# -------------------------------------------------------------------- who is not asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_to_torch(dtype: torch.dtype, products: list[tuple[int, int]]) -> None:
    left, right = (factor.to(dtype) for factor in large_factors())
    total = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    add_product_(total, left, right)
    assert torch.equal(multiply(left, right), left @ right)
    torch.testing.assert_close(total, left @ right)
    assert not products


def test_what_needs_a_gradient_is_left_to_torch(products: list[tuple[int, int]]) -> None:
    left, right = large_factors()
    multiply(left, right.requires_grad_()).sum().backward()
    assert right.grad is not None
    torch.testing.assert_close(right.grad, left.sum(0).unsqueeze(1).expand(INNER, COLUMNS))
    assert not is_for_onednn(left, torch.nn.Parameter(right.detach(), requires_grad=False))
    assert not products


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_without_onednn(products: list[tuple[int, int]]) -> None:
    left, right = large_factors()
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(multiply(left, right), left @ right)
    assert not products


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_where_factors_may_be_rounded(precision: str, products: list[tuple[int, int]]) -> None:
    """torch's own product then, for which norms allow."""
    left, right = large_factors()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert torch.equal(multiply(left, right), left @ right)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not products


def test_small_matrices_and_vectors_are_left_to_torch(products: list[tuple[int, int]]) -> None:
    for rows, inner, columns in ((8, 16, 8), (ROWS, 0, COLUMNS), (1, 3000, 3000), (3000, 3000, 1), (3000, 1, 3000)):
        left, right = torch.randn(rows, inner), torch.randn(inner, columns)
        assert torch.equal(multiply(left, right), left @ right)
    assert not products


# -------------------------------------------------------------------- which machines


@pytest.fixture
def fast_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A processor on which oneDNN is better; the file that names it."""
    processor = tmp_path / "cpuinfo"
    processor.write_text("vendor_id : AuthenticAMD")
    monkeypatch.setattr(fast_products, "_PROCESSOR", processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in fast_products._MODES:
        monkeypatch.delenv(name, raising=False)
    fast_products.onednn_is_better.cache_clear()
    yield processor
    fast_products.onednn_is_better.cache_clear()


@needs_onednn
def test_a_processor_with_avx512_of_another_maker(fast_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_products.onednn_is_better()
    assert is_for_onednn(*large_factors())
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "strict")
    fast_products.onednn_is_better.cache_clear()
    assert fast_products.onednn_is_better()


def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.bfloat16() @ right.bfloat16()).float()


def missing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn.no_such_operator(left, right)


@pytest.mark.parametrize("case", ["Intel", "unknown", "AVX2", "no MKL", "BF16", "TF32", "rounded", "missing"])
def test_machines_where_torch_multiplies(case: str, fast_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "Intel":
        fast_machine.write_text("vendor_id : GenuineIntel")
    elif case == "unknown":
        fast_machine.unlink()
    elif case == "AVX2":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    elif case == "no MKL":
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    elif case in ("rounded", "missing"):
        monkeypatch.setattr(fast_products, "_by_onednn", rounded if case == "rounded" else missing)
    else:
        monkeypatch.setenv(fast_products._MODES[case == "TF32"], case)
    assert not fast_products.onednn_is_better()
    left, right = large_factors()
    assert torch.equal(multiply(left, right), left @ right)
