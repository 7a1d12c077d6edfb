"""Ledgers to make privacy cards of, and the parts of their pages."""

from __future__ import annotations

from edpsgd import card
from edpsgd.ledger import Ledger

RUN = {
    "workers": 4,
    "clip_norm": 0.75,
    "noise_multiplier": 1.0,
    "noise_decay": "LinearDecay(tau=0.1)",
    "clipping": "flat",
    "unit": "micro_batch",
    "layer_scaling": None,
    "noise": "calibrated",
    "noise_placement": "sharded",
    "divisor": None,
    "compression": None,
    "seeded": False,
    "sensitivity": 1.5,
    "batches": None,
}
SHUFFLED = {
    "kind": "shuffled",
    "examples": 1000,
    "batch_size": 8,
    "micro_batches": 2,
    "steps_per_epoch": 16,
    "seeded": False,
    "order_compared": True,
}
POISSON = {
    "kind": "poisson",
    "examples": 1234,
    "sampling_rate": 0.01,
    "micro_batches": 1,
    "steps_per_epoch": 100,
    "seeded": False,
    "slots": "drawn",
    "order_compared": True,
}


def ledger_of(*runs: dict, epochs: int = 1, z: float = 1.0, tau: float = 0.0, steps: int = 3, **event) -> Ledger:
    ledger = Ledger()
    for run in runs:
        ledger.begin_run(run)
    for epoch in range(epochs):
        ledger.open_epoch(epoch, **event)
        for _ in range(steps):
            ledger.charge(z / (1 + tau * epoch))
    return ledger


def text_of(changes: dict, **kwargs) -> str:
    return card.make(ledger_of({**RUN, **changes}, **kwargs), 1e-5).markdown()


def section(markdown: str, title: str) -> str:
    return markdown.split(f"## {title}\n\n")[1].split("\n\n## ")[0]
