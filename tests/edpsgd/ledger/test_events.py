"""Events that no run can have written are refused, and those of different neighbours are not mixed."""

from __future__ import annotations

import pytest

import edpsgd
from edpsgd import Ledger, LedgerError
from tests.helpers.ledgers import event, forged

WRONG = {
    "steps": [-5, 1.5, True, 2**60, 10**400, float("nan"), "3", None],
    "noise_multiplier": [-1.0, float("nan"), float("inf"), True, "1", 10**400],
    "sampling_rate": [-0.1, 1.5, float("nan"), True, "0.1"],
    "epoch": [1.5, True, "0"],
    "kind": ["nothing", 3, ["gradients"]],
    "batching": [None, 3, "shuffled\x1b[2J"],
    "more": [1],
}


def test_poisson_and_other_batches_do_not_mix() -> None:
    ledger = edpsgd.Ledger()
    ledger.open_epoch(0, "poisson", 0.1)
    ledger.charge(1.0)
    for other in ("shuffled", "unvouched"):
        with pytest.raises(edpsgd.LedgerError, match="poisson batches, and .* speak of other neighbours"):
            ledger.open_epoch(1, other)
    ledger.open_epoch(1, "poisson", 0.2)
    other = edpsgd.Ledger()
    other.open_epoch(0, "shuffled")
    other.charge(1.0)
    other.open_epoch(1)  # the user's word, from here on
    with pytest.raises(edpsgd.LedgerError, match="shuffled batches, and poisson ones"):
        other.open_epoch(1, "poisson", 0.1)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_values_that_no_run_writes_are_refused(tmp_path, name, value) -> None:
    path = forged(tmp_path / "ledger.jsonl", {"run": {"id": "a"}}, event(), event(**{name: value}))
    for read in (Ledger.read, Ledger):
        with pytest.raises(LedgerError, match="line 3: an event has"):
            read(path)
    state = {"format": 1, "runs": [], "events": [event(**{name: value})["event"]]}
    with pytest.raises(LedgerError, match="an event has"):
        Ledger().load_state_dict(state)
