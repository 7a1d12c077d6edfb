"""Users' texts: the dictionary, the arrays against lists, windows, files and their errors, synthetic users."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tasks.common.text_files import ReadError
from tasks.language.dictionary import Dictionary, tokenize
from tasks.language.readers import read_jsonl, read_shakespeare, write_jsonl
from tasks.language.user_generator import generate, generate_words
from tasks.language.user_texts import RawUsers, UserData, split_users, windows
from tests.helpers.corpora import data_folder, written

Lists = list[list[list[int]]]


def lists(data: UserData) -> Lists:
    return [[words.tolist() for words in data.of_user(k)] for k in range(len(data))]


def random_lists(seed: int) -> Lists:
    """Some users without sentences, some sentences without words."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(3, 50, rng.integers(0, 6)).tolist() for _ in range(rng.integers(0, 5))]
        for _ in range(rng.integers(0, 12))
    ]


def assert_refused(read: Callable[[Path], object], folder: Path, content: bytes, message: str) -> None:
    """The error names the file and the line, and tells nothing of the secret in it."""
    (folder / "file").write_bytes(content)
    with pytest.raises(ReadError, match=f"file{message}") as caught:
        read(folder / "file")
    assert "secret" not in str(caught.value).replace(str(folder), "").lower()


# ---------------------------------------------------------------- the dictionary


def test_words_of_a_text() -> None:
    assert tokenize("We’ll see: O'Hara's 3 cats...\tÉtats-Unis!") == [
        *("we'll", "see", ":", "o'hara's", "3", "cats", ".", ".", ".", "états", "-", "unis", "!")
    ]
    assert tokenize(" \n") == []


def test_the_most_frequent_words_and_ties_by_the_alphabet(tmp_path) -> None:
    dictionary = Dictionary.from_texts(["b a c", "C d d, e"], size=4)  # c, d twice; then , and a
    assert dictionary.words == ["c", "d", ",", "a"]
    assert dictionary.encode(["a", "b", "c", "<eos>"]).tolist() == [6, 0, 3, 0]
    assert dictionary.encode([]).dtype == np.int32
    assert dictionary.decode(np.array([3, 0, 1, 2])) == ["c", "<unk>", "<bos>", "<eos>"]
    assert ("c" in dictionary, "b" in dictionary, "<bos>" in dictionary, len(dictionary)) == (True, False, False, 7)
    dictionary.save(tmp_path / "words.txt")
    assert (tmp_path / "words.txt").read_bytes() == b"c\nd\n,\na\n"
    assert Dictionary.load(tmp_path / "words.txt").words == dictionary.words


@pytest.mark.parametrize("number", [-1, 4])
def test_numbers_that_are_no_words(number) -> None:
    with pytest.raises(ValueError, match="ids must be from 0 to 3"):
        Dictionary(["a"]).decode([0, number])


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"secret\nb\nsecret\n", 3, "is there twice"),
        (b"a\n<bos>\n", 2, "is one of"),
        (b"a\nsecret word\n", 2, "is no word"),
        (b"a\n\nb\n", 2, "is no word"),
        (b"secret\xff\n", 1, "UTF-8"),
        (b"", 1, "empty"),
    ],
)
def test_bad_lists_of_words(content, line, message, tmp_path) -> None:
    assert_refused(Dictionary.load, tmp_path, content, f":{line}: .*{message}")


@pytest.mark.parametrize("words", [[], "word", ["a", "a"], ["a", "<unk>"], ["a b"], [3]])
def test_bad_words(words) -> None:
    with pytest.raises(ValueError, match=r"words(\[\d\])? "):
        Dictionary(words)


def test_no_dictionary_of_nothing() -> None:
    with pytest.raises(ValueError, match="texts must hold at least one word"):
        Dictionary.from_texts(["", " "])
    with pytest.raises(ValueError, match="size must be an int >= 1, got 0"):
        Dictionary.from_texts(["a"], size=0)


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


# ---------------------------------------------------------------- files


def test_speeches(tmp_path) -> None:
    """A line of a speech may end with a colon; a speaker may be silent."""
    written(tmp_path, {"play.txt": "ANNA:\nHe said:\nBEN:\n\nBEN:\n\n\nFirst Lord:\nNo.\r\n\nANNA:\nYes. \n"})
    assert read_shakespeare(tmp_path) == RawUsers(["ANNA", "First Lord"], [["He said:", "BEN:", "Yes."], ["No."]])


def test_the_real_plays() -> None:
    """Counted a second time by cutting the text at blank lines."""
    file = data_folder() / "shakespeare" / "input.txt"
    if not file.is_file():
        pytest.skip("there is no shakespeare/input.txt among the corpora")
    speeches = [block.strip("\n").split("\n") for block in file.read_text().split("\n\n") if block.strip()]
    spoken = Counter({speech[0]: 0 for speech in speeches})
    for speech in speeches:
        spoken[speech[0]] += sum(bool(line.strip()) for line in speech[1:])
    users = read_shakespeare(file)
    assert {f"{name}:": len(texts) for name, texts in zip(users.names, users.texts, strict=True)} == +spoken
    data = users.numbered(Dictionary.from_texts(itertools.chain(*users.texts), size=100_000))
    assert len(data.sentences) - 1 == sum(spoken.values())
    assert data.tokens.min() == 3  # every word is known


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"Secret words.\n", ":1", "must begin with the name"),
        (b"ANNA:\nYes.\n\nSecret words.\n", ":4", "must begin with the name"),
        (b"ANNA:\nsecret \xff\n", ":2", "UTF-8"),
        (b":\nSecret.\n", ":1", "must begin with the name"),
        (b"", ":1", "empty"),
        (b"\n\n", "", "no text of any user"),
    ],
)
def test_bad_speeches(content, where, message, tmp_path) -> None:
    assert_refused(read_shakespeare, tmp_path, content, f"{where}: .*{message}")


