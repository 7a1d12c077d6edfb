"""Fine-tunes an intent and slot model, privately or not: `python -m tasks.train`, also under horovodrun or torchrun.

A run leaves a folder that a colleague can use: see tasks/nlu/run_folder.py, and `python -m tasks.predict --run FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edpsgd import escaping
from tasks.common.workers import workers
from tasks.nlu import recipes
from tasks.nlu.configuration import parse
from tasks.nlu.training_job import outcome_table, train


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, flags = parse(arguments)
    try:
        with workers(config.device, config.threads) as team:
            resume = None if flags.resume is None else Path(flags.resume)
            outcome = train(config, team, resume, flags.dry_run, recipes.chosen_beside(flags))
            if outcome is not None and team.is_first:
                print(outcome_table({config.private: outcome}))
                print(f"\n{outcome.card.markdown()}\n" if outcome.card else "")
                print(f"run folder: {outcome.folder}")
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))


if __name__ == "__main__":
    main()
