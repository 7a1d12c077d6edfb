"""Records of runs: written and read they are the same; what no run can have written is refused."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edpsgd
from edpsgd import FirstStepNorms, LedgerError
from edpsgd.bookkeeping import _FLAGS as _BITS
from edpsgd.ledger.records import MARKS, BatchesRecord, RunRecord
from edpsgd.ledger.selection import PlannedSteps, Selection
from tests.helpers.common import Bag, private

WORDS = st.text(max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
OF_TYPE = {
    "str | None": st.none() | WORDS,
    "int | None": st.none() | st.integers(0, 10**9),
    "float | None": st.none() | NUMBERS,
    "bool | None": st.none() | st.booleans(),
    "bool": st.booleans(),
    "str": WORDS.filter(lambda text: not text.endswith(", changed")),
    "tuple[int, int] | None": st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
}
SCALES = st.dictionaries(WORDS, NUMBERS, max_size=3)
MEASURED = st.builds(FirstStepNorms, st.none() | st.floats(1e-6, 1e6))


def records(kind: type, **special: st.SearchStrategy) -> st.SearchStrategy:
    """All that a record can hold, each field by its type."""
    known = {item.name for item in fields(kind)}
    others = st.dictionaries(WORDS.filter(lambda name: name not in known), JSON, max_size=3)
    values = {}
    for item in fields(kind):
        if item.type in OF_TYPE:
            values[item.name] = OF_TYPE[item.type]
    return st.builds(kind, **{**values, **special, "others": others})


ANY_SCALES = st.none() | SCALES | MEASURED
ANY_BATCHES = st.none() | records(BatchesRecord)
PLANS = st.builds(PlannedSteps, st.floats(0, 9), st.none() | st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))
ANY_SELECTION = st.none() | records(
    Selection,
    mean=st.floats(1, 1000),
    shape=st.floats(0, 9),
    score=st.sampled_from(["public", "exact"]),
    score_noise=st.none(),
    held_out=st.just(False),
    candidates=st.lists(st.lists(PLANS, max_size=2).map(tuple), max_size=2).map(tuple),
)
RUNS = records(RunRecord, layer_scaling=ANY_SCALES, batches=ANY_BATCHES, selection=ANY_SELECTION)


@given(RUNS)
def test_a_record_is_the_same_when_it_was_written_and_read(run: RunRecord) -> None:
    written = json.dumps(run.to_json(), sort_keys=True)
    read = RunRecord.parse({"id": "", **json.loads(written)})
    assert read == run
    assert json.dumps(read.to_json(), sort_keys=True) == written  # so on all workers
    for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert copied == run


@pytest.mark.parametrize(
    "batches",
    [
        lambda: edpsgd.ShuffledBatches(20, 4, collective="local"),
        lambda: edpsgd.PoissonBatches(20, 0.2, collective="local"),
        lambda: edpsgd.PoissonUsers([5, 9, 3], 0.5, collective="local"),
        lambda: edpsgd.FixedSizeUsers(20, 3, collective="local"),
        lambda: None,
    ],
)
def test_all_that_optimizers_and_samplers_say_has_a_field(batches) -> None:
    sampler = batches()
    is_of_users = isinstance(sampler, edpsgd.PoissonUsers | edpsgd.FixedSizeUsers)
    settings = {"unit": "user" if is_of_users else "micro_batch", "collective": "local"}
    [run] = private(Bag(), batches=sampler, **settings).ledger.runs
    assert not run.others
    if sampler is not None:
        assert not run.batches.others
        assert run.batches.to_json() == sampler.describe()


def test_what_was_not_recorded_is_not_written() -> None:
    run = RunRecord.parse({"id": "a", "workers": 2})
    assert (run.clip_norm, run.seeded, run.begins_after, run.one_pass) == (None, None, None, False)
    choices = ("noise_decay", "layer_scaling", "divisor", "compression", "batches")
    assert run.to_json() == {"id": "a", "workers": 2, **dict.fromkeys(choices)}


def test_given_scales_cannot_be_changed() -> None:
    given_scales = {"a": 1.0}
    run = RunRecord(id="a", layer_scaling=given_scales)
    given_scales["a"] = 2.0
    assert run.layer_scaling == {"a": 1.0}
    with pytest.raises(TypeError):
        run.layer_scaling["a"] = 3.0


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"id": 3},
        {"workers": "2"},
        {"workers": 1.5},
        {"workers": True},
        {"workers": None},
        {"clip_norm": "1.0"},
        {"clip_norm": True},
        {"clip_norm": [1.0]},
        {"noise_multiplier": None},
        {"noise_decay": 0.5},
        {"unit": 1},
        {"unit": ["example"]},
        {"seeded": 0},
        {"seeded": "no"},
        {"seeded": None},
        {"one_pass": 1},
        {"one_pass": None},
        {"clip_norm_restored": "yes"},
        {"changes": 3},
        {"begins_after": [1]},
        {"begins_after": [1, True]},
        {"begins_after": [1, 2.0]},
        {"begins_after": 3},
        {"begins_after": None},
        {"batches": "poisson"},
        {"batches": []},
        {"batches": False},
        {"batches": {"seeded": 1}},
        {"batches": {"kind": None}},
        {"batches": {"examples": 3.5}},
        {"layer_scaling": 1.0},
        {"layer_scaling": []},
        {"layer_scaling": {"a": "1.0"}},
        {"layer_scaling": {"a": True}},
        {"layer_scaling": {"measured": True}},
        {"layer_scaling": {"measured": True, "noise_multiplier": "3"}},
        {"layer_scaling": {"measured": True, "noise_multiplier": True}},
        {"layer_scaling": {"measured": True, "noise_multiplier": 0.0}},
        {"layer_scaling": {"measured": True, "noise_multiplier": -1.0}},
        {"layer_scaling": {"measured": True, "noise_multiplier": float("nan")}},
        {"layer_scaling": {"measured": True, "noise_multiplier": 10**400}},
        {"layer_scaling": {"measured": True, "noise_multiplier": 3.0, "more": 1}},
        {"layer_scaling": {"measured": False, "noise_multiplier": 3.0}},
        {"layer_scaling": "FirstStepNorms(noise_multiplier=three)"},
        {"layer_scaling": "FirstStepNorms(noise_multiplier=nan)"},
        {"layer_scaling": "FirstStepNorms(noise_multiplier=0.0)"},
        {"layer_scaling": "FirstStepNorms(noise_multiplier=3.0) "},
        {"layer_scaling": "None"},
    ],
)
def test_what_no_run_can_have_written_is_refused(changes) -> None:
    with pytest.raises(LedgerError, match=r"^(a run|the batches of a run) "):
        RunRecord.parse({"id": "a", **changes})


@pytest.mark.parametrize("data", [None, 3, [], "run", {}, {"workers": 1}])
def test_what_is_no_record_is_refused(data) -> None:
    with pytest.raises(LedgerError, match="a run must have settings and an id"):
        RunRecord.parse(data)


def test_marks_are_those_that_were_written_before_and_fit_into_a_byte() -> None:
    """Workers of two versions would else tell each other another condition."""
    before = {
        "one_pass": 1,
        "loss_scaling": 2,
        "clip_fraction_read": 4,
        "shared_rows": 8,
        "wrong_gradients": 16,
        "uncompared": 32,
    }
    assert before.items() <= _BITS.items()
    assert max(_BITS.values()) < 256
    assert not any(getattr(RunRecord(), mark) for mark in MARKS)


def test_a_plain_dictionary_and_a_record_begin_the_same_run() -> None:
    plain, typed = edpsgd.Ledger(), edpsgd.Ledger()
    sampler = {"kind": "poisson", "sampling_rate": 0.1}
    plain.begin_run({"unit": "example", "batches": sampler}, run_id="a")
    batches = BatchesRecord(kind="poisson", sampling_rate=0.1)
    typed.begin_run(RunRecord(unit="example", batches=batches), run_id="a")
    assert plain.runs == typed.runs
    state = plain.state_dict()
    assert json.loads(json.dumps(state)) == state