def test_lines_of_users_anywhere_in_the_file(tmp_path) -> None:
    rows = [("b", "One."), (7, "Zwei – two"), ("b", ""), ("7", "drei\nlines"), ("ä", "x")]
    text = "\n\n".join(json.dumps({"user": user, "text": text}) for user, text in rows)
    written(tmp_path, {"in.jsonl": text})
    users = read_jsonl(tmp_path / "in.jsonl")
    assert users == RawUsers(["b", "7", "ä"], [["One.", ""], ["Zwei – two", "drei\nlines"], ["x"]])
    write_jsonl(tmp_path / "out.jsonl", users)
    assert read_jsonl(tmp_path / "out.jsonl") == users
    numbered = users.numbered(Dictionary(["one", "two", "lines"]))
    assert lists(numbered) == [[[3, 0], []], [[0, 0, 4], [0, 5]], [[0]]]


GOOD = b'{"user": "a", "text": "x"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"user": "a", "text": secret}', "no valid JSON"),
        (b'["secret"]', "no JSON object"),
        (b'{"text": "secret"}', "'user' is missing"),
        (b'{"user": "secret"}', "'text' is missing"),
        (b'{"user": 1.5, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": true, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": null, "text": "secret"}', "'user' must be a string or a whole number"),
        (b'{"user": "a", "text": ["secret"]}', "'text' must be a string"),
        (b'{"user": "a", "text": "secret \xff"}', "UTF-8"),
        (b'{"user": "a", "text": "secret \\ud800"}', "UTF-8"),
    ],
)
def test_bad_lines(line, message, tmp_path) -> None:
    assert_refused(read_jsonl, tmp_path, GOOD + b"\n" + line + b"\n" + GOOD, f":3: .*{message}")


def test_files_without_users(tmp_path) -> None:
    written(tmp_path, {"empty.jsonl": "", "blank.jsonl": "\n \n"})
    with pytest.raises(ReadError, match="empty.jsonl:1: the file is empty"):
        read_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(ReadError, match="blank.jsonl: there is no text of any user"):
        read_jsonl(tmp_path / "blank.jsonl")
    with pytest.raises(ReadError, match="there is no such file"):
        read_jsonl(tmp_path / "none.jsonl")


# ---------------------------------------------------------------- synthetic users


def test_words_of_the_generator() -> None:
    words = generate_words(10_000)
    assert len(set(words)) == 10_000
    assert words[:500] == generate_words(500)
    assert all(tokenize(word) == [word] for word in words)


def test_generated_users_repeat_and_grow() -> None:
    users = generate(300, seed=3, sentences=5, words=200)
    assert generate(40, seed=3, sentences=5, words=200).texts == users.texts[:40]
    assert generate(40, seed=4, sentences=5, words=200).texts != users.texts[:40]
    counts = [len(texts) for texts in users.texts]
    assert (min(counts), max(counts)) == (3, 7)
    assert np.mean(counts) == pytest.approx(5, abs=0.4)
    assert len(set(users.names)) == 300


def test_generated_language() -> None:
    """Frequent words first, as in Zipf's law; the word before tells much about the next; users differ in topics."""
    data = generate(256, seed=1, words=500).numbered(Dictionary(generate_words(500)))
    counts = np.bincount(data.tokens, minlength=503)
    assert counts[:3].sum() == 0  # no word is missing in the list
    tens, hundreds, rest = counts[3:13].sum(), counts[13:103].sum(), counts[103:].sum()
    assert 0.2 < tens / len(data.tokens) < 0.5  # 0.35 of the weights 1 / (rank + 1)
    assert hundreds > rest
    assert _guessed(data.tokens[:-1], data.tokens[1:]) > 1.5 * counts.max() / len(data.tokens)
    assert _distance(data) > 1.2 * _distance(data.iid(seed=0))


def _guessed(before: np.ndarray, after: np.ndarray) -> float:
    """How often the word that most often follows is right."""
    pairs = Counter(zip(before.tolist(), after.tolist(), strict=True))
    best: dict[int, int] = {}
    for (word, _), count in pairs.items():
        best[word] = max(best.get(word, 0), count)
    return sum(best.values()) / len(before)


def _distance(data: UserData) -> float:
    """Of a user's shares of the 100 most frequent words from everybody's, squared, on average."""
    shares = [np.bincount(np.concatenate(data.of_user(k)), minlength=503)[3:103] for k in range(len(data))]
    users = np.array([share / share.sum() for share in shares])
    return float(((users - users.mean(axis=0)) ** 2).sum(axis=1).mean())


def test_personal_phrases() -> None:
    """Beginnings of three rare words that one user says again and again, and nobody else."""
    users = generate(200, seed=2, sentences=60, words=2000)
    said = [Counter(" ".join(text.split()[:3]) for text in texts) for texts in users.texts]
    everybody = Counter(phrase for own in said for phrase in own)
    repeated = [[p for p, n in own.items() if n >= 2 and everybody[p] == 1] for own in said]
    assert np.mean([len(phrases) for phrases in repeated]) == pytest.approx(
        1.7, abs=0.5
    )  # of three, each said Poisson(1 to 3) times
