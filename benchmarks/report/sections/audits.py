"""The section on audits: what the mechanism really gives."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.rows.audits import AuditRow, Audits
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, epsilon, number
from benchmarks.report.plots import audit_name


def audits(found: Audits) -> Iterator[Block]:
    """What the mechanism really gives, by attacking it."""
    about = f"{found['trials']} trials, confidence {found['confidence']:g}, δ = {found['delta']:g}"
    yield Plots(
        f"A lower bound above the claim refutes it: μ is the distance that noise has to hide, smaller is more private. "
        f"{about}.",
        plots.audits(found),
    )
    yield Table[AuditRow](
        f"Claims and what an audit finds in one step, {about}, trials in each of two neighbouring worlds; μ and ε are "
        "for replacing one example. A claim is refuted where the lower bound of μ is above it; the bound of ε is the "
        "weaker one of the two.",
        found["rows"],
        {
            "mechanism": audit_name,
            "μ claimed": lambda row: number(row["claimed_mu"], 3),
            "μ at least": lambda row: number(row["mu"], 3),
            "ε claimed": lambda row: epsilon(row["claimed_epsilon"]),
            "ε at least": lambda row: number(row["epsilon"], 3),
            "claim": lambda row: "refuted" if row["is_refuted"] else "stands",
        },
    )
