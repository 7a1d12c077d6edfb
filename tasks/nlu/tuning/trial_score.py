"""By what the best training is chosen: how many answers of its model are right, on public data or with noise.

An answer counts from 0 to 1, so that one utterance moves the sum by 1 at most, whether it is added, removed or
replaced. Private validation utterances are in no training, and the hash of its words alone says whether an utterance
is one: it pays for the training or for the score, and not for both (privacy.md section 15).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import numpy as np

from tasks.common.workers import Workers
from tasks.nlu import readers, run_folder
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Rows
from tasks.nlu.dataset import Data
from tasks.nlu.evaluation import right_answers
from tasks.nlu.example_batches import Examples

PUBLIC, NOISY, EXACT = "public", "noisy", "exact"


@dataclass(frozen=True)
class ScoreRule:
    """What ``--score`` says.

    Attributes:
        kind: "public", "noisy" or "exact".
        file: of public utterances.
        noise: standard deviation of the noise on the number of right answers; None if it follows from ε.
    """

    kind: str
    file: str | None = None
    noise: float | None = None

    @classmethod
    def parse(cls, text: str) -> ScoreRule:
        """Of public:FILE, noisy, noisy:Z or exact.

        Example:
            >>> ScoreRule.parse("noisy:3")
            ScoreRule(kind='noisy', file=None, noise=3.0)
        """
        kind, _, rest = text.partition(":")
        if kind == PUBLIC and rest:
            return cls(kind, file=rest)
        if text in (NOISY, EXACT):
            return cls(text)
        try:
            if kind == NOISY and 0 < float(rest) < math.inf:
                return cls(kind, noise=float(rest))
        except ValueError:
            pass  # Z is no number
        raise ValueError(f"score must be public:FILE, noisy, noisy:Z with Z > 0, or exact, got {text!r}")

    def text(self) -> str:
        """What ``parse`` reads."""
        rest = self.file or self.noise
        return self.kind if rest is None else f"{self.kind}:{rest}"

    def in_words(self) -> str:
        """What the score is, to print."""
        if self.kind == PUBLIC:
            return f"right answers on the public utterances of {self.file}: the score itself costs nothing"
        if self.kind == EXACT:
            return "right answers on validation utterances, without noise: no ε covers the choice for these"
        return f"right answers on validation utterances, with noise of standard deviation {self.noise:.4g}"


@dataclass(frozen=True)
class Scored:
    """The utterances that scores are measured on."""

    corpus: Corpus
    rows: Rows

    @classmethod
    def of_rule(cls, rule: ScoreRule, data: Data) -> Scored:
        """Those of a public file, or the validation utterances of the job."""
        if rule.file is None:
            return cls(data.corpus, data.rows.validation)
        corpus = readers.read("jsonl", rule.file)
        return cls(corpus, np.arange(len(corpus)))


def measure(rule: ScoreRule, scored: Scored, folder: Path, config: Config, team: Workers) -> float:
    """The score of a training that has ended, the same on all workers: the share of right answers, in percent.

    With noise, it is drawn once, from the operating system's entropy. The share is for people: divided by a number
    that is the same for all trainings.
    """
    parts = team.together(lambda: run_folder.load(folder))
    table = parts.inputs.table(scored.corpus.words)
    examples = Examples(scored.corpus, scored.rows, table, parts.labels, config.bucket_size)
    model = parts.model.to(team.device)
    right = right_answers(model, examples, parts.labels, team.collective, team.device)
    if rule.noise is not None:
        right += team.collective.gather(SystemRandom().gauss(0.0, rule.noise))[0]
    return 100 * right / len(examples)
