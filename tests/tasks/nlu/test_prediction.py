"""Answers: order, places of slots, and utterances that are too long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models.bert import BERT, BertInputs
from models.clc import ClcInputs
from models.vectors import WordVectors
from tasks import predict
from tasks.nlu import prediction, run_folder
from tests.helpers.rule_model import LABELS, WORDS, ByRule, texts
from tests.helpers.small_models import tiny_configuration


@pytest.fixture
def parts(monkeypatch) -> run_folder.Parts:
    """What the command loads, whatever the folder."""
    parts = run_folder.Parts(ByRule(), ClcInputs(WordVectors(WORDS, None, "list", 8)), LABELS)
    monkeypatch.setattr(predict, "load", lambda folder: parts)
    return parts


def test_an_answer(parts) -> None:
    [found] = prediction.predict(parts, ["call anna lee"])
    slot = {"type": "name", "value": "anna lee", "start": 5, "end": 13, "score": 0.7}  # the smaller of 0.8 and 0.7
    assert found == {"text": "call anna lee", "intent": "phone", "score": 0.75, "slots": [slot]}


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("call anna lee", [(5, 13)]),
        ("call  anna\tlee", [(6, 14)]),
        ("  call anna  lee  ", [(7, 16)]),
        ("anna play lee", [(0, 4), (10, 13)]),
        ("anna lee anna", [(0, 8), (9, 13)]),
        ("Ä🤖\u00a0anna\u2003 lee", [(3, 12)]),
        ("call", []),
    ],
)
def test_places_are_characters_of_the_text(parts, text, places) -> None:
    """Blanks of all kinds and numbers are kept as they are; the end of the line is no part of the text."""
    for end in ("", "\n", "\r\n"):
        [found] = prediction.predict(parts, [text + end])
        assert found["text"] == text
        assert [(slot["start"], slot["end"]) for slot in found["slots"]] == places
        assert all(slot["value"] == text[slot["start"] : slot["end"]] for slot in found["slots"])


def test_lines_without_words(parts) -> None:
    found = list(prediction.predict(parts, ["", "call", " \t \n", "\n", "play", ""]))
    assert [one["intent"] for one in found] == [None, "phone", None, None, "music", None]
    assert found[2] == {"text": " \t ", "intent": None, "score": None, "slots": []}
    assert [one["intent"] for one in prediction.predict(parts, ["", "\n"])] == [None, None]
    assert list(prediction.predict(parts, [])) == []


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("chunk", [1, 3, 2048])
def test_order_is_kept(parts, monkeypatch, chunk, batch_size) -> None:
    monkeypatch.setattr(prediction, "CHUNK", chunk)
    found = list(prediction.predict(parts, texts(20), batch_size))
    assert [one["text"] for one in found] == texts(20)
    for text, one in zip(texts(20), found, strict=True):
        words = text.split()
        assert one["intent"] == ({"call": "phone", "play": "music", "hm": "other"}[words[0]] if words else None)
        assert len(one["slots"]) == text.count("anna")
    assert max(parts.model.sizes) == min(chunk, batch_size, 16)


def test_no_more_is_read_than_a_chunk(parts, monkeypatch) -> None:
    monkeypatch.setattr(prediction, "CHUNK", 3)
    read = []

    def endless() -> Iterator[str]:
        while True:
            read.append(1)
            yield "call anna"

    found = prediction.predict(parts, endless())
    counts = [(next(found), len(read))[1] for _ in range(7)]
    assert counts == [3, 3, 3, 6, 6, 6, 9]


def test_utterance_that_is_too_long(parts) -> None:
    """The error says where to look, and nothing that was said."""
    inputs = BertInputs(BertInputs.from_words(WORDS).tokenizer, most=6)
    model = BERT(tiny_configuration(len(inputs.tokenizer)), 3, 5).eval()
    said = ["call anna", "", "play", "call " * 5, "lee"]
    found = prediction.predict(run_folder.Parts(model, inputs, LABELS), said, chunk=2)
    assert [next(found)["text"] for _ in range(2)] == ["call anna", ""]
    with pytest.raises(ValueError, match="^texts 3 to 4: 1 of 2 utterances have more .* longest 5$"):
        next(found)
