"""Events by hand."""

from __future__ import annotations

from edpsgd.ledger.events import Event


def gradients(epoch: int | None = 0, z: float | None = 2.0, steps: int = 10, **more) -> Event:
    return Event("gradients", epoch, z, steps, **{"batching": "shuffled", **more})


def poisson(epoch: int | None = 0, z: float = 1.0, steps: int = 10, rate: float = 0.1) -> Event:
    return gradients(epoch, z, steps, batching="poisson", sampling_rate=rate)


def norms(z: float, batching: str = "unvouched") -> Event:
    return Event("layer_norms", None, z, 1, batching)
