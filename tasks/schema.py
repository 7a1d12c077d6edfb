"""A first schema of a corpus: `python -m tasks.schema --task snips --data DIR --output labels.yaml`.

It is read from the training utterances, and marked so: until its developers have looked at it, corrected it and taken
the mark away, the privacy card calls the labels not covered. `python -m tasks.train --labels labels.yaml` reads it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edpsgd import escaping, files
from tasks.nlu import dataset, label_schema
from tasks.nlu.configuration import TASKS, Config
from tasks.nlu.splits import split


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tasks.schema", description="Writes a first version of --labels.")
    parser.add_argument("--task", choices=TASKS, default="generated", help="the corpus, as for tasks.train")
    parser.add_argument("--data", metavar="DIR", help="where it is")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the schema, a new YAML file")
    flags = parser.parse_args(arguments)
    try:
        if flags.output.exists():
            raise ValueError(f"{flags.output} exists: name another file")
        config = Config(task=flags.task, data=flags.data, private="off")
        corpus = dataset.read(config)
        found = label_schema.of_rows(corpus, split(corpus, config.split, config.split_seed).train)
        files.write_text(flags.output, found.text())
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))
    print(f"{len(found.intents)} intents and {len(found.slots)} slots: {flags.output}")
    print("read from the training utterances: look at it, and take the line read_from_data away when it is yours")


if __name__ == "__main__":
    main()
