"""The command ``python -m mia.audit``: does the mechanism keep what its noise multiplier claims?

    python -m mia.audit mechanism --noise paper --micro-batches 8
    python -m mia.audit mechanism --unit example
    python -m mia.audit sampler --kind poisson --micro-batches 4
    horovodrun -np 3 --gloo python -m mia.audit noise --placement per_worker
    python -m mia.audit run --run RUN

The exit status is 0 if the claim stands, 1 if it is refuted, 2 for bad input. (horovodrun and torchrun end with a
status of their own if that of a worker is not 0.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.special import ndtr, ndtri

from edpsgd import escaping, files
from edpsgd.schedules import parse_decay
from mia import bounds, one_run
from mia.audited_step import Setup
from mia.example_worlds import ROUNDING
from mia.mechanism import CONFIDENCE, TRIALS, Finding, audit_mechanism
from mia.noise_audit import audit_noise
from mia.noise_checks import NoiseFinding
from mia.sampler_audit import KINDS, SamplerSetup, audit_sampler
from tasks.common.workers import Workers, workers
from tasks.nlu.configuration import Config, read_file

DELTA = 1e-5


@dataclass(frozen=True)
class Outcome:
    """What an audit says: lines to print, the same as JSON-ready data, and whether the claim is refuted."""

    lines: list[str]
    data: dict[str, Any]
    is_refuted: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs an audit on all workers; worker 0 prints. Returns the exit status.

    Example:
        >>> main(["mechanism", "--noise", "paper", "--micro-batches", "8", "--trials", "100", "--seed", "1"])
        ... # doctest: +ELLIPSIS
        1 worker, 8 micro-batches each, paper noise, flat clipping...
        claim: noise multiplier 1, so mu 1 and epsilon 4.37718 at delta 1e-05
        found: mu >= ...
        verdict: REFUTED, the mechanism leaks more than it claims
        1
    """
    args = _parser().parse_args(argv)
    try:
        with workers("cpu", threads=1) as team:
            outcome: Outcome = args.audit(args, team)
            team.on_first(lambda: _report(outcome, args.json))
            return int(outcome.is_refuted)
    except (ValueError, OSError) as error:
        print(escaping.visible(f"mia.audit: error: {error}", keep="\n"), file=sys.stderr)
        return 2


def _report(outcome: Outcome, file: str | None) -> None:
    print(escaping.visible("\n".join(outcome.lines), keep="\n"), flush=True)
    if file is not None:
        files.write_text(Path(file), json.dumps(outcome.data, indent=2, allow_nan=False) + "\n")


def _verdict(is_refuted: bool, reason: str) -> str:
    return f"verdict: REFUTED, {reason}" if is_refuted else "verdict: the claim stands"


def _data(args: argparse.Namespace, team: Workers, **found: Any) -> dict[str, Any]:
    settings = {name: value for name, value in vars(args).items() if name not in ("audit", "json")}
    return {"settings": {**settings, "workers": team.collective.size}, **found}


# -------------------------------------------------------------------- the audits


def _mechanism(args: argparse.Namespace, team: Workers) -> Outcome:
    setup = _setup(args)
    finding = audit_mechanism(
        setup,
        team.collective,
        trials=args.trials,
        delta=args.delta,
        confidence=args.confidence,
        release=args.release,
    )
    lines = [
        _title(setup, team),
        f"claim: noise multiplier {finding.multiplier:.6g}, so mu {finding.mu:.6g} and epsilon {finding.epsilon:.6g} "
        f"at delta {args.delta:g}",
        *_found(finding),
        _verdict(finding.is_refuted, "the mechanism leaks more than it claims"),
    ]
    data = _data(args, team, **asdict(finding), is_refuted=finding.is_refuted)
    return Outcome(lines, data, finding.is_refuted)


def _found(finding: Finding) -> list[str]:
    """What an audit of the mechanism found: the furthest move, if examples were moved, and what the trials show."""
    lines, bounds = [], finding.bounds
    if finding.move is not None and finding.shape is not None:
        examples, tokens = finding.shape
        lines.append(
            f"found: an example moves the sum by {finding.move:.4f} clip norms, in a batch of {examples} examples of "
            f"{tokens} tokens (more than {1 + ROUNDING:g} refutes the claim)"
        )
    if bounds is not None:
        # Both error rates must be off at once, each by the quantile of its bound.
        false_alarms = float(ndtr(math.sqrt(2) * ndtri((1 - bounds.confidence) / 2)))
        lines.append(
            f"found: mu >= {bounds.mu:.4f}, epsilon >= {bounds.epsilon:.4f}, each with confidence "
            f"{bounds.confidence:g}, by {bounds.trials} trials in each world (they notice a true mu of about "
            f"{finding.noticeable:.2f} or more, and refute a claim that is just right in about {false_alarms:.1g} of "
            "audits)"
        )
    return lines


