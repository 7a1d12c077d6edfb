"""Canaries: how they are made, put into the data of users, and kept."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest

from mia.phrases import PAPER, Canary, Configuration, Manifest, insert, insert_texts, make, parse, parse_rates
from tasks.language.dictionary import Dictionary
from tasks.language.user_texts import RawUsers, UserData

OFTEN, NEVER = Configuration(1.0, 1.0), Configuration(0.0, 0.0)
NAMES = Dictionary(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"])


# -------------------------------------------------------------------- canaries


def test_canaries_are_different_phrases_of_the_dictionarys_words() -> None:
    rates = [Configuration(0.1, 0.5), NEVER]
    found = make(7, rates, per_configuration=100, length=4, seed=1)
    assert len({canary.words for canary in found}) == 200
    assert {word for canary in found for word in canary.words} == {3, 4, 5, 6}
    assert [canary.configuration for canary in found] == [rates[0]] * 100 + [rates[1]] * 100
    assert found == make(7, rates, per_configuration=100, length=4, seed=1)
    assert found != make(7, rates, per_configuration=100, length=4, seed=2)


def test_a_dictionary_that_has_just_enough_phrases() -> None:
    found = make(5, [OFTEN], per_configuration=4, length=2, seed=0)
    assert {canary.words for canary in found} == set(product((3, 4), repeat=2))
    with pytest.raises(ValueError, match="enough for 5 different phrases of 2 words, got 5"):
        make(5, [OFTEN], per_configuration=5, length=2, seed=0)


def test_the_papers_configurations() -> None:
    found = parse_rates(PAPER)
    expected = product((1 / 50_000, 3 / 50_000, 1 / 5_000), (0.01, 0.1, 1.0))
    assert [(rates.users_rate, rates.examples_rate) for rates in found] == list(expected)


def test_own_phrases() -> None:
    found = parse(["Cat, bee!", ["hen", "ant"], "dog"], Dictionary([*NAMES.words, ",", "!"]), [OFTEN, NEVER])
    assert [canary.words for canary in found] == [(5, 11, 4, 12), (10, 3), (6,)]
    assert [canary.configuration for canary in found] == [OFTEN, NEVER, OFTEN]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Configuration(1.5, 0.1), "users_rate must be from 0 to 1, got 1.5"),
        (lambda: Configuration(0.1, math.nan), "examples_rate must be from 0 to 1, got nan"),
        (lambda: Canary((5, 2), OFTEN), "none of them UNK, BOS or EOS"),
        (lambda: parse_rates("0.1"), "pairs p_u:p_e of numbers from 0 to 1, got '0.1'"),
        (lambda: parse_rates("0.1:1,1/0:1"), "got '1/0:1'"),
        (lambda: parse_rates("2:1"), "got '2:1'"),
        (lambda: make(100, [], seed=0), "at least one configuration"),
        (lambda: parse([""], NAMES, [OFTEN]), "canary 1: it has no words"),
        (lambda: insert(UserData.from_lists([[]]), [], seed=-1), "seed must be an int >= 0, got -1"),
    ],
)
def test_bad_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("phrase", ["bee zebra cat", ["bee", "zebra", "cat"]])
def test_a_word_that_the_dictionary_misses_is_named_by_its_place(phrase) -> None:
    with pytest.raises(ValueError, match="canary 2: word 2 of 3 is not in the dictionary") as caught:
        parse(["ant", phrase], NAMES, [OFTEN])
    assert "zebra" not in str(caught.value)


# -------------------------------------------------------------------- inserting


def spoken(data: UserData) -> list[list[tuple[int, ...]]]:
    return [[tuple(words.tolist()) for words in data.of_user(k)] for k in range(len(data))]


def test_insertions_are_as_many_as_the_rates_say() -> None:
    """Within four standard deviations; users who share nothing, and sentences in between, stay as they were."""
    generator = np.random.default_rng(3)
    users = [[[100 + k] * int(generator.integers(0, 4)) for _ in range(k % 21)] for k in range(2100)]
    rates = [Configuration(0.3, 0.5), Configuration(0.05, 0.2), NEVER]
    canaries = [Canary((10 + i,) * 5, one) for i, one in enumerate(rates)]
    data = UserData.from_lists(users)
    changed, manifest = insert(data, canaries, seed=5)
    before, after = spoken(data), spoken(changed)
    for canary, sharers, insertions in zip(canaries, manifest.sharers, manifest.insertions, strict=True):
        p_u, p_e = canary.configuration.users_rate, canary.configuration.examples_rate
        assert abs(sharers - 2100 * p_u) <= 4 * math.sqrt(2100 * p_u * (1 - p_u))
        assert insertions == sum(said.count(canary.words) for said in after)
        variance = 100 * sum(n * p_u * p_e * (1 - p_e) + n * n * p_e**2 * p_u * (1 - p_u) for n in range(21))
        both = 0.05 * 0.2 * 0.3 * 0.5 * 21_000  # at most so many of 21,000 sentences are wanted twice
        assert abs(insertions - 21_000 * p_u * p_e) <= 4 * math.sqrt(variance) + both
    phrases = {canary.words for canary in canaries}
    pairs = [pair for one, other in zip(before, after, strict=True) for pair in zip(one, other, strict=True)]
    assert all(new == old or new in phrases for old, new in pairs)
    touched = sum(one != other for one, other in zip(before, after, strict=True))
    assert touched <= sum(manifest.sharers)


def test_a_sentence_that_two_canaries_want_goes_to_either_as_often() -> None:
    data = UserData.from_lists([[[20, 21]] * 10] * 100)
    canaries = [Canary((3, 4), OFTEN), Canary((5, 6, 7), OFTEN)]
    changed, manifest = insert(data, canaries, seed=1)
    assert manifest.sharers == (100, 100)
    assert sum(manifest.insertions) == 1000
    assert abs(manifest.insertions[0] - 500) <= 4 * math.sqrt(250)
    counts = [sum(said.count(canary.words) for said in spoken(changed)) for canary in canaries]
    assert tuple(counts) == manifest.insertions


def test_another_canary_changes_nobodys_sharers() -> None:
    data, rates = UserData.from_lists([[[20]] * 3] * 200), Configuration(0.5, 0.5)
    few, more = ([Canary((3 + i, 4), rates) for i in range(number)] for number in (2, 3))
    assert insert(data, more, 4)[1].sharers[:2] == insert(data, few, 4)[1].sharers
    assert insert(data, few, 5)[1].sharers != insert(data, few, 4)[1].sharers


def test_users_without_sentences_and_no_users_at_all() -> None:
    canaries = [Canary((3, 4), OFTEN)]
    changed, manifest = insert(UserData.from_lists([[], [[]], []]), canaries, seed=0)
    assert spoken(changed) == [[], [(3, 4)], []]
    assert (manifest.sharers, manifest.insertions) == ((3,), (1,))
    assert len(insert(UserData.from_lists([]), canaries, seed=0)[0]) == 0
    assert spoken(insert(UserData.from_lists([[[5]]]), [], seed=0)[0]) == [[(5,)]]


def test_texts_get_the_same_canaries_and_keep_their_spelling() -> None:
    raw = RawUsers([f"u{k}" for k in range(50)], [["The CAT sat!", "dog; hen"] * (k % 4) for k in range(50)])
    canaries = make(len(NAMES), [Configuration(0.5, 0.5)], per_configuration=3, seed=2)
    texts, manifest = insert_texts(raw, canaries, NAMES, seed=7)
    numbers, same = insert(raw.numbered(NAMES), canaries, seed=7)
    assert manifest == same
    assert spoken(texts.numbered(NAMES)) == spoken(numbers)
    phrases = {" ".join(NAMES.decode(canary.words)) for canary in canaries}
    assert {text for own in texts.texts for text in own} == {"The CAT sat!", "dog; hen", *phrases}
    assert raw.texts[1] == ["The CAT sat!", "dog; hen"]


def test_words_that_a_text_cannot_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="canary 1: its words, written as a text, are read as others"):
        insert_texts(RawUsers(["u"], [["x"]]), [Canary((3, 4), OFTEN)], Dictionary(["Paris", "b"]), seed=0)


def test_a_manifest_on_the_disk(tmp_path) -> None:
    file = tmp_path / "canaries.json"
    manifest = Manifest((Canary((5, 9, 4, 10, 7), OFTEN), Canary((3, 4, 5), NEVER)), (7, 0), (40, 0), 3)
    manifest.save(file, NAMES)
    assert json.loads(file.read_text())["canaries"][1]["words"] == ["ant", "bee", "cat"]
    assert Manifest.load(file, NAMES) == manifest
    turned = Dictionary(NAMES.words[::-1])
    assert Manifest.load(file, turned).canaries[1].words == (10, 9, 8)
    with pytest.raises(ValueError, match=r"canaries.json: canary 2: word 1 of 3 is not in the dictionary"):
        Manifest.load(file, Dictionary(NAMES.words[1:]))
    for content in ("{", "[]", '{"seed": 1, "canaries": [{"words": ["ant"]}]}', '{"seed": 1}'):
        file.write_text(content)
        with pytest.raises(ValueError, match="is no manifest of canaries, or it is damaged"):
            Manifest.load(file, NAMES)
    with pytest.raises(ValueError, match="there is no such file"):
        Manifest.load(tmp_path / "none.json", NAMES)
