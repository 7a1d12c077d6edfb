"""edpsgd: efficient differentially private SGD for torch, on one process, Horovod or torch.distributed."""

from edpsgd import accounting, card
from edpsgd.bounds import Bound, Report
from edpsgd.budget import Budget, BudgetExhausted
from edpsgd.checks import check_model
from edpsgd.clipping import FirstStepNorms
from edpsgd.cohorts import ClippedDenominator, FixedDenominator, FixedSizeUsers, PoissonUsers
from edpsgd.collate import Collate
from edpsgd.events import Event, LedgerError
from edpsgd.federated import FedAvg, Federated, FedSGD
from edpsgd.independence import check_losses
from edpsgd.ledger import Ledger
from edpsgd.noise import ExponentialDecay, LinearDecay
from edpsgd.optimizer import PrivateOptimizer
from edpsgd.sampling import PoissonBatches, ShuffledBatches

__version__ = "0.1.0"

__all__ = [
    "Bound",
    "Budget",
    "BudgetExhausted",
    "ClippedDenominator",
    "Collate",
    "Event",
    "ExponentialDecay",
    "FedAvg",
    "FedSGD",
    "Federated",
    "FirstStepNorms",
    "FixedDenominator",
    "FixedSizeUsers",
    "Ledger",
    "LedgerError",
    "LinearDecay",
    "PoissonBatches",
    "PoissonUsers",
    "PrivateOptimizer",
    "Report",
    "ShuffledBatches",
    "accounting",
    "card",
    "check_losses",
    "check_model",
]
