"""Tags that are repaired while reading."""

from __future__ import annotations

import json

from tasks.nlu.readers import read
from tests.helpers.corpora import aligned, written


def test_an_inside_tag_that_continues_nothing_begins_a_slot_and_is_counted(tmp_path):
    tags = "I-a I-a O I-a B-b I-a I-b"
    repaired = "B-a I-a O B-a B-b B-a B-b"
    lines = "".join(f"w {tag}\n" for tag in tags.split())
    corpora = [
        read("atis", written(tmp_path / "1", aligned("w w w w w w w\n", f"{tags}\n", "a\n"))),
        read("conll", written(tmp_path / "2", {"a.conll": f"# intent = a\n{lines}"})),
        read(
            "jsonl",
            written(
                tmp_path / "3", {"a.jsonl": json.dumps({"tokens": ["w"] * 7, "tags": tags.split(), "intent": "a"})}
            ),
        ),
    ]
    for corpus in corpora:
        assert corpus.repaired == 4
        assert corpus[0].tags == tuple(repaired.split())
