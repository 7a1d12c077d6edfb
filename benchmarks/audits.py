"""Audits of the mechanism against its claims: `python -m benchmarks.audits`.

The real optimizer, one step, in two neighbouring worlds, many times: a lower bound of μ and ε beside what the printed
multiplier claims. Calibrated noise and the published algorithm's, for several numbers of micro-batches and scales.
The noise is seeded, so that a second run finds the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from benchmarks.harness import results
from benchmarks.harness.rows.audits import AuditRow, Audits
from benchmarks.report.render import page
from edpsgd.distributed.launchers import resolve
from mia.audited_step import Setup
from mia.mechanism import audit_mechanism

DELTA, CONFIDENCE, TRIALS, SEED = 1e-5, 0.95, 500, 0
SCALES = ("none", "public:1,2,4")
MICRO_BATCHES = (1, 2, 8)


def measure(noise: str, micro_batches: int, scaling: str, trials: int, seed: int) -> AuditRow:
    """One audit. Audits of scales would take two seeds for each trial, from this one on."""
    setup = Setup(noise=noise, micro_batches=micro_batches, scaling=scaling, seed=seed)
    found = audit_mechanism(setup, resolve("local"), trials=trials, delta=DELTA, confidence=CONFIDENCE)
    if found.bounds is None:
        raise RuntimeError("an audit without trials: the furthest move is too far for any")
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = results.reducible("audits", __doc__).parse_args(arguments)
    start, trials = time.monotonic(), TRIALS // 5 if flags.reduced else TRIALS
    settings = itertools.product(("calibrated", "paper"), MICRO_BATCHES, SCALES)
    rows = [measure(*setting, trials, SEED + 2 * trials * number) for number, setting in enumerate(settings)]
    found: Audits = {
        "command": results.command("audits", flags),
        "minutes": (time.monotonic() - start) / 60,
        "machine": results.machine(),
        "seed": SEED,
        "trials": trials,
        "delta": DELTA,
        "confidence": CONFIDENCE,
        "rows": rows,
    }
    results.save(flags.out, "audits", found, page("audits", found))


if __name__ == "__main__":
    main()
