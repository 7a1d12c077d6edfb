"""The grammar knows every name that it uses."""

from __future__ import annotations

import pytest

from tasks.nlu import grammar, harder_grammar
from tasks.nlu.generator import words


@pytest.mark.parametrize(("found", "intents", "vocabulary"), [(grammar, 5, 2_000), (harder_grammar, 4, 1_000)])
def test_templates_are_many_and_every_name_is_known(found, intents, vocabulary):
    for templates_of in found.TEMPLATES.values():
        assert len(templates_of) >= intents
        assert all(len(set(templates)) >= 8 for templates in templates_of.values())
    assert len(words(tuple(found.TEMPLATES))) > vocabulary  # walks through the whole grammar


def test_phrases_are_many_and_no_name_stands_for_two_things():
    assert sum(len(phrases) for phrases in grammar.PHRASES.values()) > 2_000
    assert not grammar.PHRASES.keys() & harder_grammar.PHRASES.keys()
    assert not grammar.TEMPLATES.keys() & harder_grammar.TEMPLATES.keys()
