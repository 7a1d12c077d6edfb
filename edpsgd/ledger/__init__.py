"""What was released, as plain, append-only data; and what it amounts to: ε with its conditions, and budgets."""

from edpsgd.ledger.budget import Budget, BudgetExhausted
from edpsgd.ledger.events import Event, LedgerError, LedgerUnavailable
from edpsgd.ledger.guarantee import Bound, Report, format_epsilon
from edpsgd.ledger.ledger import BLOCK, Ledger
from edpsgd.ledger.records import RunRecord

__all__ = [
    "BLOCK",
    "Bound",
    "Budget",
    "BudgetExhausted",
    "Event",
    "Ledger",
    "LedgerError",
    "LedgerUnavailable",
    "Report",
    "RunRecord",
    "format_epsilon",
]
