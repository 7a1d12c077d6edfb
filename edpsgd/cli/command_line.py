"""The parser of the ``edpsgd`` command, and what starts it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from edpsgd import card, escaping
from edpsgd.cli import flags
from edpsgd.cli.card import LEDGER, card_page
from edpsgd.cli.epsilon import epsilon_page
from edpsgd.cli.output import Refused, print_page
from edpsgd.cli.plan import plan_page

_DESCRIPTION = "The ``edpsgd`` command: plan a training run, find its ε, print the privacy card of a run."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: "--flag must be ..."."""
        text = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        raise Refused(f"{self.prog}: error: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after one line on stderr.

    Example:
        >>> main(["epsilon", "--noise", "1", "--delta", "2", "--examples", "10", "--batch", "5", "--epochs", "1"])
        2
    """
    try:
        args = _parser().parse_args(argv)
        print_page(args.command(args))
    except Refused as refused:
        print(escaping.visible(str(refused)), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="edpsgd", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="plan|epsilon|card", required=True)
    plan = _command(commands, "plan", plan_page, "the noise that a target ε needs, with three decays side by side")
    plan.add_argument("--epsilon", type=flags.number("epsilon"), required=True, help="what the training may cost")
    flags.add_training(plan)
    plan.add_argument("--plot", metavar="FILE.png", help="draw noise and ε over the epochs")
    epsilon = _command(commands, "epsilon", epsilon_page, "ε of a noise multiplier by every method")
    epsilon.add_argument("--noise", type=flags.number("noise"), required=True, help="noise multiplier of epoch 0")
    flags.add_training(epsilon)
    epsilon.add_argument("--paper", action="store_true", help="the published algorithm, with its real multiplier")
    scale_help = "with --paper: the largest layer scale, default 1"
    epsilon.add_argument("--max-scale", type=flags.number("scale"), help=scale_help)
    show = _command(commands, "card", card_page, "the privacy card of a run")
    show.add_argument("run", metavar="RUN", help=f"a folder with {LEDGER} in it, or a ledger file")
    delta_help = f"default: that of {card.NAME}.json beside the ledger"
    show.add_argument("--delta", type=flags.number("delta"), help=delta_help)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], str], text: str) -> argparse.ArgumentParser:
    """Adds a command; ``run`` makes what it prints, and bad input goes to its parser's error()."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=run, refuse=parser.error)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
