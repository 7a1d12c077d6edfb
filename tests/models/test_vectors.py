"""Word vectors from fastText files, against gensim and hand-written tables; run folders."""

from __future__ import annotations

import gzip
import logging
import struct
from pathlib import Path

import numpy as np
import pytest
from gensim.models import FastText, KeyedVectors
from gensim.models.fasttext import save_facebook_model
from gensim.test.utils import datapath

from models import vectors

TEXT = [["play", "some", "jazz"], ["play", "some", "rock", "music"], ["call", "some", "one"]]
ODD = ["a\x85b", "c\u2028d", "e\u00a0f", "\u3000", "g\x0ch", "“”", "\\n"]


def fasttext(sentences: list[list[str]], **settings: int) -> FastText:
    return FastText(sentences, **{"vector_size": 8, "bucket": 100, "min_count": 1, "workers": 1, **settings})


def binary(path: Path, sentences: list[list[str]] = TEXT, **settings: int) -> FastText:
    model = fasttext(sentences, **settings)
    save_facebook_model(model, str(path))
    return model


def vec(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rms(table: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(table, dtype=np.float64))))


# -------------------------------------------------------------------- .vec


@pytest.mark.parametrize("name", ["small.vec", "small.vec.gz"])
def test_text_file_as_it_is(tmp_path, name) -> None:
    """With the space that fastText leaves at the end of a line, and a word that comes twice."""
    lines = "4 3\nthe 0.5 -1 2e-1 \nAnna 1 2 3 \nthe 9 9 9 \nend 4 5 6 \n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    found = vectors.load(path, scale=False)
    assert (found.words, found.source, found.dimension) == (["the", "Anna", "end"], "fasttext-vec", 3)
    assert found.table.dtype == np.float32
    np.testing.assert_array_equal(found.table, np.array([[0.5, -1, 0.2], [1, 2, 3], [4, 5, 6]], np.float32))
    assert found.index == {"the": 0, "Anna": 1, "end": 2}
    assert found.out_of_vocabulary("omar") is None
    assert found.out_of_vocabulary("the") is None
    assert vectors.load(path, max_words=2, scale=False).words == ["the", "Anna"]


def test_text_file_like_gensim(tmp_path) -> None:
    fasttext(TEXT).wv.save_word2vec_format(str(tmp_path / "small.vec"))
    expected = KeyedVectors.load_word2vec_format(str(tmp_path / "small.vec"), limit=4)
    found = vectors.load(tmp_path / "small.vec", max_words=4, scale=False)
    assert found.words == expected.index_to_key
    np.testing.assert_array_equal(found.table, expected.vectors)


def test_lookup_tries_the_word_and_then_lower_case(tmp_path) -> None:
    path = vec(tmp_path / "small.vec", "3 1\nbill 1\nBill 2\nstraße 3\n")
    found = vectors.load(path)
    rows = found.lookup(["bill", "Bill", "BILL", "Straße", "ill", ""])
    assert rows.tolist() == [0, 1, 0, 2, -1, -1]
    assert rows.dtype == np.int64
    assert found.lookup([]).shape == (0,)


def test_scale(tmp_path) -> None:
    """One factor for all: 3, 4 and zeros have a root mean square of 2.5, and 0.3 / 2.5 = 0.12."""
    found = vectors.load(vec(tmp_path / "small.vec", "2 2\na 3 0\nb 0 4\n"))
    np.testing.assert_allclose(found.table, np.array([[3, 0], [0, 4]]) * 0.3 / 2.5, rtol=1e-6)
    large = vectors.load(vec(tmp_path / "large.vec", "1 2\na 3e38 -3e38\n"))
    np.testing.assert_allclose(large.table, [[0.3, -0.3]], rtol=1e-6)


DAMAGED = {
    "empty": ("", ":1: must hold the number of words and the dimension"),
    "glove": ("the 0.5 0.25\n", ":1: must hold the number of words and the dimension"),
    "no dimension": ("3 0\n", ":1: must hold the number of words and the dimension"),
    "no words": ("0 3\n", "no words"),
    "cut off between lines": ("3 2\na 1 2\nb 1 2\n", "cut off: it lacks 1 of the words"),
    "cut off in a line": ("3 2\na 1 2\nb 1 2\nc 1", ":4: must hold a word and 2 numbers, got 1"),
    "one number": ("2 3\na 1 2 3\nb 1\n", ":3: must hold a word and 3 numbers, got 1"),  # numpy would repeat it
    "too many": ("2 2\na 1 2 3\nb 1 2\n", ":2: must hold a word and 2 numbers, got 3"),
    "no number": ("2 2\na 1 2\nb 1 x\n", ":3: not all of the 2 values are numbers"),
    "no utf-8": (b"2 1\na 1\n\xff 1\n", ":3: the word is not UTF-8"),
    "nan": ("2 2\na 1 nan\nb 1 2\n", "NaN or infinite"),
    "infinite": ("2 2\na 1 inf\nb 1 2\n", "NaN or infinite"),
    "zero": ("1 2\na 0 0\n", "all zero"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_text_file(tmp_path, case) -> None:
    text, message = DAMAGED[case]
    path = vec(tmp_path / "damaged.vec", text)
    with pytest.raises(ValueError, match=message) as caught:
        vectors.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"3 2\n" + data, lambda data: b""])
