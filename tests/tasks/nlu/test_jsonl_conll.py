"""Users' own formats: character offsets in jsonl, comments in conll."""

from __future__ import annotations

import json

from tasks.nlu.corpus import Utterance
from tasks.nlu.readers import read
from tests.helpers.corpora import BLOCK, GOOD, OBJECT, written


def test_character_offsets_are_aligned_to_words(tmp_path):
    slots = [{"type": "date", "start": 12, "end": 18}, {"type": "name", "start": 6, "end": 11}]
    value = {"text": " zum  Åsa Ö  heute", "intent": "a", "slots": slots}
    written(tmp_path, {"b.jsonl": json.dumps(value), "a.jsonl": OBJECT, "c.txt": "of no concern"})
    expected = Utterance(("zum", "Åsa", "Ö", "heute"), ("O", "B-name", "I-name", "B-date"), "a")
    assert list(read("jsonl", tmp_path)) == [GOOD, expected]


def test_conll_comments_tokens_with_a_hash_and_both_ways_to_name_an_intent(tmp_path):
    text = "# made by hand\n\n# intent: a\n# text = so so\n# O\nso O\n\n\n\n# intent = b\n#1 B-n"
    written(tmp_path, {"b.conll": text, "a.txt": BLOCK})
    expected = [GOOD, Utterance(("#", "so"), ("O", "O"), "a"), Utterance(("#1",), ("B-n",), "b")]
    assert list(read("conll", tmp_path)) == expected
