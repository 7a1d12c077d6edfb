"""Checks of plain arguments, so that all of the project refuses them in the same words."""

from __future__ import annotations

import math
from typing import TypeGuard

import numpy as np


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuses what is not an int >= ``least``; a bool is none.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {shown(value)}")


def check_number(name: str, value: object, low: float, *, strict: bool) -> None:
    """Refuses what is not a finite int or float > ``low``, or >= ``low`` if not ``strict``.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    sign = ">" if strict else ">="
    if not _is_finite_number(value) or value < low or (strict and value == low):
        raise ValueError(f"{name} must be a finite number {sign} {low:g}, got {shown(value)}")


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_seed(seed: object) -> None:
    """Refuses what is not an int or None; never shows it, as it may be meant to be secret."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed must be None or an int, got a {type(seed).__name__}")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuses what is not among the allowed values; the error shows it, so that it must be no private text."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def shown(value: object) -> str:
    """What an error says of a value: a number or None as it is, of anything else only its type.

    Anything else may hold private text.

    Example:
        >>> shown(-1), shown(["call anna"])
        ('-1', 'a list')
    """
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


UNITS = ("micro_batch", "example", "user")


def is_real_number(value: object) -> bool:
    """Whether it is a number of Python or numpy, infinite ones included, and neither NaN nor a bool."""
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and not math.isnan(float(value))  # type: ignore[arg-type]
