"""The ``edpsgd`` command: plan a training run, find its ε, print the privacy card of a run."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from edpsgd import accounting, card, escaping, files
from edpsgd.ledger.events import LedgerError
from edpsgd.ledger.guarantee import Bound, Report, format_epsilon
from edpsgd.ledger.ledger import Ledger
from edpsgd.mechanism import sensitivity
from edpsgd.planning import Schedule, Training
from edpsgd.schedules import Decay, ExponentialDecay, LinearDecay, parse_decay

LEDGER = "ledger.jsonl"
_TAU = 0.05  # to compare decays if the user has chosen none
_PER_LINE = 10


class _Refused(Exception):
    """Bad input; the text is the line to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: "--flag must be ..."."""
        text = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        raise _Refused(f"{self.prog}: error: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after one line on stderr.

    Example:
        >>> main(["epsilon", "--noise", "1", "--delta", "2", "--examples", "10", "--batch", "5", "--epochs", "1"])
        2
    """
    try:
        args = _parser().parse_args(argv)
        _print(args.command(args))
    except _Refused as refused:
        print(escaping.visible(str(refused)), file=sys.stderr)
        return 2
    return 0


# -------------------------------------------------------------------- plan


def _plan(args: argparse.Namespace) -> str:
    if args.plot:
        _figure_class(args.refuse)  # before the work
    training = _training(args)
    tau = _TAU if args.decay is None else args.decay.tau
    decays = {"none": None, f"linear:{tau!r}": LinearDecay(tau), f"exponential:{tau!r}": ExponentialDecay(tau)}
    chosen = next(name for name, decay in decays.items() if decay == args.decay)
    plans = [_planned(args, training, name, decay, name == chosen) for name, decay in decays.items()]
    compared = [plan for plan in plans if plan]
    main_plan = next(plan for plan in compared if plan.name == chosen)
    notes = _notes(training, args.decay is None, [n for n, p in zip(decays, plans, strict=True) if p is None])
    if args.plot:
        _plot(args, training, compared)
        notes.append(f"plot: {args.plot}")
    if args.json:
        target = {"target_epsilon": args.epsilon, **training.data(), "decay": chosen, **main_plan.data(training)}
        return _json({**target, "comparison": [plan.data(training) for plan in compared], "notes": notes})
    head = [f"ε = {args.epsilon:g} at δ = {training.delta:g} needs noise multiplier z0 = {_up(main_plan.z[0])}"]
    parts = [*head, *training.lines(), f"  decay           {chosen}", "", *_epoch_lines(main_plan.z), ""]
    neighbours = f"  neighbours: {main_plan.report.bounds[0].neighbours}"
    return "\n".join([*parts, *_comparison(compared, training), neighbours, "", *notes]).rstrip()


def _planned(
    args: argparse.Namespace, training: Training, name: str, decay: Decay | None, required: bool
) -> Schedule | None:
    """The noise that reaches the target with a decay; None if that cannot be computed and is for comparison only."""
    try:
        rate, steps = (training.rate, training.steps) if training.sampling == "poisson" else (None, None)
        z0 = accounting.calibrate(args.epsilon, training.delta, training.epochs, decay, rate, steps)
        return training.schedule(name, z0, decay)
    except (ValueError, OverflowError) as error:
        if required:
            args.refuse(f"argument --decay: {name} cannot be computed for --epochs {training.epochs}: {error}")
    return None


def _notes(training: Training, tau_is_ours: bool, left_out: Sequence[str]) -> list[str]:
    notes = [f"The decays are compared at τ = {_TAU}, since --decay is none."] if tau_is_ours else []
    notes += [f"{name} falls too fast to be computed over so many epochs." for name in left_out]
    if training.delta * training.examples >= 1:
        notes.append(f"δ should be well below 1/examples = {1 / training.examples:g}.")
    return notes


def _epoch_lines(z: Sequence[float]) -> list[str]:
    starts = range(0, len(z), _PER_LINE)
    rows = [f"  {i:>6}  " + " ".join(f"{value:>9.4g}" for value in z[i : i + _PER_LINE]) for i in starts]
    return [f"noise multiplier of every epoch, {_PER_LINE} in a line, the number of the first in front", *rows]


def _comparison(plans: Sequence[Schedule], training: Training) -> list[str]:
    rows: list[list[str]] = [
        ["", *(plan.name for plan in plans)],
        ["z0", *(_up(plan.z[0]) for plan in plans)],
        ["z of the last epoch", *(f"{plan.z[-1]:.6g}" for plan in plans)],
        ["mean z over epochs", *(f"{plan.mean:.6g}" for plan in plans)],
        ["noise std, first epoch", *(f"{training.noise_std(plan.z[0]):.4g}" for plan in plans)],
        ["noise std, last epoch", *(f"{training.noise_std(plan.z[-1]):.4g}" for plan in plans)],
    ]
    for bounds in zip(*(plan.report.bounds for plan in plans), strict=True):
        rows.append([_label(bounds[0], plans[0].report), *(format_epsilon(b.epsilon) for b in bounds)])
    width = max(len(row[0]) for row in rows)
    lines = [f"  {row[0]:<{width}}  " + "  ".join(f"{cell:>17}" for cell in row[1:]) for row in rows]
    return [
        "the same target with other decays",
        *lines,
        "  noise std: per coordinate of the mean gradient, at clip norm 1",
    ]


