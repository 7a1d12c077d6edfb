"""``edpsgd epsilon``: ε of a noise multiplier by every method."""

from __future__ import annotations

import argparse

from edpsgd.cli.flags import training_of
from edpsgd.cli.output import bound_label, json_page, refuse, table_lines
from edpsgd.ledger.guarantee import format_epsilon
from edpsgd.mechanism import sensitivity
from edpsgd.planning import Schedule, Training


def epsilon_page(args: argparse.Namespace) -> str:
    """What the command prints; with --paper, what the noise claims beside what it does."""
    training = training_of(args)
    factor = _paper_factor(args) if args.paper else 1.0
    claimed = _accounted(args, training, args.noise)
    true = _accounted(args, training, args.noise * factor) if args.paper else claimed
    if args.json:
        extra = {"claimed": claimed.data(training), "paper_factor": factor} if args.paper else {}
        return json_page({"noise": args.noise, **training.data(), **true.data(training), **extra})
    lines = [f"noise multiplier {args.noise:g} in epoch 0, {true.z[-1] / factor:.6g} in the last", *training.lines()]
    head = ["ε at δ", f"{training.delta:g}"]
    columns = [true]
    if args.paper:
        lines += [f"  real multiplier {true.z[0]:.8g} in epoch 0, z/(2·√(N·K)·max α): the published algorithm", ""]
        head = ["", "as claimed", "true"]
        columns = [claimed, true]
    rows = [head]
    for bounds in zip(*(column.report.bounds for column in columns), strict=True):
        rows.append([bound_label(bounds[0], true.report), *(format_epsilon(bound.epsilon) for bound in bounds)])
    lines += table_lines(rows, cell_width=12)
    return "\n".join([*lines, f"  neighbours: {true.report.bounds[0].neighbours}"])


def _accounted(args: argparse.Namespace, training: Training, z0: float) -> Schedule:
    """The noise that begins with z0, and its ε."""
    try:
        return training.schedule("", z0, args.decay)
    except (ValueError, OverflowError) as error:
        refuse(args, f"argument --noise: {args.noise:g} cannot be computed with these --decay and --epochs: {error}")


def _paper_factor(args: argparse.Namespace) -> float:
    """What is left of the multiplier of the published algorithm (privacy.md section 3)."""
    return sensitivity.paper_multiplier(1.0, args.workers, args.micro_batches, args.max_scale or 1.0)
