"""Events open, continue, mix and are refused (privacy.md section 7)."""

from __future__ import annotations

import pytest

import edpsgd
from tests.helpers.common import Bag, private


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


@pytest.mark.parametrize("lost", [0, 1])
def test_only_a_ledger_without_lost_steps_continues_an_event(tmp_path, lost) -> None:
    """Steps that the checkpoint does not know of run again, on the same examples: their term is paid again."""
    path = tmp_path / "ledger.jsonl"
    ledger = edpsgd.Ledger(path)
    ledger.begin_run({})
    ledger.open_epoch(3, "shuffled")
    for _ in range(5):
        ledger.charge(1.0)
    state = ledger.state_dict()
    for _ in range(lost):
        ledger.charge(1.0)
    ledger.close()
    resumed = edpsgd.Ledger(path)
    resumed.begin_run({})
    resumed.load_state_dict(state)
    resumed.continue_epoch(3, "shuffled")
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == ([6] if lost == 0 else [6, 1])
    resumed.close()
    assert edpsgd.Ledger.read(path).events == resumed.events


def test_after_a_crash_the_reserved_steps_count_and_a_new_event_begins(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = edpsgd.Ledger(path)
    ledger.begin_run({})
    ledger.open_epoch(0, "shuffled")
    ledger.charge(1.0)
    state = ledger.state_dict()
    ledger._file.close()  # as a kill does: nothing more is written
    ledger._file = None
    resumed = edpsgd.Ledger(path)
    resumed.load_state_dict(state)
    resumed.continue_epoch(0, "shuffled")
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == [edpsgd.ledger.BLOCK, 1]


@pytest.mark.parametrize(
    ("epoch", "batching", "rate"), [(1, "shuffled", None), (0, "poisson", 0.1), (0, "poisson", 0.2)]
)
def test_another_epoch_or_rate_is_another_event(epoch, batching, rate) -> None:
    ledger = edpsgd.Ledger()
    kind = ("poisson", 0.3) if batching == "poisson" else ("shuffled", None)
    ledger.open_epoch(0, *kind)
    ledger.charge(1.0)
    resumed = edpsgd.Ledger()
    resumed.load_state_dict(ledger.state_dict())
    resumed.continue_epoch(epoch, batching, rate)
    resumed.charge(1.0)
    assert [e.steps for e in resumed.events] == [1, 1]


def test_epsilon_of_a_file_is_that_of_the_run(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    model = Bag((5,))
    batches = edpsgd.PoissonBatches(20, 0.2)
    optimizer = private(model, ledger=path, batches=batches, noise_decay=edpsgd.LinearDecay(0.3))
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        for _ in batches:
            optimizer.step()
    optimizer.ledger.close()
    found = edpsgd.Ledger.read(path)
    assert float(found.epsilon(1e-5)) == pytest.approx(float(optimizer.epsilon(1e-5)), rel=1e-9)
    assert found.report(1e-5).bounds[0] == found.epsilon(1e-5)
