"""Answers of a trained model: `python -m tasks.predict --run DIR` on standard input, a file or --text.

One utterance per line, in UTF-8; words are what blanks separate. Nothing that is read is kept or logged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from edpsgd import escaping, files
from edpsgd.escaping import visible
from tasks.common.workers import choose_device
from tasks.nlu.prediction import predict
from tasks.nlu.run_folder import check_ended, load

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = _parsed(arguments)
    try:
        check_ended(flags.run)
        parts, device = load(flags.run), choose_device(flags.device)
        parts.model.to(device)
        source = "--text" if flags.text else flags.file or "standard input"
        somebody_types = source == "standard input" and sys.stdin.isatty()
        chunk = 1 if somebody_types else None  # they wait for every answer
        with _opened(flags) as lines:
            texts = _decoded(lines, source)
            answers = predict(parts, texts, flags.batch_size, not flags.no_scores, device, chunk)
            _write(answers, as_json=flags.json or not sys.stdout.isatty())
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        sys.exit(1)
    except (ValueError, OSError) as error:
        sys.exit(visible(f"error: {error}", keep="\n"))


def _write(answers: Iterable[dict[str, Any]], as_json: bool) -> None:
    """One line for each answer: JSON for programs, colours for people."""
    console = Console(highlight=False)
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for answer in answers:
        if as_json:
            print(escaping.json_text(answer) if is_unicode else json.dumps(answer))
        else:
            console.print(_coloured(answer), soft_wrap=True)
    sys.stdout.flush()


def _coloured(answer: dict[str, Any]) -> Text:
    """Labels are from a file of others, and texts from anywhere: nothing in them speaks to the terminal."""
    if answer["intent"] is None:
        return Text("(nothing said)", style="dim")
    line = Text.assemble((f"{visible(answer['intent'])} {answer['score']:.0%}", "bold"), "  ")
    end = 0
    kinds = sorted({slot["type"] for slot in answer["slots"]})
    for slot in answer["slots"]:
        colour = COLOURS[kinds.index(slot["type"]) % len(COLOURS)]
        score = f" {slot['score']:.0%}" if "score" in slot else ""
        line.append(visible(answer["text"][end : slot["start"]]))
        line.append(visible(slot["value"]), style=f"bold {colour}")
        line.append(f"[{visible(slot['type'])}{score}]", style=colour)
        end = slot["end"]
    line.append(visible(answer["text"][end:]))
    return line


def _opened(flags: argparse.Namespace) -> AbstractContextManager[Iterable[bytes]]:
    if flags.text is not None:
        return nullcontext([os.fsencode(text) for text in flags.text])
    if flags.file is not None:
        return _lines(flags.file)
    return nullcontext(files.lines(sys.stdin.buffer))


@contextmanager
def _lines(path: Path) -> Iterator[Iterable[bytes]]:
    with open(path, "rb") as file:
        yield files.lines(file)


def _decoded(lines: Iterable[bytes], name: object) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name}:{number}: the line is not UTF-8") from None
        yield text


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    flags = parser.parse_args(arguments)
    if flags.text is not None and flags.file is not None:
        parser.error("give a file or --text, not both")
    if flags.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {flags.batch_size}")
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tasks.predict", description="Intent and slots of utterances.")
    parser.add_argument("file", nargs="?", type=Path, help="utterances, one per line; standard input if not given")
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run folder of a training")
    parser.add_argument("--text", action="append", help="an utterance; may be given several times")
    parser.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")
    parser.add_argument("--no-scores", action="store_true", help="leave out the scores of slots: faster")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="utterances computed at once")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


if __name__ == "__main__":
    main()
