"""Word vectors of public text: its sentences, and what the vectors learn."""

from __future__ import annotations

import numpy as np

from tasks.common import fasttext_vectors
from tests.helpers.corpora import corpus


def test_vectors_learn_what_stands_together(tmp_path) -> None:
    """Each word is nearer to those of its own group than to those of the other."""
    text = corpus(tmp_path / "text.txt", lines=1000)
    model = fasttext_vectors.train(text, dimension=8, epochs=10, buckets=100, workers=1)
    one, other = ["one", "two", "three", "four"], ["anna", "omar", "lena", "raj"]
    within = np.mean([model.wv.similarity(a, b) for g in (one, other) for a in g for b in g if a < b])
    across = np.mean([model.wv.similarity(a, b) for a in one for b in other])
    assert within > across + 0.3


def test_min_count_and_folder(tmp_path) -> None:
    """All .txt files in the order of their names, and nothing else; rare words are left out."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text("Two THREE\nthree\n")
    (folder / "a.txt").write_text("\ufeffone two\n\nthree", encoding="utf-8")
    (folder / "c.md").write_text("three three three two two two four four four four")
    assert list(fasttext_vectors.Sentences(folder)) == [["one", "two"], ["three"], ["two", "three"], ["three"]]
    model = fasttext_vectors.train(folder, dimension=4, epochs=1, buckets=10, workers=1)
    assert {word: model.wv.get_vecattr(word, "count") for word in model.wv.index_to_key} == {"three": 3, "two": 2}


def test_long_lines_are_read_to_the_end(tmp_path) -> None:
    """gensim by itself would leave out what is beyond 10,000 words."""
    (tmp_path / "text.txt").write_text("word " * 25_000)
    assert [len(words) for words in fasttext_vectors.Sentences(tmp_path / "text.txt")] == [10_000, 10_000, 5_000]


def test_only_line_feeds_end_a_line(tmp_path) -> None:
    (tmp_path / "text.txt").write_bytes("a\x85b c\u2028d\r\ne\n".encode())
    assert list(fasttext_vectors.Sentences(tmp_path / "text.txt")) == [["a", "b", "c", "d"], ["e"]]
