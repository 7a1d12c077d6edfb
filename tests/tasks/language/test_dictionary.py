"""The dictionary: words of a text, numbers of words, and bad lists."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.language.dictionary import Dictionary, tokenize
from tests.helpers.users import assert_refused


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
