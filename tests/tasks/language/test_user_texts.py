"""Users' texts: the arrays against lists, windows, held-out users."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tasks.language.user_generator import generate
from tasks.language.user_texts import RawUsers, UserData, split_users, windows
from tests.helpers.users import Lists, lists


def random_lists(seed: int) -> Lists:
    """Some users without sentences, some sentences without words."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(3, 50, rng.integers(0, 6)).tolist() for _ in range(rng.integers(0, 5))]
        for _ in range(rng.integers(0, 12))
    ]


# ---------------------------------------------------------------- arrays against lists


@pytest.mark.parametrize("seed", range(8))
def test_arrays_equal_lists(seed) -> None:
    users = random_lists(seed)
    data = UserData.from_lists(users)
    assert lists(data) == users
    assert data.sizes().tolist() == [sum(len(words) for words in user) for user in users]
    chosen = np.random.default_rng(seed).integers(0, max(1, len(users)), 5 * bool(users))
    assert lists(data.select(chosen)) == [users[k] for k in chosen]
    for budget in (1, 4, 100):
        expected = []
        for user in users:
            left, kept = budget, []
            for words in user:
                if left > 0:
                    kept.append(words[:left])
                left -= len(words)
            expected.append(kept)
        assert lists(data.cut(budget)) == expected


def test_one_word_none_and_a_million() -> None:
    data = UserData.from_lists([[[7]], [], [list(range(500))] * 2000])
    cut = data.cut(1600)
    assert data.sizes().tolist() == [1, 0, 1_000_000]
    assert cut.sizes().tolist() == [1, 0, 1600]
    assert [len(words) for words in cut.of_user(2)] == [500, 500, 500, 100]
    assert cut.of_user(2)[3].tolist() == list(range(100))
    assert [len(windows(data.of_user(k))[0]) for k in range(3)] == [1, 0, 2000 * 51]
    assert cut.tokens.dtype == np.int32


def test_dealt_anew() -> None:
    """Every sentence once, users of the same numbers of sentences, and others than before."""
    users = [[[k, place] for place in range(k % 7)] for k in range(200)]
    data = UserData.from_lists(users)
    mixed = data.iid(seed=1)
    assert [len(user) for user in lists(mixed)] == [len(user) for user in users]
    assert sorted(itertools.chain(*lists(mixed))) == sorted(itertools.chain(*users))
    stayed = sum(words[0] == k for k, user in enumerate(lists(mixed)) for words in user)
    assert stayed < 20  # 3 to 4 expected of 600
    assert lists(data.iid(seed=1)) == lists(mixed) != lists(data.iid(seed=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.cut(0), "budget must be an int >= 1"),
        (lambda data: data.select([2]), "users must be from 0 to 1, got 2 to 2"),
        (lambda data: data.select([-1]), "users must be from 0 to 1"),
        (lambda data: data.select([True, False]), "users must be a list of whole numbers"),
        (lambda data: data.select(0), "users must be a list of whole numbers"),
        (lambda data: UserData(data.tokens, data.sentences, data.users[:-1]), "users must go up from 0 to 2"),
        (lambda data: UserData(data.tokens[1:], data.sentences, data.users), "sentences must go up from 0 to 2"),
        (lambda data: windows(data.of_user(0), unroll=0), "unroll must be an int >= 1"),
        (lambda data: split_users(data, [""] * len(data), 0, share=1.0), "share must be >= 0 and < 1"),
        (lambda data: RawUsers(["a"], []), "texts must be of as many users"),
        (lambda data: generate(0, 1), "users must be an int >= 1"),
        (lambda data: generate(1, -1), "seed must be an int >= 0"),
        (lambda data: generate(1, 1, sentences=0), "sentences must be an int >= 1"),
        (lambda data: generate(1, 1, words=0), "words must be an int >= 1"),
    ],
)
def test_bad_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(UserData.from_lists([[[3, 4]], [[5]]]))


@pytest.mark.parametrize("k", [-1, 2])
def test_no_such_user(k) -> None:
    with pytest.raises(IndexError, match="k must be from 0 to 1"):
        UserData.from_lists([[[3, 4]], [[5]]]).of_user(k)


# ---------------------------------------------------------------- windows and held-out users


@pytest.mark.parametrize("unroll", [1, 2, 3, 10])
def test_windows_by_a_loop(unroll) -> None:
    sentences = [list(range(10, 10 + size)) for size in (0, 1, 2, 3, 5, 9, 10, 21)]
    expected_inputs, expected_targets = [], []
    for words in filter(None, sentences):
        inputs, targets = [1, *words], [*words, 2]
        for start in range(0, len(inputs), unroll):
            missing = unroll - len(inputs[start : start + unroll])
            expected_inputs.append(inputs[start : start + unroll] + [2] * missing)
            expected_targets.append(targets[start : start + unroll] + [-100] * missing)
    inputs, targets = windows([np.array(words, np.int32) for words in sentences], unroll)
    assert (inputs.tolist(), targets.tolist()) == (expected_inputs, expected_targets)
    assert inputs.dtype == targets.dtype == np.int64


@pytest.mark.parametrize("sentences", [[], [np.empty(0, np.int32)]])
def test_windows_of_nothing(sentences) -> None:
    inputs, targets = windows(sentences)
    assert inputs.shape == targets.shape == (0, 10)


def test_held_out_users_stay_when_others_come_or_go() -> None:
    data, names = UserData.from_lists([[[k]] for k in range(3000)]), [f"user {k}" for k in range(3000)]
    train, test = split_users(data, names, seed=5, share=0.2)
    assert sorted([*train.tokens, *test.tokens]) == list(range(3000))
    assert 500 < len(test) < 700  # 600 +- 22
    kept = [k for k in range(3000) if k != 7 and k < 2000]
    fewer = split_users(data.select(kept), [names[k] for k in kept], seed=5, share=0.2)[1]
    assert fewer.tokens.tolist() == [k for k in test.tokens if k in kept]
    assert split_users(data, names, seed=6, share=0.2)[1].tokens.tolist() != test.tokens.tolist()
    assert len(split_users(data, names, seed=5, share=0)[1]) == 0
    with pytest.raises(ValueError, match="as many as there are users, 3000, got 2"):
        split_users(data, names[:2], seed=5)