def _sampler(args: argparse.Namespace, team: Workers) -> Outcome:
    setup = SamplerSetup(
        kind=args.kind,
        examples=args.examples,
        sampling_rate=args.sampling_rate,
        batch_size=args.batch_size,
        micro_batches=args.micro_batches,
        unit=args.unit,
        seed=args.seed,
    )
    finding = audit_sampler(setup, team.collective, epochs=args.epochs, error_rate=args.error_rate)
    size, each = team.collective.size, setup.micro_batches
    lines = [
        f"{setup.kind}, {setup.examples} examples or users, {size} worker{'s' * (size > 1)}, {each} "
        f"micro-batch{'es' * (each > 1)} each, unit {setup.unit}, {args.epochs} epochs",
        f"claim: {setup.claim}",
        *_checked(finding),
        f"A sound sampler is refuted with probability {finding.error_rate:g} at most, all checks together.",
        _verdict(finding.is_refuted, "the draws do not follow the law that the accounting counts on"),
    ]
    data = _data(args, team, checks=[asdict(check) for check in finding.checks], is_refuted=finding.is_refuted)
    return Outcome(lines, data, finding.is_refuted)


def _checked(finding: NoiseFinding) -> list[str]:
    failed = finding.failed
    return [f"{'BAD' if c in failed else 'ok':>3}  {c.name}: {c.found} (p {c.p_value:.3g})" for c in finding.checks]


def _noise(args: argparse.Namespace, team: Workers) -> Outcome:
    setup = _setup(args)
    finding = audit_noise(setup, team.collective, steps=args.steps, error_rate=args.error_rate)
    lines = [
        _title(setup, team),
        f"claim: noise multiplier {setup.claimed_multiplier:.6g}",
        *_checked(finding),
        f"Sound noise is refuted with probability {finding.error_rate:g} at most, all checks together.",
        _verdict(finding.is_refuted, "the noise is not what the multiplier promises"),
    ]
    data = _data(args, team, checks=[asdict(check) for check in finding.checks], is_refuted=finding.is_refuted)
    return Outcome(lines, data, finding.is_refuted)


