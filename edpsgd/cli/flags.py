"""The flags: what each may be, and the training that those of ``plan`` and ``epsilon`` describe."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import fields

from edpsgd.cli.output import refuse
from edpsgd.planning import Training
from edpsgd.schedules import Decay, parse_decay

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "delta": (lambda x: 0 < x < 1, "between 0 and 1"),
    "epsilon": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6"),
    "noise": (lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6"),
    "scale": (lambda x: 1 <= x < math.inf, "a finite number >= 1, the scales having root mean square 1"),
}


def number(kind: str) -> Callable[[str], float]:
    """The reader of a flag's number: "delta", "epsilon", "noise" or "scale"."""
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


def count(largest: int) -> Callable[[str], int]:
    """The reader of a flag's whole number, from 1 on."""

    def parse(text: str) -> int:
        if not (re.fullmatch(r"[0-9]{1,18}", text) and 1 <= int(text) <= largest):
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {largest}, got {text}")
        return int(text)

    return parse


def choice(*names: str) -> Callable[[str], str]:
    """The reader of a flag that is one of these words."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(names)}, got {text!r}")
        return text

    return parse


def decay(text: str) -> Decay | None:
    """The reader of --decay: None for "none"."""
    try:
        return parse_decay(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("decay ")) from None


def add_training(parser: argparse.ArgumentParser) -> None:
    """Gives a command the flags of a training."""
    add, many = parser.add_argument, count(10**15)
    add("--delta", type=number("delta"), required=True, help="the δ of ε")
    add("--examples", type=many, required=True, help="size of the data set")
    add("--batch", type=many, required=True, help="examples in a step, all workers together")
    add("--epochs", type=count(10_000), required=True, help="passes over the data")
    add("--decay", type=decay, default=None, help="none (default), linear:TAU or exponential:TAU")
    add("--sampling", type=choice("shuffled", "poisson"), default="shuffled", help="shuffled (default) or poisson")
    units = choice("micro_batch", "example")
    add("--unit", type=units, default="micro_batch", help="micro_batch (default) or example")
    add("--workers", type=count(10**6), default=1, help="default 1")
    add("--micro-batches", type=count(10**6), default=1, help="per worker and step, default 1")


def training_of(args: argparse.Namespace) -> Training:
    """The training that the flags describe; checks what one flag cannot know of the others.

    Raises:
        Refused: naming the flag that does not fit.
    """
    parts = args.workers * args.micro_batches
    if args.batch > args.examples:
        refuse(args, f"argument --batch: must be at most --examples {args.examples}, got {args.batch}")
    if args.unit == "example" and args.micro_batches != 1:
        refuse(args, f"argument --micro-batches: is for --unit micro_batch, got {args.micro_batches}")
    if args.unit == "micro_batch" and args.batch % parts:
        message = f"must be a multiple of workers times micro-batches, {parts}, got {args.batch}"
        refuse(args, f"argument --batch: {message}")
    if getattr(args, "max_scale", None) is not None and not args.paper:
        refuse(args, f"argument --max-scale: is for --paper, got {args.max_scale:g} without it")
    if getattr(args, "paper", False) and args.unit == "example":
        refuse(args, "argument --paper: is for --unit micro_batch, got --unit example")
    return Training(**{item.name: getattr(args, item.name) for item in fields(Training)})
