"""The precision of norms, and what single precision cannot hold of a squared norm."""

from __future__ import annotations

import torch

# A squared norm above this times the number of its products hardly notices what they lost below the
# range.
UNDERFLOW = 1e6 * torch.finfo(torch.float32).tiny


def exact(values: torch.Tensor) -> torch.Tensor:
    """The same values in single precision at least."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def rounding(device: torch.device) -> float:
    """By how much products of matrices may be off, relative: more if torch may round factors."""
    return 1e-2 if may_round_factors(device) else 1e-5


def may_round_factors(device: torch.device) -> bool:
    """Whether torch's settings allow products of factors that are rounded to half precision."""
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        return torch.get_float32_matmul_precision() != "highest"
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    places = (torch.backends, getattr(backend, "matmul", None))
    settings = {getattr(place, "fp32_precision", "ieee") for place in places}
    return bool(settings & {"tf32", "bf16"})


def is_out_of_range(squares: torch.Tensor, lost: torch.Tensor | float) -> torch.Tensor:
    """Whether each squared norm may have left the range of single precision.

    Args:
        squares: of the norms, one for each unit.
        lost: a squared norm below this may have lost something that matters.
    """
    if squares.dtype is torch.float64:
        return torch.zeros_like(squares, dtype=torch.bool)
    return ~((squares > lost) & torch.isfinite(squares))
