"""Samplers of examples and of users: what they draw is what the ledger says, and the accountant relies on."""

from edpsgd.sampling.base import Batches
from edpsgd.sampling.collate import Collate
from edpsgd.sampling.poisson import PoissonBatches
from edpsgd.sampling.shuffled import ShuffledBatches
from edpsgd.sampling.user_denominators import ClippedDenominator, FixedDenominator
from edpsgd.sampling.users import FixedSizeUsers, PoissonUsers, Users

__all__ = [
    "Batches",
    "ClippedDenominator",
    "Collate",
    "FixedDenominator",
    "FixedSizeUsers",
    "PoissonBatches",
    "PoissonUsers",
    "ShuffledBatches",
    "Users",
]
