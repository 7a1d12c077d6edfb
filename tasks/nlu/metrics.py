"""How good predictions are: semantic error rate (SER), intent accuracy and slot F1, all in percent.

SER = (deletions + insertions + substitutions) / (slots of the references), where the intent of an utterance counts
as one of its slots. It may exceed 100 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seqeval.metrics.sequence_labeling import get_entities

from tasks.nlu.corpus import Slot, Utterance, spans

Answer = tuple[str, Sequence[str]]  # an intent, and a tag for each word

Meaning = tuple[str, Sequence[Slot]]


@dataclass(frozen=True)
class SemanticErrors:
    """Counts that can be added.

    Attributes:
        deletions: reference slots that nothing was predicted for.
        insertions: predicted slots where the reference has none.
        substitutions: slots with the wrong type or borders, and wrong intents.
        references: slots of the references, with one for each intent.

    Example:
        >>> (SemanticErrors(deletions=1, references=3) + SemanticErrors(substitutions=1, references=1)).rate
        50.0
    """

    deletions: int = 0
    insertions: int = 0
    substitutions: int = 0
    references: int = 0

    def __add__(self, other: SemanticErrors) -> SemanticErrors:
        return SemanticErrors(
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.substitutions + other.substitutions,
            self.references + other.references,
        )

    @property
    def rate(self) -> float:
        """SER in percent; 0 where there is nothing to be wrong about."""
        return 100 * (self.deletions + self.insertions + self.substitutions) / max(1, self.references)


def semantic_errors(reference: Meaning, prediction: Meaning) -> SemanticErrors:
    """The errors of one utterance.

    A slot is right if its type and both borders are. Of the others, a reference slot and a predicted one that share
    a word are one substitution, each slot in at most one such pair, and with as many pairs as possible. What is left
    of the reference is deleted, and what is left of the prediction inserted. A wrong intent is a substitution.

    Args:
        reference: intent and slots, as in ``(utterance.intent, utterance.slots())``.
        prediction: the same.

    Example:
        >>> semantic_errors(("call", [("name", 1, 3)]), ("call", [("name", 1, 2), ("date", 4, 5)]))
        SemanticErrors(deletions=0, insertions=1, substitutions=1, references=2)
    """
    intent, expected = reference
    predicted_intent, predicted = prediction
    right = set(expected) & set(predicted)
    missed = sorted((slot for slot in expected if slot not in right), key=_place)
    wrong = sorted((slot for slot in predicted if slot not in right), key=_place)
    pairs = _count_pairs(missed, wrong)
    is_intent_wrong = intent != predicted_intent
    return SemanticErrors(
        deletions=len(missed) - pairs,
        insertions=len(wrong) - pairs,
        substitutions=pairs + is_intent_wrong,
        references=len(expected) + 1,
    )


def _place(slot: Slot) -> tuple[int, int]:
    return slot[1:]


def _count_pairs(missed: Sequence[Slot], wrong: Sequence[Slot]) -> int:
    """The most pairs of slots that share a word. Both lists are sorted, and slots of one list share none.

    To pair the first two that share a word is never worse: no other pair could have used both of them.
    """
    first, second, pairs = 0, 0, 0
    while first < len(missed) and second < len(wrong):
        _, start, end = missed[first]
        _, other_start, other_end = wrong[second]
        if end <= other_start:  # nothing that comes later shares a word with the missed slot
            first += 1
        elif other_end <= start:
            second += 1
        else:
            pairs += 1
            first += 1
            second += 1
    return pairs


@dataclass(frozen=True)
class Counts:
    """All that the metrics are made of. Counts of parts of the data can be added, and take no room.

    Attributes:
        errors: semantic errors.
        utterances: how many there were.
        right_intents: how many of their intents are right.
        right_slots, slots, predicted_slots: how many slots are right, were to be found, and were predicted (seqeval).
    """

    errors: SemanticErrors = field(default_factory=SemanticErrors)
    utterances: int = 0
    right_intents: int = 0
    right_slots: int = 0
    slots: int = 0
    predicted_slots: int = 0

    def __add__(self, other: Counts) -> Counts:
        sums = {name: mine + getattr(other, name) for name, mine in vars(self).items()}
        return Counts(**sums)

    def scores(self) -> dict[str, float]:
        """The metrics, as ``scores`` gives them."""
        if not self.utterances:
            raise ValueError("references holds no utterance: there is nothing to score")
        both = self.slots + self.predicted_slots
        slot_f1 = 200 * self.right_slots / both if both else 100.0
        return {
            "ser": self.errors.rate,
            "intent_accuracy": 100 * self.right_intents / self.utterances,
            "slot_f1": slot_f1,
            "utterances": self.utterances,
        }


def count(references: Sequence[Utterance], predictions: Sequence[Answer]) -> Counts:
    """The counts of some utterances; the arguments are those of ``scores``.

    Example:
        >>> said = Utterance(("call", "anna"), ("O", "B-name"), "call")
        >>> both = count([said], [("call", ["O", "O"])]) + count([said], [("call", ["O", "B-name"])])
        >>> both.scores()["ser"]
        25.0
    """
    _check(references, predictions)
    total = Counts()
    for utterance, answer in zip(references, predictions, strict=True):
        total += _counted(utterance, *answer)
    return total


def _counted(utterance: Utterance, intent: str, tags: Sequence[str]) -> Counts:
    """The counts of one utterance and its answer."""
    slots = set(get_entities(list(utterance.tags)))
    predicted = set(get_entities(list(tags)))
    return Counts(
        errors=semantic_errors((utterance.intent, utterance.slots()), (intent, spans(tags))),
        utterances=1,
        right_intents=int(utterance.intent == intent),
        right_slots=len(slots & predicted),
        slots=len(slots),
        predicted_slots=len(predicted),
    )


def right_share(utterance: Utterance, answer: Answer) -> float:
    """How much of an utterance's answer is right, from 0 to 1: one less its errors by its slots and intent.

    Example:
        >>> said = Utterance(("call", "anna"), ("O", "B-name"), "call")
        >>> right_share(said, ("call", ["O", "O"])), right_share(said, ("stop", ["B-date", "O"]))
        (0.5, 0.0)
    """
    intent, tags = answer
    errors = semantic_errors((utterance.intent, utterance.slots()), (intent, spans(tags)))
    return 1 - min(1.0, errors.rate / 100)


def scores(references: Sequence[Utterance], predictions: Sequence[Answer]) -> dict[str, float]:
    """All metrics over many utterances.

    Args:
        references: the right answers.
        predictions: for each, an intent and as many tags as words. An I- that continues nothing begins a slot.

    Returns:
        "ser", "intent_accuracy" and "slot_f1" (micro average of seqeval's slots; 100 if there are none on either
        side), all in percent, and "utterances".

    Example:
        >>> scores([Utterance(("call", "anna"), ("O", "B-name"), "call")], [("call", ["O", "O"])])
        {'ser': 50.0, 'intent_accuracy': 100.0, 'slot_f1': 0.0, 'utterances': 1}
    """
    return count(references, predictions).scores()


def _check(references: Sequence[Utterance], predictions: Sequence[Answer]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"predictions must be as many as references, got {len(predictions)} for {len(references)}")
    for number, (utterance, (_, tags)) in enumerate(zip(references, predictions, strict=True)):
        if len(tags) != len(utterance.words):
            raise ValueError(f"predictions[{number}] has {len(tags)} tags for {len(utterance.words)} words")
