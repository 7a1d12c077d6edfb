"""The semantic error rate by hand and against brute force; slot F1 as seqeval says."""

from __future__ import annotations

import warnings
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import f1_score
from seqeval.metrics.sequence_labeling import get_entities

from tasks.nlu.corpus import Slot, Utterance, spans
from tasks.nlu.metrics import SemanticErrors, count, scores, semantic_errors

A, B = ("name", 1, 3), ("date", 4, 6)  # words 1 and 2, words 4 and 5


@pytest.mark.parametrize(
    ("expected", "predicted", "intent", "counts", "rate"),
    [  # deletions, insertions, substitutions, references
        pytest.param([A, B], [A, B], "call", (0, 0, 0, 3), 0, id="all right"),
        pytest.param([A, B], [A, B], "play", (0, 0, 1, 3), 100 / 3, id="wrong intent"),
        pytest.param([], [], "call", (0, 0, 0, 1), 0, id="no slots"),
        pytest.param([], [], "play", (0, 0, 1, 1), 100, id="no slots, wrong intent"),
        pytest.param([A, B], [A], "call", (1, 0, 0, 3), 100 / 3, id="deletion"),
        pytest.param([A, B], [], "play", (2, 0, 1, 3), 100, id="everything wrong"),
        pytest.param([A], [A, B], "call", (0, 1, 0, 2), 50, id="insertion"),
        pytest.param([], [A, B], "play", (0, 2, 1, 1), 300, id="above 100 percent"),
        pytest.param([A, B], [("date", 1, 3), B], "call", (0, 0, 1, 3), 100 / 3, id="wrong type"),
        pytest.param([A, B], [A, ("date", 4, 7)], "call", (0, 0, 1, 3), 100 / 3, id="wrong border"),
        pytest.param([A, B], [A, ("name", 5, 6)], "call", (0, 0, 1, 3), 100 / 3, id="wrong type and border"),
        pytest.param([A], [("name", 1, 2), ("name", 2, 3)], "call", (0, 1, 1, 2), 100, id="two over one"),
        pytest.param([A, B], [("name", 1, 6)], "call", (1, 0, 1, 3), 200 / 3, id="one over two"),
        pytest.param([A], [B], "call", (1, 1, 0, 2), 100, id="elsewhere"),
        pytest.param([A], [("name", 3, 4)], "call", (1, 1, 0, 2), 100, id="beside it"),
        pytest.param(
            [A, ("city", 3, 4)], [("name", 2, 4), ("city", 4, 5)], "call", (1, 1, 1, 3), 100, id="one pair, not two"
        ),
        pytest.param(
            [("a", 0, 2), ("a", 2, 4)], [("a", 1, 3), ("a", 3, 4)], "call", (0, 0, 2, 3), 200 / 3, id="a chain"
        ),
        pytest.param([A, ("x", 3, 5)], [A, ("x", 2, 4)], "call", (0, 0, 1, 3), 100 / 3, id="a right one is no partner"),
    ],
)
def test_worked_examples(expected, predicted, intent, counts, rate):
    errors = semantic_errors(("call", expected), (intent, predicted))
    assert errors == SemanticErrors(*counts)
    assert errors.rate == pytest.approx(rate)
    assert semantic_errors(("call", expected[::-1]), (intent, predicted[::-1])) == errors


def test_counts_add_up():
    total = sum([SemanticErrors(1, 2, 3, 4), SemanticErrors(10, 20, 30, 40)], SemanticErrors())
    assert total == SemanticErrors(11, 22, 33, 44)
    assert total.rate == pytest.approx(150)
    assert SemanticErrors().rate == 0


@st.composite
def slots(draw: st.DrawFn, words: int = 9) -> list[Slot]:
    borders = sorted(draw(st.sets(st.integers(0, words), max_size=8)))
    pieces = [(draw(st.sampled_from("ab")), start, end) for start, end in pairwise(borders)]
    return [piece for piece in pieces if draw(st.booleans())]