def test_damaged_gzip_file(tmp_path, damage) -> None:
    path = vec(tmp_path / "small.vec.gz", damage(gzip.compress(b"1 2\na 1 2\n")))
    with pytest.raises(ValueError, match="small.vec.gz"):
        vectors.load(path)


def test_what_is_behind_the_last_word_is_not_read(tmp_path) -> None:
    path = vec(tmp_path / "small.vec", "900 1\na 1\nb 2\nc x y\n")
    assert vectors.load(path, max_words=2).words == ["a", "b"]


@pytest.mark.parametrize("name", ["gone.vec", "gone.vec.gz", "gone.bin"])
def test_missing_file(tmp_path, name) -> None:
    with pytest.raises(ValueError, match=f"there is no vectors file .*{name}"):
        vectors.load(tmp_path / name)


@pytest.mark.parametrize("name", ["small.txt", "small.ftz", "small.gz", "small"])
def test_unknown_ending(tmp_path, name) -> None:
    with pytest.raises(ValueError, match=f"{name} must end in .vec, .vec.gz or .bin"):
        vectors.load(vec(tmp_path / name, "1 1\na 1\n"))


def test_a_missing_file_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ValueError, match="missing.txt must end in"):
        vectors.load("missing.txt")


def test_folder_of_something_else(tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no config.json"):
        vectors.load(tmp_path)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_bad_max_words(tmp_path, count) -> None:
    with pytest.raises(ValueError, match="max_words must be an int >= 1, got"):
        vectors.load(vec(tmp_path / "small.vec", "1 1\na 1\n"), max_words=count)


# -------------------------------------------------------------------- .bin


def test_binary_file_like_gensim(tmp_path) -> None:
    """All words and n-grams, on one scale; a word beyond the table keeps the vector of the file."""
    model = binary(tmp_path / "small.bin")
    found = vectors.load(tmp_path / "small.bin", max_words=3)
    assert (found.source, found.dimension) == ("fasttext-bin", 8)
    assert found.words == model.wv.index_to_key[:3]
    factor = 0.3 / rms(model.wv.vectors[:3])
    np.testing.assert_allclose(found.table, factor * model.wv.vectors[:3], rtol=1e-5)
    for word in ["xylophone", "a", "zürich", model.wv.index_to_key[5], model.wv.index_to_key[0]]:
        np.testing.assert_allclose(found.out_of_vocabulary(word), factor * model.wv.get_vector(word), rtol=1e-5)
    assert found.out_of_vocabulary("xylophone").dtype == np.float32


def test_binary_file_of_the_original_program() -> None:
    """fastText's own .bin and .vec of one training, which come with gensim, are the same vectors."""
    made, written = (vectors.load(datapath(f"crime-and-punishment.{end}"), scale=False) for end in ("bin", "vec"))
    assert made.words == written.words
    words = [row for row, word in enumerate(made.words) if word != "</s>"]  # which gensim takes for a word with parts
    assert len(words) == 290
    np.testing.assert_allclose(made.table[words], written.table[words], rtol=1e-3, atol=1e-5)


def test_parts_of_a_word_are_in_the_case_of_the_file(tmp_path) -> None:
    """A file without capital letters knows nothing of theirs."""
    lower, mixed = binary(tmp_path / "lower.bin"), binary(tmp_path / "mixed.bin", [*TEXT, ["Call", "Anna"]])
    load = {name: vectors.load(tmp_path / f"{name}.bin", scale=False) for name in ("lower", "mixed")}
    expect = np.testing.assert_allclose
    expect(load["lower"].out_of_vocabulary("Xylophone"), lower.wv.get_vector("xylophone"), rtol=1e-5)
    expect(load["mixed"].out_of_vocabulary("Xylophone"), mixed.wv.get_vector("Xylophone"), rtol=1e-5)
    expect(load["mixed"].out_of_vocabulary("JAZZ"), mixed.wv.get_vector("jazz"), rtol=1e-5)
    assert not np.allclose(mixed.wv.get_vector("Xylophone"), mixed.wv.get_vector("xylophone"))


def test_a_word_without_parts_has_no_vector_and_is_not_logged(tmp_path, caplog) -> None:
    model = binary(tmp_path / "long.bin", min_n=5, max_n=6)
    found = vectors.load(tmp_path / "long.bin")
    with caplog.at_level(logging.DEBUG):
        assert found.out_of_vocabulary("qq") is None
        assert found.out_of_vocabulary("") is None
        assert found.out_of_vocabulary("qqqq") is not None
        assert not caplog.records
        model.wv.get_vector("qq")
    assert "qq" in caplog.text  # what is avoided


@pytest.mark.parametrize("setting", ["max_n", "bucket"])
def test_binary_file_without_subwords(tmp_path, setting) -> None:
    model = binary(tmp_path / "plain.bin", **{setting: 0})
    found = vectors.load(tmp_path / "plain.bin", max_words=2, scale=False)
    assert found.out_of_vocabulary("xylophone") is None
    last = model.wv.index_to_key[-1]
    np.testing.assert_array_equal(found.out_of_vocabulary(last), model.wv.get_vector(last))


def test_cut_off_binary_file(tmp_path) -> None:
    """Wherever it is cut: in the head, in the vocabulary, where gensim would not stop reading, or in the vectors."""
    path = tmp_path / "small.bin"
    binary(path)
    whole = path.read_bytes()
    vocabulary = struct.calcsize("<2i12id3i2q")
    for end in [0, 3, 50, vocabulary, vocabulary + 3, vocabulary + 30, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="small.bin is cut off, damaged or of another kind"):
            vectors.load(path)


def test_binary_file_of_another_kind(tmp_path) -> None:
    with pytest.raises(ValueError, match="of another kind: it is no fastText model"):
        vectors.load(vec(tmp_path / "text.bin", "plain text, and no zero byte to end a word " * 9))


def test_damaged_binary_file(tmp_path) -> None:
    """Any byte of the head and of the vocabulary may be wrong: it is a ValueError, or still a file of vectors."""
    path = tmp_path / "small.bin"
    binary(path, TEXT[:1])
    whole = path.read_bytes()
    errors = []
    for position in range(0, 150, 2):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        try:
            vectors.load(path)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert all("small.bin" in error for error in errors)


@pytest.mark.parametrize("part", ["vectors_vocab", "vectors_ngrams"])
def test_nan_in_a_binary_file(tmp_path, part) -> None:
    model = fasttext(TEXT)
    getattr(model.wv, part)[3, 5] = np.nan
    save_facebook_model(model, str(tmp_path / "nan.bin"))
    with pytest.raises(ValueError, match="nan.bin hold numbers that are NaN"):
        vectors.load(tmp_path / "nan.bin")


# -------------------------------------------------------------------- save and restore


def test_restored_words_of_a_text_file(tmp_path) -> None:
    """Words survive that some programs would take for two lines."""
    lines = [f"{word} {row} 1" for row, word in enumerate(ODD)]
    found = vectors.load(vec(tmp_path / "odd.vec", "\n".join([f"{len(ODD)} 2", *lines, ""])))
    found.save(tmp_path / "run" / "vectors")
    (tmp_path / "odd.vec").unlink()
    restored = vectors.restore(tmp_path / "run" / "vectors")
    assert restored.words == found.words == ODD
    assert (restored.source, restored.dimension, restored.table) == ("fasttext-vec", 2, None)
    assert restored.lookup([*ODD, "a"]).tolist() == [*range(len(ODD)), -1]
    assert restored.out_of_vocabulary("xylophone") is None


def test_restored_binary_file(tmp_path, recwarn) -> None:
    """The file is found where it was, or where the caller says that it is now."""
    binary(tmp_path / "small.bin")
    found = vectors.load(tmp_path / "small.bin", max_words=3)
    found.save(tmp_path / "run")
    assert sum(p.stat().st_size for p in (tmp_path / "run").iterdir()) < 1000
    restored = vectors.restore(tmp_path / "run")
    moved = (tmp_path / "small.bin").rename(tmp_path / "moved.bin")
    for again in (restored, vectors.restore(tmp_path / "run", original=moved)):
        assert (again.words, again.source, again.table) == (found.words, "fasttext-bin", None)
        for word in ["xylophone", "music"]:
            np.testing.assert_array_equal(again.out_of_vocabulary(word), found.out_of_vocabulary(word))
    assert not recwarn.list


@pytest.mark.parametrize("change", ["gone", "another"])
def test_restored_without_its_binary_file(tmp_path, change) -> None:
    """Words are known as before, the others get no vectors, and one warning says so."""
    path = tmp_path / "small.bin"
    binary(path)
    found = vectors.load(path)
    found.save(tmp_path / "run")
    path.unlink()
    if change == "another":
        binary(path, seed=2)
    state = "is gone" if change == "gone" else "is not the one that the run was made with"
    with pytest.warns(UserWarning, match=f"small.bin {state}: words that are not in the table") as caught:
        restored = vectors.restore(tmp_path / "run")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert restored.words == found.words
    assert restored.lookup(["jazz"]) == found.lookup(["jazz"])
    assert restored.out_of_vocabulary("xylophone") is None


def test_run_folder_of_another_version(tmp_path) -> None:
    vectors.load(vec(tmp_path / "small.vec", "1 1\na 1\n")).save(tmp_path)
    (tmp_path / "vectors.json").write_text('{"source": "fasttext-vec"}')
    with pytest.raises(ValueError, match="vectors.json is damaged"):
        vectors.restore(tmp_path)
