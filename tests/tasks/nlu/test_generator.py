"""Generated utterances: the same everywhere, mostly distinct."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter

import pytest

from tasks.nlu import grammar, harder_grammar
from tasks.nlu.corpus import Corpus
from tasks.nlu.generator import DOMAINS, EASIER, HARDER, slots_by_intent, utterances, words

TEMPLATES = grammar.TEMPLATES | harder_grammar.TEMPLATES


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "e0bd9155a2146f40"), ({"domains": HARDER}, "0e8229b572c38108")],
    ids=["easier", "harder"],
)
def test_a_seed_gives_the_same_utterances_on_every_machine(settings, expected):
    digest = hashlib.sha256()
    for one in utterances(500, seed=3, **settings):
        digest.update(json.dumps([one.words, one.tags, one.intent]).encode())
    assert digest.hexdigest()[:16] == expected


def test_fewer_utterances_are_the_first_of_more_and_seeds_differ():
    assert list(utterances(20, seed=1)) == list(utterances(50, seed=1))[:20]
    assert list(utterances(20, seed=1)) != list(utterances(20, seed=2))
    assert list(utterances(0)) == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_domains_have_their_own_intents(domain):
    found = Counter(one.intent for one in utterances(2_000, domains=[domain]))
    assert set(found) == set(TEMPLATES[domain])
    assert min(found.values()) > 0.8 * 2_000 / len(found)


@pytest.mark.parametrize("domains", [EASIER, HARDER], ids=["easier", "harder"])
def test_utterances_are_well_formed_and_mostly_distinct(domains):
    many = list(utterances(20_000, seed=9, domains=domains))
    lengths = sorted(len(one.words) for one in many)
    assert lengths[0] >= 3
    assert lengths[-400] <= 20  # all but two in a hundred
    assert len({one.words for one in many}) > 0.98 * len(many)
    assert sum(not one.slots() for one in many) <= 0.01 * len(many)
    for one in many[:2_000]:
        assert len(one.tags) == len(one.words)
        for before, tag in zip(("O", *one.tags), one.tags, strict=False):
            assert tag[0] != "I" or before[2:] == tag[2:]


def test_the_harder_domains_have_many_slots():
    slots = slots_by_intent(HARDER)
    assert len(slots) >= 7
    assert len(set().union(*slots.values())) >= 30


def test_words_are_ambiguous():
    kinds: dict[str, set[str]] = {}
    for one in utterances(5_000, seed=2):
        for word, tag in zip(one.words, one.tags, strict=True):
            kinds.setdefault(word, set()).add(tag[2:])
    assert {"contact", "title", ""} <= kinds["will"]
    assert sum(len(found) > 1 for found in kinds.values()) > 200


def test_slots_of_the_harder_domains_are_made_of_the_same_words():
    """Most words of titles, cities and days stand in slots of several types: the type is said elsewhere."""
    kinds: dict[str, Counter[str]] = {}
    for one in utterances(20_000, seed=2, domains=HARDER):
        for kind, start, _ in one.slots():
            kinds.setdefault(one.words[start], Counter())[kind] += 1
    for word, found in {"golden": {"song", "album", "artist", "playlist"}, "oslo": {"origin", "destination"}}.items():
        assert found <= kinds[word].keys()
    known_by_word = sum(found.most_common(1)[0][1] for found in kinds.values())
    assert known_by_word < 0.75 * sum(found.total() for found in kinds.values())


@pytest.mark.parametrize("domains", [EASIER, HARDER], ids=["easier", "harder"])
def test_all_words_are_in_the_public_list_and_the_list_has_no_others(domains):
    said = {word for one in utterances(60_000, seed=5, domains=domains) for word in one.words}
    listed = words(domains)
    assert {word for word in said if not word.isdigit()} <= set(listed)
    assert len(set(listed) - said) < 0.02 * len(listed)
    assert listed == sorted(set(listed))
    assert not any(word.isdigit() for word in listed)


@pytest.mark.parametrize("domains", [EASIER, HARDER], ids=["easier", "harder"])
def test_the_slots_of_each_intent_are_known_without_any_utterance(domains):
    found: dict[str, set[str]] = {}
    for one in utterances(20_000, seed=6, domains=domains):
        found.setdefault(one.intent, set()).update(kind for kind, _, _ in one.slots())
    assert slots_by_intent(domains) == found


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
