"""Synthetic users: a language that all of them share, topics that some prefer, and phrases of their own.

`python -m tasks.synthetic_users 1000 --output DIR` writes their sentences and the public list of their words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.language.dictionary import Dictionary
from tasks.language.readers import write_jsonl
from tasks.language.user_generator import generate, generate_words


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tasks.synthetic_users", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("users", type=int, help="how many")
    parser.add_argument("--sentences", type=int, default=40, metavar="N", help="of a user, on average (default: 40)")
    parser.add_argument("--words", type=int, default=2000, metavar="N", help="of their language (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other users (default: 0)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for users.jsonl and dictionary.txt")
    flags = parser.parse_args(arguments)
    try:
        made = generate(flags.users, flags.seed, flags.sentences, flags.words)
        flags.output.mkdir(parents=True, exist_ok=True)
        write_jsonl(flags.output / "users.jsonl", made)
        Dictionary(generate_words(flags.words)).save(flags.output / "dictionary.txt")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
