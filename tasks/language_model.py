"""Trains the LSTM language model on users' texts, with privacy for whole users: `python -m tasks.language_model`.

Also under horovodrun or torchrun: the users of a round are spread over the workers. What a run leaves is in
tasks/language/run_folder.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edpsgd import escaping
from tasks.common.workers import workers
from tasks.language.configuration import parse
from tasks.language.training_job import train


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, flags = parse(arguments)
    try:
        with workers(config.device, config.threads) as team:
            train(config, team, None if flags.resume is None else Path(flags.resume), flags.dry_run)
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))


if __name__ == "__main__":
    main()
