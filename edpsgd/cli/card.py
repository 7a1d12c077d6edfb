"""``edpsgd card``: the privacy card of a run, from its ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from edpsgd import card, files
from edpsgd.cli.flags import number
from edpsgd.cli.output import refuse
from edpsgd.ledger.events import LedgerError
from edpsgd.ledger.ledger import Ledger

LEDGER = "ledger.jsonl"  # in the folder of a run


def card_page(args: argparse.Namespace) -> str:
    """The card as Markdown, or as JSON with --json."""
    path = Path(args.run)
    if path.is_dir():
        path = path / LEDGER
    if not path.exists():
        refuse(args, f"argument RUN: must be a ledger file or a folder with {LEDGER} in it, got {args.run!r}")
    written = path.with_name(f"{card.NAME}.json")
    delta = args.delta if args.delta is not None else _written_delta(args, written)
    not_covered = _written_statements(args, written)
    try:
        made = card.make(Ledger.read(path), delta, not_covered=not_covered)
    except OSError as error:
        refuse(args, f"argument RUN: {args.run!r} cannot be read: {error.strerror or error}")
    except LedgerError as error:
        refuse(args, f"argument RUN: {error}")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError):
        refuse(args, f"argument RUN: {args.run!r} holds entries that this version cannot read")
    return made.json() if args.json else made.markdown().rstrip()


def _written_delta(args: argparse.Namespace, path: Path) -> float:
    """The δ of the card that the run wrote."""
    try:
        return number("delta")(str(files.read_json(path)["delta"]))
    except FileNotFoundError:
        refuse(args, f"argument --delta: must be given, since there is no {path}")
    except (OSError, ValueError, KeyError, TypeError, argparse.ArgumentTypeError):
        refuse(args, f"argument --delta: must be given, since {path} holds none that can be read")


def _written_statements(args: argparse.Namespace, path: Path) -> list[str]:
    """What the run said that ε does not cover, from the card that it wrote, if there is one."""
    try:
        return card.stated(files.read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError):
        advice = "may say more of what ε does not cover: restore or remove it"
        refuse(args, f"argument RUN: {path} cannot be read, and {advice}")
