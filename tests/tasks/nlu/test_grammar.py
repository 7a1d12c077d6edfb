"""The grammar knows every name that it uses."""

from __future__ import annotations

from tasks.nlu.generator import DOMAINS, words
from tasks.nlu.grammar import PHRASES, TEMPLATES


def test_templates_are_many_and_every_name_is_known():
    for domain in DOMAINS:
        assert len(TEMPLATES[domain]) >= 5
        assert all(len(set(templates)) >= 8 for templates in TEMPLATES[domain].values())
    assert sum(len(phrases) for phrases in PHRASES.values()) > 2_000
    assert len(words()) > 2_000  # walks through the whole grammar
