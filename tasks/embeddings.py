"""Trains fastText word vectors on public text: `python -m tasks.embeddings --corpus text.txt --output vectors.bin`.

The vectors of a private model must come from elsewhere: vectors that have seen the training set carry it into the model
past the noise, and no ε accounts for that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from edpsgd import escaping
from tasks.common.fasttext_vectors import checked_output, save, train

NOTE = (
    "note: the corpus must be public text, and not the training set of a private model: "
    "what these vectors have seen is not protected by the noise"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after one line on stderr."""
    args = _parser().parse_args(argv)
    settings = {name: value for name, value in vars(args).items() if name not in ("corpus", "output")}
    print(NOTE, flush=True)
    try:
        checked_output(args.output)  # before the work
        model = train(args.corpus, **settings)
        save(model, args.output)
    except (ValueError, OSError) as error:
        print(escaping.visible(f"tasks.embeddings: error: {error}"), file=sys.stderr)
        return 2
    print(f"{args.output}: {len(model.wv)} words of {model.vector_size} numbers, from {model.corpus_total_words} words")
    return 0


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= least):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to 999999999, got {text}")
        return int(text)

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tasks.embeddings", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="public text, a sentence in each line; a folder: its .txt files")
    add("--output", type=Path, required=True, metavar="FILE", help=".bin, which keeps the subwords, or .vec")
    add("--dimension", type=_whole(1), default=100, help="the length of a vector, default 100")
    add("--epochs", type=_whole(1), default=5, help="passes over the corpus, default 5")
    add("--min-count", type=_whole(1), default=2, help="words that occur less often are left out, default 2")
    add("--buckets", type=_whole(1), default=200_000, help="vectors for parts of words, default 200000")
    add("--workers", type=_whole(1), default=2, help="threads, default 2; with 1, a seed gives the same vectors")
    add("--seed", type=_whole(0), default=0, help="default 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