def most_pairs(missed: list[Slot], wrong: list[Slot]) -> int:
    """Tries every way to pair them, with fewer and fewer pairs."""
    for size in range(min(len(missed), len(wrong)), 0, -1):
        for some in combinations(missed, size):
            for others in permutations(wrong, size):
                if all(set(range(*a[1:])) & set(range(*b[1:])) for a, b in zip(some, others, strict=True)):
                    return size
    return 0


@settings(max_examples=300, deadline=None)
@given(expected=slots(), predicted=slots())
def test_as_many_pairs_as_brute_force_finds(expected, predicted):
    missed = [slot for slot in expected if slot not in predicted]
    wrong = [slot for slot in predicted if slot not in expected]
    pairs = most_pairs(missed, wrong)
    errors = semantic_errors(("a", expected), ("a", predicted))
    assert errors == SemanticErrors(len(missed) - pairs, len(wrong) - pairs, pairs, len(expected) + 1)


# ---------------------------------------------------------------- over many utterances


def utterance(tags: str, intent: str = "call") -> Utterance:
    return Utterance(tuple(f"w{i}" for i in range(len(tags.split()))), tuple(tags.split()), intent)


def test_all_metrics_by_hand():
    references = [utterance("O B-a I-a"), utterance("B-b O", "play"), utterance("O", "stop")]
    predictions = [("call", ["O", "B-a", "I-a"]), ("play", ["B-a", "B-b"]), ("call", ["O"])]
    # 5 references: two slots, three intents. One slot of the wrong type, one inserted, one wrong intent.
    # F1: one of three predicted slots is right, and one of two is found: 2 * 1 / (3 + 2)
    expected = {"ser": 60, "intent_accuracy": 200 / 3, "slot_f1": 40, "utterances": 3}
    assert scores(references, predictions) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reference", "prediction", "f1"), [("O O", "O O", 100), ("B-a O", "O O", 0), ("O O", "O B-a", 0)]
)
def test_slot_f1_without_slots_has_no_warnings(reference, prediction, f1):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores([utterance(reference)], [("call", prediction.split())])["slot_f1"] == f1


def test_an_inside_tag_alone_is_a_slot_for_both_metrics():
    found = scores([utterance("B-a I-a O B-b")], [("call", ["I-a", "I-a", "O", "I-b"])])
    assert (found["ser"], found["slot_f1"]) == (0, 100)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b", "B-b-c", "I-b-c"]), max_size=8))
def test_seqeval_sees_the_same_slots(tags):
    assert spans(tags) == [(kind, first, last + 1) for kind, first, last in get_entities(tags)]


sentences = st.lists(st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b"]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(sentences.flatmap(lambda tags: st.tuples(st.just(tags), st.permutations(tags))), min_size=1, max_size=6)
)
def test_slot_f1_is_that_of_seqeval_and_counts_of_parts_add_up(pairs):
    references = [utterance(" ".join(expected)) for expected, _ in pairs]
    predictions = [("call", list(predicted)) for _, predicted in pairs]
    whole = scores(references, predictions)
    if any(tag != "O" for expected, _ in pairs for tag in expected):
        by_seqeval = f1_score([list(one.tags) for one in references], [tags for _, tags in predictions])
        assert whole["slot_f1"] == pytest.approx(100 * by_seqeval)
    half = len(pairs) // 2
    parts = [count(references[part], predictions[part]) for part in (slice(half), slice(half, None))]
    assert (parts[0] + parts[1]).scores() == whole


def test_bad_input_is_named_and_not_quoted():
    one = utterance("O O")
    with pytest.raises(ValueError, match="references holds no utterance"):
        scores([], [])
    with pytest.raises(ValueError, match="predictions must be as many as references, got 1 for 2"):
        scores([one, one], [("call", ["O", "O"])])
    with pytest.raises(ValueError, match=r"predictions\[1\] has 1 tags for 2 words"):
        scores([one, one], [("call", ["O", "O"]), ("call", ["O"])])
