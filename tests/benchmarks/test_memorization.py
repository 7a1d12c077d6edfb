"""The federated secret sharer in small: SGD memorises what a few users say often, DP-FedAvg does not.

The benchmark (benchmarks/memorization.py) has the tables; this is the same code with fewer users. Of what DP-FedAvg
does, clipping alone hides the canaries here; the noise is what makes it a promise, and ε is checked beside. That holds
for what few users say: with a dozen for each canary (a rate of 0.04) their median exposure was 1.9 bits above that of
phrases that nobody said, and in the benchmark it is more.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from benchmarks import memorization
from benchmarks.memorization import REDUCED as SMALL
from benchmarks.memorization import Row, Scale, collect, prepare, rows
from benchmarks.report.sections.attacks import tables_of


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("runs")
    prepare(SMALL, runs)
    wanted = {("SGD", 8), ("FedAvg", 60), ("DP-FedAvg", 60)}
    chosen = [row for row in rows(SMALL) if not row.is_iid and (row.name, row.batch) in wanted]
    assert len(chosen) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memorization, "_command", lambda folder, module, *flags: import_module(module).main(flags))
        for row in chosen:
            memorization.run(row, SMALL, runs)
    return {**collect(rows(SMALL), SMALL, runs), "folder": runs}


def memorised(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Of the canaries that were inserted, and of the controls."""
    row = next(row for row in found["rows"] if row["name"] == name)
    return row["memorised"]["configurations"]


def test_sgd_memorises_and_private_training_does_not(found) -> None:
    inserted, controls = memorised(found, "SGD")
    assert inserted["insertions"] > 50
    assert inserted["random_sampling"] >= 2
    assert controls["random_sampling"] == 0
    federated, unseen = memorised(found, "FedAvg")
    assert federated["random_sampling"] < inserted["random_sampling"]
    assert federated["median_exposure"] > unseen["median_exposure"] + 2  # bits, of 12.3: it knows them all the same
    private, unseen = memorised(found, "DP-FedAvg")
    assert private["random_sampling"] == private["beam_search"] == unseen["random_sampling"] == 0
    assert private["median_exposure"] < unseen["median_exposure"] + 1  # like phrases that nobody said


def test_the_private_model_is_of_use_and_its_epsilon_is_small(found) -> None:
    plain, private = (next(row for row in found["rows"] if row["name"] == name) for name in ("FedAvg", "DP-FedAvg"))
    assert private["epsilon"] < 3
    assert private["test_perplexity"] < 1.1 * plain["test_perplexity"] < 0.7 * (SMALL.words + 3)
    assert "epsilon" not in plain


def test_complete_runs_are_not_run_again(found, monkeypatch) -> None:
    monkeypatch.setattr(memorization, "_command", lambda *arguments: pytest.fail("it was complete"))
    row = next(row for row in rows(SMALL) if row.name == "DP-FedAvg" and not row.is_iid)
    memorization.run(row, SMALL, found["folder"])


def test_the_tables(found) -> None:
    """Of users as they are: none of IID data, which were not run."""
    tables = {row["name"]: tables_of(row) for row in found["rows"]}
    assert {number for numbers in tables.values() for number in numbers} == {1, 2, 4, 6, 7}
    assert tables["DP-FedAvg"] == [2, 6]


def test_every_row_has_a_folder_of_its_own() -> None:
    folders = [row.folder for row in rows(Scale())]
    assert len(set(folders)) == len(folders)
    equal = [row for row in rows(Scale()) if 7 in row.tables]
    passes = {round(_passes(row), 1) for row in equal}
    assert len(passes) == 1


def _passes(row: Row) -> float:
    scale = Scale()
    return row.steps * row.batch / (scale.users * (scale.sentences if row.name.startswith("SGD") else 1))
