"""How good a model is on some examples; the workers share the work."""

from __future__ import annotations

import math

import torch

from edpsgd.distributed.collectives import Collective
from models.heads import IntentSlotModel
from tasks.nlu.corpus import Rows, Utterance
from tasks.nlu.example_batches import Examples, to_device
from tasks.nlu.labels import Labels
from tasks.nlu.metrics import Answer, Counts, count, right_share


def evaluate(
    model: IntentSlotModel, examples: Examples, labels: Labels, collective: Collective, device: torch.device
) -> dict[str, float]:
    """SER, intent accuracy and slot F1 in percent, the same on all workers, who tell each other counts only."""
    was_training = model.training
    model.eval()
    mine = range(collective.rank, len(examples), collective.size)
    counts = Counts()
    for part in examples.sorted_parts(list(mine)):
        counts += _count_part(model, examples, part, labels, device)
    model.train(was_training)
    of_all_workers = collective.gather(counts)
    return sum(of_all_workers, start=Counts()).scores()


def right_answers(
    model: IntentSlotModel, examples: Examples, labels: Labels, collective: Collective, device: torch.device
) -> float:
    """How many answers are right, the same on all workers: each utterance counts for 0 to 1, by its own share."""
    was_training = model.training
    model.eval()
    mine = range(collective.rank, len(examples), collective.size)
    shares: list[float] = []
    for part in examples.sorted_parts(list(mine)):
        shares += map(right_share, *_answers(model, examples, part, labels, device))
    model.train(was_training)
    return math.fsum(collective.gather(math.fsum(shares)))


def _count_part(
    model: IntentSlotModel,
    examples: Examples,
    part: Rows,
    labels: Labels,
    device: torch.device,
) -> Counts:
    """What the metrics count in some examples."""
    return count(*_answers(model, examples, part, labels, device))


def _answers(
    model: IntentSlotModel,
    examples: Examples,
    part: Rows,
    labels: Labels,
    device: torch.device,
) -> tuple[list[Utterance], list[Answer]]:
    """Some examples, and what the model answers."""
    answers = model.predict(to_device(examples.batch(part), device))
    references = [examples.corpus[row] for row in examples.rows[part].tolist()]
    named: list[Answer] = []
    for answer in answers:
        tags = [labels.tags[tag] for tag in answer.tags]
        named.append((labels.intents[answer.intent], tags))
    return references, named