def _label(bound: Bound, whole: Report) -> str:
    other = bound.neighbours != whole.bounds[0].neighbours
    return f"ε {bound.method}, {bound.neighbours}" if other else f"ε {bound.method}"


# -------------------------------------------------------------------- epsilon


def _epsilon(args: argparse.Namespace) -> str:
    training = _training(args)
    factor = _paper_factor(args) if args.paper else 1.0
    schedules = [_accounted(args, training, args.noise)]
    schedules += [_accounted(args, training, args.noise * factor)] if args.paper else []
    true, claimed = schedules[-1], schedules[0]
    if args.json:
        extra = {"claimed": claimed.data(training), "paper_factor": factor} if args.paper else {}
        return _json({"noise": args.noise, **training.data(), **true.data(training), **extra})
    lines = [f"noise multiplier {args.noise:g} in epoch 0, {true.z[-1] / factor:.6g} in the last", *training.lines()]
    head = ["ε at δ", f"{training.delta:g}"]
    if args.paper:
        lines += [f"  real multiplier {true.z[0]:.8g} in epoch 0, z/(2·√(N·K)·max α): the published algorithm", ""]
        head = ["", "as claimed", "true"]
    rows = [head, *([_label(b[0], true.report), *(format_epsilon(x.epsilon) for x in b)] for b in _paired(schedules))]
    width = max(len(row[0]) for row in rows)
    lines += [f"  {row[0]:<{width}}  " + "  ".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    return "\n".join([*lines, f"  neighbours: {true.report.bounds[0].neighbours}"])


def _paired(schedules: Sequence[Schedule]) -> list[tuple[Bound, ...]]:
    return list(zip(*(schedule.report.bounds for schedule in schedules), strict=True))


def _accounted(args: argparse.Namespace, training: Training, z0: float) -> Schedule:
    refuse: Callable[[str], NoReturn] = args.refuse
    try:
        return training.schedule("", z0, args.decay)
    except (ValueError, OverflowError) as error:
        refuse(f"argument --noise: {args.noise:g} cannot be computed with these --decay and --epochs: {error}")


def _paper_factor(args: argparse.Namespace) -> float:
    """What is left of the multiplier of the published algorithm (privacy.md section 3)."""
    return sensitivity.paper_multiplier(1.0, args.workers, args.micro_batches, args.max_scale or 1.0)


def _training(args: argparse.Namespace) -> Training:
    """Checks what one flag cannot know of the others."""
    parts = args.workers * args.micro_batches
    if args.batch > args.examples:
        args.refuse(f"argument --batch: must be at most --examples {args.examples}, got {args.batch}")
    if args.unit == "example" and args.micro_batches != 1:
        args.refuse(f"argument --micro-batches: is for --unit micro_batch, got {args.micro_batches}")
    if args.unit == "micro_batch" and args.batch % parts:
        args.refuse(f"argument --batch: must be a multiple of workers times micro-batches, {parts}, got {args.batch}")
    if getattr(args, "max_scale", None) is not None and not args.paper:
        args.refuse(f"argument --max-scale: is for --paper, got {args.max_scale:g} without it")
    if getattr(args, "paper", False) and args.unit == "example":
        args.refuse("argument --paper: is for --unit micro_batch, got --unit example")
    return Training(**{name: getattr(args, name) for name in Training.__dataclass_fields__})


# -------------------------------------------------------------------- plot


def _figure_class(refuse: Callable[[str], NoReturn]) -> Any:
    try:
        from matplotlib.figure import Figure  # draws with Agg, without a display
    except ImportError:
        refuse("argument --plot: needs matplotlib: pip install 'edpsgd[plot]'")
    return Figure


def _plot(args: argparse.Namespace, training: Training, plans: Sequence[Schedule]) -> None:
    figure = _figure_class(args.refuse)(figsize=(10, 4), layout="constrained")
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
        args.refuse(f"argument --plot: cannot be written to {args.plot!r}: {error.strerror or error}")
    except ValueError as error:  # an unknown ending
        args.refuse(f"argument --plot: must name a picture such as plan.png, got {args.plot!r}: {error}")


# -------------------------------------------------------------------- card


def _card(args: argparse.Namespace) -> str:
    path = Path(args.run) / LEDGER if Path(args.run).is_dir() else Path(args.run)
    if not path.exists():
        args.refuse(f"argument RUN: must be a ledger file or a folder with {LEDGER} in it, got {args.run!r}")
    written = path.with_name(f"{card.NAME}.json")
    delta = args.delta if args.delta is not None else _written_delta(args, written)
    not_covered = _written_statements(args, written)
    try:
        made = card.make(Ledger.read(path), delta, not_covered=not_covered)
    except OSError as error:
        args.refuse(f"argument RUN: {args.run!r} cannot be read: {error.strerror or error}")
    except LedgerError as error:
        args.refuse(f"argument RUN: {error}")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError):
        args.refuse(f"argument RUN: {args.run!r} holds entries that this version cannot read")
    return made.json() if args.json else made.markdown().rstrip()