def _run(args: argparse.Namespace, team: Workers) -> Outcome:
    """By guesses which canaries were trained on (Steinke, Nasr and Jagielski 2023); their number is fixed before."""
    scores, inside = one_run.canary_scores(args.run)
    claimed, delta, terms = _claimed(Path(args.run), args.delta)
    guesses, right = bounds.count_guesses(scores, inside, max(1, len(scores) // 4))
    epsilon = bounds.one_run_epsilon(len(scores), guesses, right, delta, args.confidence)
    is_refuted = claimed is not None and epsilon > claimed
    lines = [
        f"{len(scores)} canaries, {int(inside.sum())} of them trained on",
        "claim: none, the run is not private"
        if claimed is None
        else f"claim: epsilon {claimed:.6g} at delta {delta:g} ({'; on condition: '.join(terms)})",
        f"found: {right} of {guesses} guesses were right, epsilon >= {epsilon:.4f} with confidence {args.confidence:g}",
    ]
    if claimed is not None:
        lines.append(_verdict(is_refuted, "the run remembers more than its card says"))
    found = {"canaries": len(scores), "guesses": guesses, "right": right, "epsilon": epsilon}
    finite = claimed if claimed is None or math.isfinite(claimed) else "inf"
    return Outcome(lines, _data(args, team, **found, claimed=finite, is_refuted=is_refuted), is_refuted)


def _claimed(folder: Path, delta: float | None) -> tuple[float | None, float, list[str]]:
    """The ε that a run claims, None for one that is not private; its δ; its neighbours and conditions."""
    if Config(**read_file(folder / "config.yaml")).private == "off":
        return None, DELTA if delta is None else delta, []
    file = folder / "privacy_card.json"
    try:
        card = files.read_json(file)
        epsilon, of = float(card["epsilon"]), float(card["delta"])
        terms = [str(card["neighbours"]), *map(str, card["conditions"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a privacy card: {type(error).__name__}") from None
    if delta not in (None, of):
        raise ValueError(f"delta must be that of the card, {of:g}, got {delta:g}")
    return epsilon, of, terms


def _title(setup: Setup, team: Workers) -> str:
    size, each = team.collective.size, setup.micro_batches
    return (
        f"{size} worker{'s' * (size > 1)}, {each} micro-batch{'es' * (each > 1)} each, {setup.noise} noise, "
        f"{setup.clipping} clipping, {setup.noise_placement if setup.noise == 'calibrated' else 'per_worker'} "
        f"placement, unit {setup.unit}, layer scales {setup.scaling}, compression {setup.compression or 'none'}, "
        f"epoch {setup.epoch}"
    )


def _setup(args: argparse.Namespace) -> Setup:
    return Setup(
        noise_multiplier=args.noise_multiplier,
        noise=args.noise,
        micro_batches=args.micro_batches,
        clipping=args.clipping,
        noise_placement=args.placement,
        noise_decay=parse_decay(args.decay),
        epoch=args.epoch,
        scaling=args.layer_scaling,
        unit=args.unit,
        compression=None if args.compression == "none" else args.compression,
        seed=args.seed,
    )


# -------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mia.audit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="AUDIT", dest="command")
    _add_mechanism(commands)
    _add_noise(commands)
    _add_sampler(commands)
    _add_run(commands)
    return parser


def _command(commands: Any, name: str, audit: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(audit=audit)
    parser.add_argument("--json", metavar="FILE", help="also write the finding to a file")
    return parser


def _add_mechanism(commands: Any) -> None:
    parser = _command(commands, "mechanism", _mechanism, "one step in two neighbouring worlds, many times")
    _add_setup(parser)
    add = parser.add_argument
    add("--trials", type=int, default=TRIALS, help=f"steps in each world, default {TRIALS}")
    add("--delta", type=float, default=DELTA, help=f"of epsilon, default {DELTA:g}; the verdict is by mu")
    add("--confidence", type=float, default=CONFIDENCE, help=f"of each bound, default {CONFIDENCE:g}")
    add("--release", choices=("gradient", "scales"), default="gradient", help="of a step, or of private layer scales")


def _add_noise(commands: Any) -> None:
    parser = _command(commands, "noise", _noise, "size and independence of the noise")
    _add_setup(parser)
    parser.add_argument("--steps", type=int, default=20, help="default 20")
    parser.add_argument("--error-rate", type=float, default=1e-3, help="of the verdict on sound noise, default 0.001")


def _add_sampler(commands: Any) -> None:
    parser = _command(commands, "sampler", _sampler, "rate and independence of draws, one slot for each example")
    add = parser.add_argument
    add("--kind", choices=KINDS, default="poisson", help="of the sampler, default poisson")
    add("--examples", type=int, default=400, help="or users, default 400")
    add("--sampling-rate", type=float, default=0.05, help="not of shuffled batches; default 0.05")
    add("--batch-size", type=int, default=8, help="of shuffled batches, default 8")
    add("--micro-batches", type=int, default=1, help="per worker and step, default 1")
    add("--unit", choices=("micro_batch", "example"), default="micro_batch", help="of Poisson sampling")
    add("--epochs", type=int, default=40, help="how many are drawn, default 40")
    add("--error-rate", type=float, default=1e-3, help="of the verdict on a sound sampler, default 0.001")
    add("--seed", type=int, help="repeats an audit; default: the operating system's entropy")


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", _run, "what a training remembers of its canaries")
    parser.add_argument("--run", required=True, metavar="DIR", help="a run folder of tasks.train --canaries N")
    parser.add_argument("--delta", type=float, help=f"of a run that is not private, default {DELTA:g}; else the card's")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the bound, default 0.95")


def _add_setup(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--noise-multiplier", type=float, default=1.0, help="the printed one, of epoch 0; default 1")
    add("--noise", choices=("calibrated", "paper"), default="calibrated")
    add("--micro-batches", type=int, default=1, help="per worker and step, default 1")
    add("--clipping", choices=("flat", "per_layer"), default="flat")
    add("--placement", choices=("sharded", "per_worker"), default="sharded")
    add("--decay", default="none", help="none (default), linear:TAU or exponential:TAU")
    add("--epoch", type=int, default=0, help="the one to audit, default 0")
    add("--layer-scaling", default="none", help="none (default), public:A,B,C or private:Z, measured in a first step")
    add("--unit", choices=("micro_batch", "example"), default="micro_batch")
    add("--compression", choices=("none", "fp16", "bf16"), default="none")
    add("--seed", type=int, help="repeats an audit; default: the operating system's entropy")


if __name__ == "__main__":
    sys.exit(main())
