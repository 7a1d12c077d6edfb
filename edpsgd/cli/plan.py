"""``edpsgd plan``: the noise that a target ε needs, with three decays side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from edpsgd import accounting
from edpsgd.cli.flags import training_of
from edpsgd.cli.output import bound_label, json_page, refuse, rounded_up, table_lines
from edpsgd.ledger.guarantee import format_epsilon
from edpsgd.planning import Schedule, Training
from edpsgd.schedules import Decay, ExponentialDecay, LinearDecay

_TAU = 0.05  # to compare decays if the user has chosen none
_PER_LINE = 10


def plan_page(args: argparse.Namespace) -> str:
    """What the command prints; with --plot it also draws the picture."""
    if args.plot:
        _figure_class(args)  # before the work
    training = training_of(args)
    tau = _TAU if args.decay is None else args.decay.tau
    decays = {"none": None, f"linear:{tau!r}": LinearDecay(tau), f"exponential:{tau!r}": ExponentialDecay(tau)}
    chosen = next(name for name, decay in decays.items() if decay == args.decay)
    compared: list[Schedule] = []
    left_out: list[str] = []
    for name, decay in decays.items():
        plan = _planned(args, training, name, decay, name == chosen)
        if plan is None:
            left_out.append(name)
        else:
            compared.append(plan)
    chosen_plan = next(plan for plan in compared if plan.name == chosen)
    notes = _notes(training, args.decay is None, left_out)
    if args.plot:
        _plot(args, training, compared)
        notes.append(f"plot: {args.plot}")
    if args.json:
        target = {"target_epsilon": args.epsilon, **training.data(), "decay": chosen, **chosen_plan.data(training)}
        comparison = [plan.data(training) for plan in compared]
        return json_page({**target, "comparison": comparison, "notes": notes})
    lines = [
        f"ε = {args.epsilon:g} at δ = {training.delta:g} needs noise multiplier z0 = {rounded_up(chosen_plan.z[0])}",
        *training.lines(),
        f"  decay           {chosen}",
        "",
        *_epoch_lines(chosen_plan.z),
        "",
        *_comparison(compared, training),
        f"  neighbours: {chosen_plan.report.bounds[0].neighbours}",
        "",
        *notes,
    ]
    return "\n".join(lines).rstrip()


def _planned(
    args: argparse.Namespace, training: Training, name: str, decay: Decay | None, required: bool
) -> Schedule | None:
    """The noise that reaches the target with a decay; None if that cannot be computed and is for comparison only."""
    rate, steps = None, None
    if training.sampling == "poisson":
        rate, steps = training.rate, training.steps
    try:
        z0 = accounting.calibrate(args.epsilon, training.delta, training.epochs, decay, rate, steps)
        return training.schedule(name, z0, decay)
    except (ValueError, OverflowError) as error:
        if required:
            refuse(args, f"argument --decay: {name} cannot be computed for --epochs {training.epochs}: {error}")
    return None


def _notes(training: Training, has_own_tau: bool, left_out: Sequence[str]) -> list[str]:
    """What stands below the tables.

    Args:
        training: that was planned.
        has_own_tau: whether the decays are compared at this module's τ, as the user has chosen none.
        left_out: decays that could not be computed.
    """
    notes = []
    if has_own_tau:
        notes.append(f"The decays are compared at τ = {_TAU}, since --decay is none.")
    for name in left_out:
        notes.append(f"{name} falls too fast to be computed over so many epochs.")
    if training.delta * training.examples >= 1:
        notes.append(f"δ should be well below 1/examples = {1 / training.examples:g}.")
    return notes


def _epoch_lines(z: Sequence[float]) -> list[str]:
    lines = [f"noise multiplier of every epoch, {_PER_LINE} in a line, the number of the first in front"]
    for first in range(0, len(z), _PER_LINE):
        values = " ".join(f"{value:>9.4g}" for value in z[first : first + _PER_LINE])
        lines.append(f"  {first:>6}  {values}")
    return lines


def _comparison(plans: Sequence[Schedule], training: Training) -> list[str]:
    """The table of decays, a column for each."""
    rows: list[list[str]] = [
        ["", *(plan.name for plan in plans)],
        ["z0", *(rounded_up(plan.z[0]) for plan in plans)],
        ["z of the last epoch", *(f"{plan.z[-1]:.6g}" for plan in plans)],
        ["mean z over epochs", *(f"{plan.mean:.6g}" for plan in plans)],
        ["noise std, first epoch", *(f"{training.noise_std(plan.z[0]):.4g}" for plan in plans)],
        ["noise std, last epoch", *(f"{training.noise_std(plan.z[-1]):.4g}" for plan in plans)],
    ]
    for bounds in zip(*(plan.report.bounds for plan in plans), strict=True):
        rows.append([bound_label(bounds[0], plans[0].report), *(format_epsilon(bound.epsilon) for bound in bounds)])
    return [
        "the same target with other decays",
        *table_lines(rows, cell_width=17),
        "  noise std: per coordinate of the mean gradient, at clip norm 1",
    ]


def _figure_class(args: argparse.Namespace) -> Any:
    """Matplotlib's Figure, which draws without a display."""
    try:
        from matplotlib.figure import Figure  # draws with Agg
    except ImportError:
        refuse(args, "argument --plot: needs matplotlib: pip install 'edpsgd[plot]'")
    return Figure


def _plot(args: argparse.Namespace, training: Training, plans: Sequence[Schedule]) -> None:
    """Draws noise and ε over the epochs into the file that --plot names."""
    figure = _figure_class(args)(figsize=(10, 4), layout="constrained")
    noise, spent = figure.subplots(1, 2)
    for plan in plans:
        noise.plot(range(training.epochs), plan.z, marker=".", label=plan.name)
        spent.plot(*training.cumulative(plan.z), marker=".", label=plan.name)
    noise.set(xlabel="epoch", ylabel="noise multiplier", yscale="log")
    spent.set(xlabel="epochs done", ylabel=f"ε so far, at δ = {training.delta:g}")
    noise.legend()
    try:
        figure.savefig(args.plot)
    except OSError as error:
        refuse(args, f"argument --plot: cannot be written to {args.plot!r}: {error.strerror or error}")
    except ValueError as error:  # an unknown ending
        refuse(args, f"argument --plot: must name a picture such as plan.png, got {args.plot!r}: {error}")
