"""A model that answers by rule, so that every answer is known."""

from __future__ import annotations

from models.heads import IntentSlotModel, Prediction
from tasks.nlu.labels import Labels

WORDS = ["call", "anna", "lee", "play", "[red]x[/red]"]
LABELS = Labels(["other", "phone", "music"], ["O", "B-name", "I-name", "B-song", "I-song"])
TAG_OF_ROW = [0, 0, 1, 2, 0, 3]  # anna lee is a name, and the one with brackets a song


class ByRule(IntentSlotModel):
    """Knows the tag of every word; the first word says the intent. The score of a tag is 0.9 minus a tenth of it."""

    def __init__(self) -> None:
        super().__init__(1, 3, 5, 0.0)
        self.sizes: list[int] = []

    def predict(self, batch, with_scores=False):
        said = batch["rows"][batch["place"]].tolist()
        self.sizes.append(len(said))
        return [self._one(row[:length], with_scores) for row, length in zip(said, batch["lengths"], strict=True)]

    def _one(self, rows: list[int], with_scores: bool) -> Prediction:
        tags = [TAG_OF_ROW[row] for row in rows]
        scores = [round(0.9 - tag / 10, 1) for tag in tags] if with_scores else []
        return Prediction({1: 1, 4: 2}.get(rows[0], 0), 0.75, tags, scores)


def texts(number: int) -> list[str]:
    """All different; longer ones and shorter ones in turns, and some without words."""
    return [_text(i) for i in range(number)]


def _text(number: int) -> str:
    if number % 5 == 4:
        return ""
    first = ["call", "play", "hm"][number % 3]
    return f"{first} {number} " + "anna " * (number * 7 % 4)
