"""What a language model has memorised of its users: `python -m mia.secret_sharer insert`, train, and then `measure`.

The federated secret sharer (Thakkar et al. 2020): random phrases, the canaries, are put into the sentences of a few
users before the training. After it, a canary counts as memorised by random sampling if its last three words are the
least perplexing of many random ones after its first two, and by beam search if it is among the five best phrases after
its first word.

A job that cuts users to a budget of words does so after the insertion: give one that is large enough (--budget), or
canaries that the manifest counts are cut off.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from edpsgd import escaping, files
from mia.extraction import CHUNK, PREFIX, Phrases, Tally, all_suffixes, beam_search, exposure, random_suffixes, rank
from mia.phrases import PAPER, Canary, Configuration, Manifest, insert_texts, make, parse, parse_rates
from models.language_model import LanguageModel
from tasks.common.progress import Progress
from tasks.common.text_files import numbered_lines
from tasks.common.workers import choose_device
from tasks.language.dictionary import Dictionary
from tasks.language.readers import read_jsonl, write_jsonl
from tasks.language.run_folder import load_model

SUFFIXES = 2_000_000  # of the paper
BEAMS = 5
_BETWEEN_SAVES = 10.0  # seconds


@dataclass(frozen=True)
class Result:
    """What was measured of one canary.

    Attributes:
        configuration: its rates.
        sharers: how many users share it.
        insertions: how many sentences are it.
        rank: of its suffix, by log-perplexity; 1 is the least perplexing.
        candidates: among how many, its own with them.
        found_by_beam: whether beam search gives it.
    """

    configuration: Configuration
    sharers: int
    insertions: int
    rank: int
    candidates: int
    found_by_beam: bool

    @property
    def exposure(self) -> float:
        """In bits; see mia.extraction.exposure."""
        return exposure(self.rank, self.candidates)

    @property
    def memorised_by_sampling(self) -> bool:
        """Whether no random suffix is at most as perplexing; by chance with probability 1 / candidates."""
        return self.rank == 1

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        more = {"exposure": self.exposure, "memorised_by_sampling": self.memorised_by_sampling}
        return {**asdict(self), **more}


def measure(
    model: LanguageModel,
    manifest: Manifest,
    suffixes: int | None = SUFFIXES,
    *,
    seed: int = 0,
    beams: int = BEAMS,
    partial: Path | None = None,
    is_shown: bool = False,
) -> list[Result]:
    """Looks for every canary of a manifest.

    Args:
        model: trained on the data that the manifest belongs to.
        manifest: which canaries were inserted how often.
        suffixes: how many random ones a canary's own is ranked among, the same for all canaries; None for all that
            there are, in a small dictionary.
        seed: of the suffixes.
        beams: of beam search.
        partial: a file for ranks in the making. If it is there, from an interrupted call with the same model and
            arguments, this one goes on from it; it is removed at the end.
        is_shown: whether to show the progress.

    Returns:
        A result for each canary.

    Example:
        >>> canaries = make(8, [Configuration(0.0, 0.0)], per_configuration=2, seed=1)
        >>> manifest = Manifest(tuple(canaries), sharers=(0, 0), insertions=(0, 0), seed=1)
        >>> [result.candidates for result in measure(LanguageModel(8, dimension=2, hidden=2), manifest, None)]
        [125, 125]
    """
    _check_lengths(manifest.canaries)
    lengths = {len(canary.words) - PREFIX for canary in manifest.canaries}
    drawn = {length: _suffixes(model.settings()["words"], suffixes, length, seed) for length in lengths}
    tallies = _Ranks(model, manifest.canaries, drawn, partial, is_shown).all()
    found = [_found_by_beam(model, canary, beams) for canary in manifest.canaries]
    if partial is not None:
        partial.unlink(missing_ok=True)
    rows = zip(manifest.canaries, manifest.sharers, manifest.insertions, tallies, found, strict=True)
    return [
        Result(canary.configuration, sharers, times, tally.rank, tally.candidates, is_found)
        for canary, sharers, times, tally, is_found in rows
    ]


def _suffixes(words: int, number: int | None, length: int, seed: int) -> Phrases:
    return all_suffixes(words, length) if number is None else random_suffixes(words, number, length, seed=seed)


def _check_lengths(canaries: Sequence[Canary]) -> None:
    for number, canary in enumerate(canaries, start=1):
        if len(canary.words) <= PREFIX:
            raise ValueError(f"canary {number}: it must have more than {PREFIX} words, it has {len(canary.words)}")


def _found_by_beam(model: LanguageModel, canary: Canary, beams: int) -> bool:
    return any(phrase == canary.words for phrase, _ in beam_search(model, canary.words[:1], len(canary.words), beams))


class _Ranks:
    """The ranks of all canaries, resumable."""

    def __init__(
        self,
        model: LanguageModel,
        canaries: Sequence[Canary],
        drawn: dict[int, Phrases],
        partial: Path | None,
        is_shown: bool,
    ) -> None:
        self._model, self._canaries, self._partial, self._is_shown = model, canaries, partial, is_shown
        self._suffixes = [drawn[len(canary.words) - PREFIX] for canary in canaries]
        self._key = _key(model, canaries, drawn) if partial is not None else ""
        self._tallies = self._restored() or [Tally() for _ in canaries]
        self._saved = time.monotonic()

    def all(self) -> list[Tally]:
        """All ranks; what is done is on the disk also if this is interrupted."""
        chunks = sum(-(-len(suffixes) // CHUNK) for suffixes in self._suffixes)
        done = sum(-(-tally.done // CHUNK) for tally in self._tallies)
        progress = Progress(Path(), chunks, done, self._is_shown, tensorboard=False)
        jobs = zip(self._canaries, self._suffixes, self._tallies, strict=True)
        try:
            for number, (canary, suffixes, tally) in enumerate(jobs, start=1):
                after_chunk = functools.partial(self._after_chunk, progress, f"canary {number} of {len(self._tallies)}")
                rank(self._model, canary.words, suffixes, tally=tally, after_chunk=after_chunk)
        finally:
            self._save()
            progress.close()
        return self._tallies

    def _after_chunk(self, progress: Progress, text: str) -> None:
        progress.move()
        if progress.wants():
            progress.show(text)
        if time.monotonic() - self._saved >= _BETWEEN_SAVES:
            self._save()

    def _save(self) -> None:
        """Whoever looks finds the old file or the new one, whole."""
        self._saved = time.monotonic()
        if self._partial is None:
            return
        content = {"key": self._key, "tallies": [asdict(tally) for tally in self._tallies]}
        files.write_text(self._partial, json.dumps(content) + "\n")

    def _restored(self) -> list[Tally] | None:
        """From the disk; None if there is nothing, or if it is of another model or of other arguments."""
        if self._partial is None or not self._partial.exists():
            return None
        try:
            content = files.read_json(self._partial, files.LARGE)
            return [Tally(**tally) for tally in content["tallies"]] if content["key"] == self._key else None
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self._partial} is no file of ranks in the making, or it is damaged: remove it"
            ) from None


def _key(model: LanguageModel, canaries: Sequence[Canary], drawn: dict[int, Phrases]) -> str:
    """What ranks depend on."""
    digest = blake2b(repr([canary.words for canary in canaries]).encode(), digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    for length in sorted(drawn):
        digest.update(drawn[length].tobytes())
    return digest.hexdigest()


# -------------------------------------------------------------------- the report


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """How many canaries are memorised, by random sampling and by beam search: of each configuration, and of all.

    Example:
        >>> found = summary([Result(Configuration(0.1, 1.0), 5, 40, rank=1, candidates=2_000_001, found_by_beam=False)])
        >>> found["all"]["random_sampling"], found["all"]["beam_search"]
        (1, 0)
    """
    groups: dict[Configuration, list[Result]] = {}
    for result in results:
        groups.setdefault(result.configuration, []).append(result)
    rows = [{**asdict(rates), **_counts(group)} for rates, group in groups.items()]
    return {"configurations": rows, "all": _counts(results)}


def _counts(group: Sequence[Result]) -> dict[str, Any]:
    return {
        "canaries": len(group),
        "sharers": statistics.mean(result.sharers for result in group),
        "insertions": statistics.mean(result.insertions for result in group),
        "random_sampling": sum(result.memorised_by_sampling for result in group),
        "by_chance": sum(1 / result.candidates for result in group),
        "beam_search": sum(result.found_by_beam for result in group),
        "median_exposure": statistics.median(result.exposure for result in group),
    }


def table(found: dict[str, Any]) -> str:
    """A summary to read. RS: memorised by random sampling, BS: by beam search; sharers and insertions are means."""
    text = "      p_u    p_e canaries  sharers inserted   RS   BS exposure"
    for row in [*found["configurations"], found["all"]]:
        rates = f"{row['users_rate']:9.2g} {row['examples_rate']:6.2g}" if "users_rate" in row else f"{'all':<16}"
        counts = f"{row['canaries']:8} {row['sharers']:8.1f} {row['insertions']:8.1f}"
        figures = f"{row['random_sampling']:4} {row['beam_search']:4} {row['median_exposure']:8.1f}"
        text += f"\n{rates} {counts} {figures}"
    return text


# -------------------------------------------------------------------- the command


@files.private()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = _parsed(arguments)
    try:
        flags.command(flags)
    except (ValueError, OSError) as error:
        sys.exit(escaping.visible(f"error: {error}", keep="\n"))


def _insert(flags: argparse.Namespace) -> None:
    dictionary, rates = Dictionary.load(flags.dictionary), parse_rates(flags.rates)
    if flags.phrases is None:
        canaries = make(len(dictionary), rates, flags.per, seed=flags.seed)
    else:
        canaries = parse([line for _, line in numbered_lines(flags.phrases)], dictionary, rates)
    _check_lengths(canaries)
    changed, manifest = insert_texts(read_jsonl(flags.users), canaries, dictionary, flags.seed)
    files.make_private(flags.output)
    write_jsonl(flags.output / "users.jsonl", changed)
    manifest.save(flags.output / "canaries.json", dictionary)
    sentences = sum(len(texts) for texts in changed.texts)
    print(
        f"{len(canaries)} canaries, {sum(manifest.insertions)} insertions among {sentences} sentences of "
        f"{len(changed.names)} users: {flags.output / 'users.jsonl'}, {flags.output / 'canaries.json'}"
    )


def _measure(flags: argparse.Namespace) -> None:
    model, dictionary = load_model(flags.run)
    manifest = Manifest.load(flags.canaries, dictionary)
    output = flags.output or flags.run / "exposure.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    results = measure(
        model.to(choose_device(flags.device)),
        manifest,
        flags.suffixes,
        seed=flags.seed,
        beams=flags.beams,
        partial=output.with_name(f"{output.name}.partial"),
        is_shown=True,
    )
    found = summary(results)
    settings = {"suffixes": flags.suffixes or "all", "seed": flags.seed, "prefix": PREFIX, "beams": flags.beams}
    content = {**settings, "summary": found, "canaries": [result.to_json() for result in results]}
    files.write_text(output, json.dumps(content, indent=1) + "\n")
    print(
        f"{table(found)}\n\nRS: random sampling, rank 1 among {settings['suffixes']} suffixes, by chance "
        f"{found['all']['by_chance']:.2g} canaries; BS: beam search with {flags.beams} beams; exposure: median, bits"
        f"\n{output}"
    )


def _number_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mia.secret_sharer", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("insert", help="put canaries into the texts of users")
    add.set_defaults(command=_insert)
    add.add_argument("--users", required=True, type=Path, metavar="FILE", help='lines {"user": ..., "text": ...}')
    add.add_argument("--dictionary", required=True, type=Path, metavar="FILE", help="one public word in each line")
    add.add_argument("--output", required=True, type=Path, metavar="DIR", help="for users.jsonl and canaries.json")
    add.add_argument("--rates", default=PAPER, metavar="P_U:P_E,...", help="configurations; the paper's if not given")
    add.add_argument("--per", type=int, default=10, metavar="N", help="canaries of each configuration")
    add.add_argument("--phrases", type=Path, metavar="FILE", help="canaries of your own, one in each line")
    add.add_argument("--seed", type=int, default=0, metavar="N", help="of canaries, sharers and sentences")
    look = commands.add_parser("measure", help="find out which of them a model has memorised")
    look.set_defaults(command=_measure)
    look.add_argument("--run", required=True, type=Path, metavar="DIR", help="run folder of the language model")
    look.add_argument("--canaries", required=True, type=Path, metavar="FILE", help="canaries.json")
    look.add_argument("--suffixes", type=_number_or_all, default=SUFFIXES, metavar="N", help="random ones, or all")
    look.add_argument("--beams", type=int, default=BEAMS, metavar="N", help="of beam search")
    look.add_argument("--seed", type=int, default=0, metavar="N", help="of the random suffixes")
    look.add_argument("--output", type=Path, metavar="FILE", help="exposure.json in the run folder if not given")
    look.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
