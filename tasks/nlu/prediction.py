"""Answers of a trained model, in the order of the texts. Nothing that is read is kept or logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from models.heads import Prediction
from tasks.nlu.corpus import OUTSIDE, Corpus, Utterance, spans
from tasks.nlu.example_batches import Examples, to_device
from tasks.nlu.run_folder import Parts

CHUNK = 2048  # lines that are read, sorted by length and answered together


def predict(
    parts: Parts,
    texts: Iterable[str],
    batch_size: int = 64,
    with_scores: bool = True,
    device: torch.device | None = None,
    chunk: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Answers in the order of the texts, each a dictionary: text, intent, score, slots.

    The score of the intent is its probability. That of a slot is the smallest probability of its tags given the whole
    utterance, and its place is counted in characters of the text. Without words there is nothing to answer: intent is
    None.

    Args:
        parts: the model, ready to predict.
        texts: utterances, with or without the ends of lines.
        batch_size: utterances computed at once.
        with_scores: of slots.
        device: where the model is; the CPU if not given.
        chunk: texts that are read before the first of them is answered; CHUNK if not given.
    """
    lines = iter(texts)
    device = device or torch.device("cpu")
    answered = 0
    while read := [text.rstrip("\r\n") for text in islice(lines, chunk or CHUNK)]:
        words_of_texts = [tuple(text.split()) for text in read]
        spoken = [words for words in words_of_texts if words]
        try:
            answers = _answers(parts, spoken, batch_size, with_scores, device)
        except ValueError as error:  # an utterance is too long for the encoder
            first, last = answered + 1, answered + len(read)
            raise ValueError(f"texts {first} to {last}: {error}") from None
        answered += len(read)
        for text, words in zip(read, words_of_texts, strict=True):
            answer = next(answers) if words else None
            yield _readable(parts, text, answer)


def _answers(
    parts: Parts, said: list[tuple[str, ...]], batch_size: int, with_scores: bool, device: torch.device
) -> Iterator[Prediction]:
    """A prediction for each utterance, in order; computed in batches of similar length."""
    corpus = Corpus(Utterance(words, (OUTSIDE,) * len(words), "") for words in said)
    rows = np.arange(len(corpus))
    examples = Examples(corpus, rows, parts.inputs.table(corpus.words), parts.labels, batch_size)
    answers: dict[int, Prediction] = {}
    for numbers in examples.sorted_parts(rows):
        predicted = parts.model.predict(to_device(examples.batch(numbers), device), with_scores)
        answers.update(zip(numbers.tolist(), predicted, strict=True))
    return (answers[number] for number in range(len(corpus)))


def _readable(parts: Parts, text: str, answer: Prediction | None) -> dict[str, Any]:
    """What a program or a person reads; places of slots are characters of the text."""
    if answer is None:
        return {"text": text, "intent": None, "score": None, "slots": []}
    places = [match.span() for match in re.finditer(r"\S+", text)]
    slots: list[dict[str, Any]] = []
    for kind, first, end in spans([parts.labels.tags[tag] for tag in answer.tags]):
        start, stop = places[first][0], places[end - 1][1]
        slot = {"type": kind, "value": text[start:stop], "start": start, "end": stop}
        if answer.tag_scores:
            slot["score"] = min(answer.tag_scores[first:end])
        slots.append(slot)
    intent = parts.labels.intents[answer.intent]
    return {"text": text, "intent": intent, "score": answer.intent_score, "slots": slots}
