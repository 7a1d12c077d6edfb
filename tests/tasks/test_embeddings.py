"""Training word vectors from the command line: what is written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gensim.models import KeyedVectors
from gensim.models.fasttext import load_facebook_vectors

from models import vectors
from tasks import embeddings
from tasks.common import fasttext_vectors
from tests.helpers.corpora import corpus

SMALL = ["--dimension", "8", "--epochs", "2", "--buckets", "100", "--workers", "1"]


def run(text: Path, output: Path, *settings: str) -> int:
    return embeddings.main(["--corpus", str(text), "--output", str(output), *SMALL, *settings])


def test_binary_file(tmp_path, capsys) -> None:
    """It holds all words in lower case, is read by gensim and as word vectors, and nothing else is left behind."""
    text = corpus(tmp_path / "text.txt")
    assert run(text, tmp_path / "small.bin") == 0
    out, err = capsys.readouterr()
    assert "must be public text, and not the training set" in out
    assert "8 words of 8 numbers, from 1200 words" in out
    assert "2/2" in err
    keyed = load_facebook_vectors(str(tmp_path / "small.bin"))
    assert sorted(keyed.index_to_key) == ["anna", "four", "lena", "omar", "one", "raj", "three", "two"]
    assert (keyed.vector_size, keyed.bucket) == (8, 100)
    found = vectors.load(tmp_path / "small.bin", scale=False)
    np.testing.assert_allclose(found.out_of_vocabulary("annas"), keyed.get_vector("annas"), rtol=1e-5)
    assert {p.name for p in tmp_path.iterdir()} == {"text.txt", "small.bin"}


def test_text_file(tmp_path) -> None:
    text = corpus(tmp_path / "text.txt")
    assert run(text, tmp_path / "small.vec") == 0
    assert run(text, tmp_path / "small.bin") == 0
    found = vectors.load(tmp_path / "small.vec", scale=False)
    same = KeyedVectors.load_word2vec_format(str(tmp_path / "small.vec"))
    np.testing.assert_array_equal(found.table, same.vectors)
    np.testing.assert_allclose(found.table, vectors.load(tmp_path / "small.bin", scale=False).table, rtol=1e-4)


def test_a_seed_gives_the_same_file(tmp_path) -> None:
    text = corpus(tmp_path / "text.txt")
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert run(text, tmp_path / f"{name}.bin", "--seed", seed) == 0
    a, b, c = ((tmp_path / f"{name}.bin").read_bytes() for name in "abc")
    assert a == b
    assert a != c


REFUSED = {
    "not utf-8": (b"fine here\nsecret \xe9t\xe9\n", "text.txt:2: not UTF-8 at byte 8 of the line"),
    "zero byte": (b"fine here\nfine\nsecret\0\n", "text.txt:3: not plain text, but a zero byte"),
    "empty": (b"", "text.txt has no word that occurs at least 2 times"),
    "blank": (b" \n\t\n", "text.txt has no word that occurs at least 2 times"),
    "rare": (b"all words once\n", "text.txt has no word that occurs at least 2 times"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_corpus(tmp_path, capsys, case) -> None:
    """One line that names the place and none of the words; no file is written, and an old one stays."""
    data, message = REFUSED[case]
    (tmp_path / "text.txt").write_bytes(data)
    (tmp_path / "old.bin").write_text("old")
    assert run(tmp_path / "text.txt", tmp_path / "old.bin") == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert (tmp_path / "old.bin").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_missing_corpus(tmp_path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    assert run(tmp_path / "gone.txt", tmp_path / "x.bin") == 2
    assert "gone.txt" in capsys.readouterr().err
    assert run(tmp_path / "folder", tmp_path / "x.bin") == 2
    assert "with none in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [("x.txt", "must end in .bin or .vec"), ("x", "must end in .bin or .vec"), ("gone/x.bin", "must be a file in a")],
)
def test_bad_output_is_refused_before_the_work(tmp_path, capsys, output, message) -> None:
    assert run(tmp_path / "gone.txt", tmp_path / output) == 2  # the corpus is not looked at yet
    assert message in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    def stop(model: object, path: str) -> None:
        Path(path).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(fasttext_vectors, "save_facebook_model", stop)
    (tmp_path / "old.bin").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        run(corpus(tmp_path / "text.txt"), tmp_path / "old.bin")
    assert (tmp_path / "old.bin").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("flag", ["--dimension", "--epochs", "--min-count", "--buckets", "--workers"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many"])
def test_bad_numbers(tmp_path, capsys, flag, value) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "text.txt", tmp_path / "x.bin", f"{flag}={value}")
    assert f"argument {flag}: must be a whole number from 1" in capsys.readouterr().err
