"""Products of large matrices on CPUs, by the faster of two libraries.

torch multiplies matrices by MKL, which picks its code by the maker of the processor: on one with
AVX-512 that is not Intel's, half of the width stays unused. oneDNN goes by the instructions alone
and is twice as fast there. ``torch.mm`` cannot be told to use it for single precision. What torch's
compiler calls for a linear layer can: an operator without documentation, and so it is tried once
before it is trusted. (A linear layer of ``Tensor.to_mkldnn()`` is documented and computed by oneDNN
too, but it copies both factors and the product, which costs a quarter of what is gained.)

Who multiplies follows from the factors, torch's settings and the processor, and from no
measurement: a run that is made again has the same numbers.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

from edpsgd.per_example.precision import may_round_factors

_LEAST_SIDE = 16  # of a matrix: MKL is good at vectors
_LEAST_STEPS = 1 << 22  # multiplications, in less time than a call takes
_CHUNK = 1 << 22  # elements of a sum that may be made at a time
_CPU = torch.device("cpu")
_PROCESSOR = Path("/proc/cpuinfo")
_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")  # what oneDNN is told


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product left @ right of two matrices."""
    if is_for_onednn(left, right):
        return _by_onednn(left, right)
    return torch.mm(left, right)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to a matrix of that shape and precision."""
    if not is_for_onednn(left, right):
        total.addmm_(left, right)
        return
    at_once = max(1, _CHUNK // total.shape[1])
    parts = zip(torch.split(total, at_once), torch.split(left, at_once), strict=True)
    for some_of_total, some_of_left in parts:
        some_of_total.add_(_by_onednn(some_of_left, right))


def multiply_pairs(lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
    """The products lefts[i] @ rights[i] of all pairs of matrices."""
    if len(lefts) == 0 or not is_for_onednn(lefts[0], rights[0]):
        return torch.bmm(lefts, rights)
    products = lefts.new_empty((len(lefts), lefts.shape[1], rights.shape[2]))
    for product, left, right in zip(products, lefts, rights, strict=True):
        product.copy_(_by_onednn(left, right))
    return products


def is_for_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether oneDNN multiplies two matrices as exactly as ``torch.mm``, and faster."""
    sizes = (*left.shape, right.shape[1])
    is_large = min(sizes) >= _LEAST_SIDE and left.numel() * right.shape[1] >= _LEAST_STEPS
    if not (is_large and _is_plain(left) and _is_plain(right)):
        return False
    is_allowed = bool(torch.backends.mkldnn.enabled) and not may_round_factors(_CPU)
    return is_allowed and onednn_is_better()


def _is_plain(matrix: torch.Tensor) -> bool:
    """Whether it is nothing but numbers of single precision on a CPU."""
    has_numbers = type(matrix) is torch.Tensor and matrix.layout is torch.strided
    is_single = matrix.dtype is torch.float32 and matrix.device.type == "cpu"
    return has_numbers and is_single and not matrix.requires_grad


def _by_onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The same product, as a linear layer of the left factor with the weight rightᵀ."""
    weight = right.T
    if not (weight.is_contiguous() or right.is_contiguous()):  # oneDNN is slow with other strides
        weight = weight.contiguous()
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return found


@cache
def onednn_is_better() -> bool:
    """Whether MKL is slow on this processor, and oneDNN there and exact."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    is_mkl_slow = has_mkl and has_avx512 and not _is_intel()
    return is_mkl_slow and has_onednn and _is_strict() and _agrees()


def _is_intel() -> bool:
    """Whether MKL knows the processor for its maker's; yes where nobody says."""
    try:
        return "GenuineIntel" in _PROCESSOR.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def _is_strict() -> bool:
    """Whether oneDNN's own settings leave factors of single precision alone."""
    return {os.environ.get(name, "STRICT").upper() for name in _MODES} == {"STRICT"}


def _agrees() -> bool:
    """Whether this torch has the operator, and it multiplies as it should."""
    numbers = torch.linspace(-1.0, 1.0, 96 * 160, dtype=torch.float32, device=_CPU)
    left, right = numbers.view(160, 96).T, numbers.view(160, 96)
    expected = torch.mm(left.double(), right.double())
    try:
        found = _by_onednn(left, right)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
