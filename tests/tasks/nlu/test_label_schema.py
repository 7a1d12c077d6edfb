"""Schemas of intents and slots: their files, and what they must cover."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tasks.nlu import label_schema
from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.label_schema import Schema

SAID = Corpus(
    [
        Utterance(("call", "anna", "at", "nine"), ("O", "B-name", "O", "B-time"), "phone"),
        Utterance(("call", "omar", "jones"), ("O", "B-name", "I-name"), "phone"),
        Utterance(("at", "nine"), ("O", "B-time"), "clock"),
        Utterance(("stop",), ("O",), "stop"),
    ]
)
ALL = np.arange(4)


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "labels.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_slots_of_each_intent() -> None:
    assert label_schema.slots_by_intent(SAID, ALL) == {"phone": {"name", "time"}, "clock": {"time"}, "stop": set()}
    assert label_schema.slots_by_intent(SAID, np.array([1, 3])) == {"phone": {"name"}, "stop": set()}


def test_yaml_and_json_and_what_text_writes(tmp_path) -> None:
    expected = Schema(["phone", "stop"], ["name", "time"], {"phone": ["time", "name"], "stop": []})
    for content in ("intents:\n  phone: [time, name]\n  stop:\n", json.dumps({"intents": expected.slots_of})):
        assert label_schema.read(written(tmp_path, content)) == expected
    again = label_schema.read(written(tmp_path, expected.text()))
    assert again == Schema(["phone", "stop"], ["name", "time"], {"phone": ["name", "time"], "stop": []})


def test_lists_allow_every_slot_everywhere(tmp_path) -> None:
    found = label_schema.read(written(tmp_path, '{"intents": ["a", "b"], "slots": ["s"]}'))
    assert found == Schema(["a", "b"], ["s"], None)
    assert label_schema.read(written(tmp_path, found.text())) == found


def test_slots_that_no_intent_has(tmp_path) -> None:
    found = label_schema.read(written(tmp_path, "intents: {a: [s]}\nslots: [s, t]\n"))
    assert found.labels().tags == ["O", "B-s", "I-s", "B-t", "I-t"]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("", "there must be names and values"),
        ("[]", "there must be names and values"),
        ("{", "are no YAML or JSON"),
        (b"intents: [\xff]", "are no YAML or JSON"),
        ("intents: [phone]", "slots must be a list of texts"),
        ("intents: phone\nslots: []", "intents must be a list of texts"),
        ("intents: [phone, 7]\nslots: []", "intents must be a list of texts"),
        ("intents: {phone: 1}", "the slots of an intent must be a list of texts"),
        ("intents: {7: []}", "intents must be a list of texts"),
        ("intents: {phone: [name]}\nslots: []", "1 slots that the list slots lacks"),
        ("intents: {phone: [name]}\nphones: []", "1 unknown names"),
        ("intents: &a [phone]\nslots: *a", "are no YAML or JSON"),
    ],
)
def test_malformed_files(tmp_path, content, wanted) -> None:
    """Errors say what is wrong and show nothing of the file."""
    with pytest.raises(ValueError, match=wanted) as error:
        label_schema.read(written(tmp_path, content))
    assert "phone" not in str(error.value).replace(str(tmp_path), "")
    with pytest.raises(ValueError, match="cannot read the labels"):
        label_schema.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("slots_of", "wanted"),
    [
        ({"phone": ["name", "time"], "clock": ["time"]}, "lack 1 intents and 0 slots"),
        ({"phone": ["time"], "clock": ["time"], "stop": []}, "lack 0 intents and 1 slots"),
        ({"phone": ["name"], "clock": ["time"], "stop": ["name"]}, "forbid 1 pairs of intent and slot"),
    ],
)
def test_what_a_schema_must_cover(slots_of, wanted) -> None:
    slots = sorted({slot for own in slots_of.values() for slot in own})
    with pytest.raises(ValueError, match=wanted) as error:
        Schema(list(slots_of), slots, slots_of).check_covers(SAID, ALL, "labels.yaml")
    assert "phone" not in str(error.value)
