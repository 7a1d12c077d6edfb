"""Audits of the mechanism against its claims: `python -m benchmarks.audits`.

The real optimizer, one step, in two neighbouring worlds, many times: a lower bound of μ and ε beside what the printed
multiplier claims. Calibrated noise and the published algorithm's, for several numbers of micro-batches and scales.
The noise is seeded, so that a second run finds the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import results
from edpsgd.distributed.launchers import resolve
from mia.mechanism import Setup, audit_mechanism

DELTA, CONFIDENCE, TRIALS, SEED = 1e-5, 0.95, 500, 0
VERDICT = "A claim is refuted where the lower bound of μ is above it; the bound of ε is the weaker one of the two."
NEIGHBOURS = "for replacing one example"
SCALES = ("none", "public:1,2,4")
MICRO_BATCHES = (1, 2, 8)


def measure(noise: str, micro_batches: int, scaling: str, trials: int, seed: int) -> dict[str, Any]:
    """One audit. Audits of scales would take two seeds for each trial, from this one on."""
    setup = Setup(noise=noise, micro_batches=micro_batches, scaling=scaling, seed=seed)
    found = audit_mechanism(setup, resolve("local"), trials=trials, delta=DELTA, confidence=CONFIDENCE)
    return {
        "noise": noise,
        "micro_batches": micro_batches,
        "clipping": setup.clipping,
        "scaling": scaling,
        "claimed_mu": found.mu,
        "mu": found.bounds.mu,
        "claimed_epsilon": found.epsilon,
        "epsilon": found.bounds.epsilon,
        "is_refuted": found.is_refuted,
    }


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    rows = [
        (row["noise"], str(row["micro_batches"]), row["scaling"], f"{row['claimed_mu']:.3f}", f"{row['mu']:.3f}",
         results.epsilon(row["claimed_epsilon"]), f"{row['epsilon']:.3f}", "refuted" if row["is_refuted"] else "stands")
        for row in found["rows"]
    ]  # fmt: skip
    about = (
        f"One step, {found['trials']} trials in each of two neighbouring worlds, bounds with confidence "
        f"{found['confidence']:g}; μ and ε {NEIGHBOURS}, δ = {found['delta']:g}. {VERDICT}"
    )
    head = ("noise", "micro-batches", "layer scales", "μ claimed", "μ at least", "ε claimed", "ε at least", "claim")
    return "\n".join(["# Audits", "", results.made(found), "", about, "", *results.table(head, rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = results.reducible("audits", __doc__).parse_args(arguments)
    start, trials = time.monotonic(), TRIALS // 5 if flags.reduced else TRIALS
    settings = itertools.product(("calibrated", "paper"), MICRO_BATCHES, SCALES)
    rows = [measure(*setting, trials, SEED + 2 * trials * number) for number, setting in enumerate(settings)]
    found = {
        "command": results.command("audits", flags),
        "minutes": (time.monotonic() - start) / 60,
        "machine": results.machine(),
        "seed": SEED,
        "trials": trials,
        "delta": DELTA,
        "confidence": CONFIDENCE,
        "rows": rows,
    }
    results.save(flags.out, "audits", found, page(found))


if __name__ == "__main__":
    main()
