"""edpsgd: efficient differentially private SGD for torch, on one process, Horovod or torch.distributed."""

from edpsgd.checks import check_model
from edpsgd.clipping import FirstStepNorms
from edpsgd.ledger import Event, Ledger, LedgerError
from edpsgd.noise import ExponentialDecay, LinearDecay
from edpsgd.optimizer import PrivateOptimizer

__version__ = "0.1.0"

__all__ = [
    "Event",
    "ExponentialDecay",
    "FirstStepNorms",
    "Ledger",
    "LedgerError",
    "LinearDecay",
    "PrivateOptimizer",
    "check_model",
]
