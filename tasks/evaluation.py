"""How good a model is on some examples; the workers share the work."""

from __future__ import annotations

from typing import Any

import torch

from edpsgd.collectives import Collective
from models.heads import IntentSlotModel
from tasks.examples import Examples, Labels, to_device
from tasks.metrics import scores


def evaluate(
    model: IntentSlotModel, examples: Examples, labels: Labels, collective: Collective, device: torch.device
) -> dict[str, float]:
    """SER, intent accuracy and slot F1 in percent, the same on all workers."""
    was_training = model.training
    model.eval()
    mine = range(collective.rank, len(examples), collective.size)
    predicted: list[tuple[int, int, list[int]]] = []
    for part in examples.sorted_parts(list(mine)):
        answers = model.predict(to_device(examples.batch(part), device))
        predicted += [(int(number), a.intent, a.tags) for number, a in zip(part, answers, strict=True)]
    model.train(was_training)
    everybody: list[Any] = [answer for answers in collective.gather(predicted) for answer in answers]
    references = [examples.corpus[examples.rows[number]] for number, _, _ in everybody]
    named = [(labels.intents[intent], [labels.tags[tag] for tag in tags]) for _, intent, tags in everybody]
    return scores(references, named)
