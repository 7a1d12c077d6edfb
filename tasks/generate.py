"""Writes generated utterances: `python -m tasks.generate 100000 --seed 1 --output utterances.jsonl`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tasks.nlu.generator import DOMAINS, EASIER, utterances


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes generated utterances as jsonl, which tasks.train reads as --task jsonl."""
    parser = argparse.ArgumentParser(prog="python -m tasks.generate", description=main.__doc__)
    parser.add_argument("count", type=int, help="how many utterances")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same utterances (default: 0)")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=EASIER, help=f"default: {' '.join(EASIER)}")
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="where to write them")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"count must be at least 1, got {options.count}")
    try:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        with open(options.output, "w", encoding="utf-8") as file:
            for found in utterances(options.count, options.seed, options.domains):
                json.dump({"tokens": found.words, "tags": found.tags, "intent": found.intent}, file)
                file.write("\n")
    except OSError as error:
        parser.error(f"cannot write {options.output}: {error.strerror}")


if __name__ == "__main__":
    main()
