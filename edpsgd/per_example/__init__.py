"""Gradients of single examples, or of groups of them, in one backward pass; README.md says how."""

from edpsgd.per_example.engine import UnitGradients
from edpsgd.per_example.errors import WrongGradients

__all__ = ["UnitGradients", "WrongGradients"]
