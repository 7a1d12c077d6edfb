"""Gradients of many units, examples or groups of them, in one backward pass."""

from edpsgd.units.engine import UnitGradients, WrongGradients

__all__ = ["UnitGradients", "WrongGradients"]