def _written_delta(args: argparse.Namespace, path: Path) -> float:
    """The δ of the card that the run wrote."""
    refuse: Callable[[str], NoReturn] = args.refuse
    try:
        return _number("delta")(str(files.read_json(path)["delta"]))
    except FileNotFoundError:
        refuse(f"argument --delta: must be given, since there is no {path}")
    except (OSError, ValueError, KeyError, TypeError, argparse.ArgumentTypeError):
        refuse(f"argument --delta: must be given, since {path} holds none that can be read")


def _written_statements(args: argparse.Namespace, path: Path) -> list[str]:
    """What the run said that ε does not cover, from the card that it wrote, if there is one."""
    refuse: Callable[[str], NoReturn] = args.refuse
    try:
        return card.stated(files.read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError):
        refuse(f"argument RUN: {path} cannot be read, and may say more of what ε does not cover: restore or remove it")


# -------------------------------------------------------------------- flags


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "delta": (lambda x: 0 < x < 1, "between 0 and 1"),
    "epsilon": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6"),
    "noise": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6"),
    "scale": (lambda x: 1 <= x < math.inf, "a finite number >= 1, the scales having root mean square 1"),
}


def _number(kind: str) -> Callable[[str], float]:
    is_allowed, allowed = _RANGES[kind]

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    return parse


def _count(largest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (re.fullmatch(r"[0-9]{1,18}", text) and 1 <= int(text) <= largest):
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {largest}, got {text}")
        return int(text)

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(names)}, got {text!r}")
        return text

    return parse


def _decay(text: str) -> Decay | None:
    try:
        return parse_decay(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("decay ")) from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="edpsgd", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="plan|epsilon|card", required=True)
    plan = _command(commands, "plan", _plan, "the noise that a target ε needs, with three decays side by side")
    plan.add_argument("--epsilon", type=_number("epsilon"), required=True, help="what the training may cost")
    _add_training(plan)
    plan.add_argument("--plot", metavar="FILE.png", help="draw noise and ε over the epochs")
    epsilon = _command(commands, "epsilon", _epsilon, "ε of a noise multiplier by every method")
    epsilon.add_argument("--noise", type=_number("noise"), required=True, help="noise multiplier of epoch 0")
    _add_training(epsilon)
    epsilon.add_argument("--paper", action="store_true", help="the published algorithm, with its real multiplier")
    epsilon.add_argument("--max-scale", type=_number("scale"), help="with --paper: the largest layer scale, default 1")
    show = _command(commands, "card", _card, "the privacy card of a run")
    show.add_argument("run", metavar="RUN", help=f"a folder with {LEDGER} in it, or a ledger file")
    show.add_argument("--delta", type=_number("delta"), help=f"default: that of {card.NAME}.json beside the ledger")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], str], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=run, refuse=parser.error)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    add, many = parser.add_argument, _count(10**15)
    add("--delta", type=_number("delta"), required=True, help="the δ of ε")
    add("--examples", type=many, required=True, help="size of the data set")
    add("--batch", type=many, required=True, help="examples in a step, all workers together")
    add("--epochs", type=_count(10_000), required=True, help="passes over the data")
    add("--decay", type=_decay, default=None, help="none (default), linear:TAU or exponential:TAU")
    add("--sampling", type=_choice("shuffled", "poisson"), default="shuffled", help="shuffled (default) or poisson")
    add(
        "--unit", type=_choice("micro_batch", "example"), default="micro_batch", help="micro_batch (default) or example"
    )
    add("--workers", type=_count(10**6), default=1, help="default 1")
    add("--micro-batches", type=_count(10**6), default=1, help="per worker and step, default 1")


# -------------------------------------------------------------------- output


def _json(data: Any) -> str:
    return json.dumps(escaping.json_ready(data), indent=2, allow_nan=False)


def _up(z: float) -> str:
    """Seven digits, rounded up: less noise would cost more than the target."""
    unit = 10.0 ** (math.floor(math.log10(z)) - 6)
    return f"{math.ceil(z / unit) * unit:.7g}"


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        shown = escaping.visible(text, keep="\n")
        print(shown.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:  # a full disk, or a reader that has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _Refused(f"edpsgd: error: the output cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
