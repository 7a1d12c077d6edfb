"""edpsgd: efficient differentially private SGD for torch, on one process, Horovod or torch.distributed."""

from edpsgd import accounting, card
from edpsgd._version import VERSION
from edpsgd.distributed import Collective
from edpsgd.federated import FedAvg, Federated, FedSGD
from edpsgd.ledger.budget import Budget, BudgetExhausted
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.guarantee import Bound, Report
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.selection import Selection
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.optimizer import PrivateOptimizer
from edpsgd.sampling.collate import Collate
from edpsgd.sampling.poisson import PoissonBatches
from edpsgd.sampling.shuffled import ShuffledBatches
from edpsgd.sampling.user_denominators import ClippedDenominator, FixedDenominator
from edpsgd.sampling.users import FixedSizeUsers, PoissonUsers
from edpsgd.schedules import ExponentialDecay, LinearDecay, parse_decay
from edpsgd.validation.losses import check_losses
from edpsgd.validation.models import check_model

__version__ = VERSION

__all__ = [
    "Bound",
    "Budget",
    "BudgetExhausted",
    "ClippedDenominator",
    "Collate",
    "Collective",
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
    "Selection",
    "ShuffledBatches",
    "accounting",
    "card",
    "check_losses",
    "check_model",
    "parse_decay",
]
