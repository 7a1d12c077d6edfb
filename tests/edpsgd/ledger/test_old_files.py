"""Ledgers and checkpoints of version 0.1.0, with layer scales as Python prints them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import edpsgd
from edpsgd import Ledger, card
from edpsgd.ledger.records import RunRecord

OLD = Path(__file__).parents[2] / "data" / "ledgers_0_1_0"
NAMES = ("shuffled", "paper", "example")
DELTA = 1e-5
SCALES = {"0.weight": 1.0, "0.bias": 2.0, "2.weight": 1.0, "2.bias": 0.5}


def told(name: str) -> dict:
    """What version 0.1.0 said of it."""
    return json.loads((OLD / f"{name}.json").read_text(encoding="utf-8"))


def sections(page: str) -> dict[str, str]:
    """Of a card, by their titles, without the versions of the software that made it."""
    parts = [part.partition("\n\n") for part in page.split("\n## ")]
    return {title: text.strip() for title, _, text in parts if title != "Versions"}


def settings_of(name: str) -> dict:
    """With which version 0.1.0 made the optimizer."""
    shuffled = edpsgd.ShuffledBatches(list(range(20)), 4, collective="local")
    if name == "shuffled":
        decay, scaling = edpsgd.LinearDecay(0.1), edpsgd.FirstStepNorms(noise_multiplier=3.0)
        return {"batches": shuffled, "noise_decay": decay, "layer_scaling": scaling}
    if name == "paper":
        return {"batches": shuffled, "noise": "paper", "layer_scaling": SCALES}
    poisson = edpsgd.PoissonBatches(list(range(20)), 0.2, unit="example", collective="local")
    return {"batches": poisson, "unit": "example", "layer_scaling": edpsgd.FirstStepNorms()}


def resumed(name: str, ledger: Path | None):
    """Model and optimizer of a new process, with the checkpoint of the old one."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    optimizer = edpsgd.PrivateOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=2.0,
        collective="local",
        ledger=ledger,
        **settings_of(name),
    )
    checkpoint = torch.load(OLD / f"{name}.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


@pytest.mark.parametrize("name", NAMES)
def test_a_ledger_says_what_it_said(name) -> None:
    ledger, before = Ledger.read(OLD / f"{name}.jsonl"), told(name)
    bound = ledger.epsilon(DELTA)
    assert float(bound) == pytest.approx(before["epsilon"], rel=1e-9)
    assert str(bound) == before["text"]
    assert [event.steps for event in ledger.events] == before["steps"]
    assert sections(card.make(ledger, DELTA).markdown()) == sections(before["card"])


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_on_and_counts_on(tmp_path, name, has_file) -> None:
    path = Path(shutil.copy(OLD / f"{name}.jsonl", tmp_path)) if has_file else None
    before = told(name)
    model, optimizer = resumed(name, path)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.set_epoch(1)
    rows = next(iter(optimizer.batches))
    losses = model(torch.ones(20, 3)[rows]).square().squeeze(1)
    if name == "example":
        optimizer.backward(losses)
    else:
        losses.mean().backward()
    optimizer.step()
    for old, new in zip(weights, model.parameters(), strict=True):
        assert not torch.equal(old, new)
    *others, last = before["steps"]
    assert [event.steps for event in optimizer.ledger.events] == [*others, last + 1]
    bound = optimizer.epsilon(DELTA)
    assert float(bound) >= before["epsilon"]  # a pass of shuffled batches is paid for once
    assert set(before["text"].split("\n")[1:]) <= set(str(bound).split("\n")[1:])
    optimizer.ledger.close()
    if path is not None:
        again = Ledger.read(path)
        assert again.runs == optimizer.ledger.runs
        assert again.epsilon(DELTA) == bound


def test_layer_scales_are_written_as_data_from_now_on(tmp_path) -> None:
    path = Path(shutil.copy(OLD / "shuffled.jsonl", tmp_path))
    _, optimizer = resumed("shuffled", path)
    optimizer.ledger.close()
    first, last = (json.loads(line) for line in path.read_text().splitlines() if '"run"' in line)
    assert first["run"]["layer_scaling"] == "FirstStepNorms(noise_multiplier=3.0)"
    assert last["run"]["layer_scaling"] == {"measured": True, "noise_multiplier": 3.0}
    old, new = Ledger.read(path).runs
    assert old.layer_scaling == new.layer_scaling == edpsgd.FirstStepNorms(3.0)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (None, None),
        ({"a": 1.0, "b": 2}, {"a": 1.0, "b": 2}),
        ("FirstStepNorms(noise_multiplier=3.0)", edpsgd.FirstStepNorms(3.0)),
        ("FirstStepNorms(noise_multiplier=2)", edpsgd.FirstStepNorms(2.0)),
        ("FirstStepNorms(noise_multiplier=1e-05)", edpsgd.FirstStepNorms(1e-5)),
        ("FirstStepNorms(noise_multiplier=None)", edpsgd.FirstStepNorms()),
        ("FirstStepNorms()", edpsgd.FirstStepNorms()),
    ],
)
def test_layer_scales_in_all_forms(written, meant) -> None:
    run = RunRecord.parse({"id": "a", "layer_scaling": written})
    assert run.layer_scaling == meant
    assert run.has_raw_scales == (meant == edpsgd.FirstStepNorms())
    assert RunRecord.parse(run.to_json()) == run


def test_changes_that_only_the_id_told_are_no_runs_of_their_own() -> None:
    ledger = Ledger()
    runs = [
        {"id": "a", "clip_norm": 1.0},
        {"id": "a, changed", "clip_norm": 1.0, "one_pass": True},
        {"id": "a, changed, changed", "clip_norm": 1.0, "one_pass": True, "loss_scaling": True},
        {"id": "a, changed, changed, seeded", "clip_norm": 1.0, "seeded": True},
    ]
    ledger.load_state_dict({"format": 1, "runs": runs, "events": []})
    assert [run.changes for run in ledger.runs] == [None, "a", "a, changed", None]
    made = card.make(ledger, DELTA)
    assert made.runs == 2
    assert any("GradScaler" in text for text in made.conditions)
    assert any("given seed" in text for text in made.conditions)
