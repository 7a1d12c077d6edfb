"""Generated utterances: the same everywhere, mostly distinct."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter

import pytest

from tasks.nlu.corpus import Corpus
from tasks.nlu.generator import DOMAINS, utterances, words
from tasks.nlu.grammar import TEMPLATES


def test_a_seed_gives_the_same_utterances_on_every_machine():
    digest = hashlib.sha256()
    for one in utterances(500, seed=3):
        digest.update(json.dumps([one.words, one.tags, one.intent]).encode())
    assert digest.hexdigest()[:16] == "e0bd9155a2146f40"


def test_fewer_utterances_are_the_first_of_more_and_seeds_differ():
    assert list(utterances(20, seed=1)) == list(utterances(50, seed=1))[:20]
    assert list(utterances(20, seed=1)) != list(utterances(20, seed=2))
    assert list(utterances(0)) == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_domains_have_their_own_intents(domain):
    found = Counter(one.intent for one in utterances(2_000, domains=[domain]))
    assert set(found) == set(TEMPLATES[domain])
    assert min(found.values()) > 0.8 * 2_000 / len(found)


def test_utterances_are_well_formed_and_mostly_distinct():
    many = list(utterances(20_000, seed=9))
    lengths = sorted(len(one.words) for one in many)
    assert lengths[0] >= 3
    assert lengths[-400] <= 20  # all but two in a hundred
    assert len({one.words for one in many}) > 0.98 * len(many)
    for one in many[:2_000]:
        assert one.slots()
        assert len(one.tags) == len(one.words)
        for before, tag in zip(("O", *one.tags), one.tags, strict=False):
            assert tag[0] != "I" or before[2:] == tag[2:]


def test_words_are_ambiguous():
    kinds: dict[str, set[str]] = {}
    for one in utterances(5_000, seed=2):
        for word, tag in zip(one.words, one.tags, strict=True):
            kinds.setdefault(word, set()).add(tag[2:])
    assert {"contact", "title", ""} <= kinds["will"]
    assert sum(len(found) > 1 for found in kinds.values()) > 200


def test_all_words_are_in_the_public_list_and_the_list_has_no_others():
    said = {word for one in utterances(60_000, seed=5) for word in one.words}
    assert {word for word in said if not word.isdigit()} <= set(words())
    assert len(set(words()) - said) < 0.02 * len(words())
    assert words() == sorted(set(words()))
    assert not any(word.isdigit() for word in words())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": -1}, "count must be an int >= 0, got -1"),
        ({"count": 1.5}, "count must be an int >= 0, got 1.5"),
        ({"count": 1, "seed": "a"}, "seed must be an int, got 'a'"),
        ({"count": 1, "domains": []}, "domains must be some of communication, health, video"),
        ({"count": 1, "domains": ["health", "cars"]}, "domains must be some of .*cars"),
        ({"count": 1, "domains": "health"}, "domains must be some of .*got 'health'"),
    ],
)
def test_bad_settings_are_named_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        utterances(**settings)


def test_a_million_in_two_minutes():
    begin = time.process_time()
    corpus = Corpus(utterances(10_000))
    assert len(corpus) == 10_000
    assert (time.process_time() - begin) * 100 < 120
