"""Tunes an intent and slot model, and pays for it: `python -m tasks.tune --epsilon 8 --trials 10`.

The flags are those of tasks.train, and a few more. Also under horovodrun or torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from edpsgd import escaping
from tasks.common import flags
from tasks.common.workers import workers
from tasks.nlu import recipes
from tasks.nlu.configuration import Config
from tasks.nlu.tuning.tuning_job import SHAPES, Tuned, Wishes, tune


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, wishes, given = _parsed(arguments)
    try:
        with workers(config.device, config.threads) as team:
            resume = None if given.resume is None else Path(given.resume)
            chosen = recipes.chosen_beside(given)
            tuned = tune(config, wishes, team, resume, given.dry_run, chosen)
            if tuned is not None and team.is_first:
                print(_text(tuned))
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))


def _parsed(arguments: Sequence[str] | None) -> tuple[Config, Wishes, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.tune",
        description="Trains with several settings and keeps the best model; ε covers the choice.",
    )
    group = parser.add_argument_group("tuning")
    group.add_argument("--trials", type=float, metavar="X", help="trainings on average, drawn at random (default: 10)")
    group.add_argument("--law", choices=tuple(SHAPES), help="of their number (default: geometric)")
    group.add_argument(
        "--search", metavar="FILE", help="YAML or JSON: flags with lists of values; rates, sizes, epochs if not given"
    )
    group.add_argument(
        "--score",
        metavar="TEXT",
        help="what the best is chosen by: noisy (right answers on validation utterances, with noise that is charged; "
        "noisy:Z names its standard deviation), public:FILE (JSON Lines) or exact, which no ε covers",
    )
    group.add_argument("--public", action="store_true", default=None, help="the data are public: nothing is charged")
    config, given = flags.parse(Config, parser, arguments)
    wishes = {item.name: getattr(given, item.name) for item in fields(Wishes)}
    wishes = {name: value for name, value in wishes.items() if value is not None}
    if given.resume is not None and wishes:
        names = ", ".join(f"--{name}" for name in wishes)
        parser.error(f"a tuning goes on with its own settings: {names} cannot change with --resume")
    if not 1 <= wishes.get("trials", 1) <= 10_000:
        parser.error(f"--trials must be from 1 to 10000, got {wishes['trials']:g}")
    return config, Wishes(**wishes), given


def _text(tuned: Tuned) -> str:
    """What the command says in the end."""
    if tuned.is_free:
        free = "nothing was charged: public data are free to tune on. Settings to train others with: "
        return f"\n{tuned.table}\n\n{free}--config {tuned.settings}\nrun folder: {tuned.best}"
    private = "private: how many trainings there were, their scores, and all of the folder but the run folder"
    page = f"\n\n{tuned.page}" if tuned.page else ""
    return f"\n{tuned.table}{page}\n\nrun folder: {tuned.best}\n{private}"


if __name__ == "__main__":
    main()
