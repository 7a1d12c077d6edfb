"""FastText word vectors of public text: its sentences, the training by gensim, and the file of vectors."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gensim.models import FastText
from gensim.models.callbacks import CallbackAny2Vec
from gensim.models.fasttext import save_facebook_model
from tqdm import tqdm

from edpsgd import files

_LONGEST = 10_000  # words in a sentence; gensim leaves out what is beyond


class Sentences:
    """The lines of a text file, or of all .txt files of a folder in the order of their names, in lower case.

    They are read from the disk every time. Words are what white space parts.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "text.txt")
        >>> _ = path.write_text("Call Anna")
        >>> list(Sentences(path))
        [['call', 'anna']]
    """

    def __init__(self, corpus: str | os.PathLike[str]) -> None:
        path = Path(corpus)
        self.files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not self.files:
            raise ValueError(f"corpus must be a text file or a folder of .txt files, got {path} with none in it")
        if not self.files[0].exists():
            raise ValueError(f"corpus must be a text file or a folder of .txt files, and there is no {path}")

    def __iter__(self) -> Iterator[list[str]]:
        for path in self.files:
            with files.open_bytes(path) as file:
                for number, line in enumerate(_bounded(file, path), 1):
                    words = _words(line, f"{path}:{number}")
                    for begin in range(0, len(words), _LONGEST):
                        yield words[begin : begin + _LONGEST]


def _bounded(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of the file; a line that memory may not hold is an error that names it."""
    try:
        yield from files.lines(file)
    except files.LongLine as error:
        raise ValueError(f"{path}:{error.number}: longer than {files.LIMIT} bytes, break the line") from None


def _words(line: bytes, place: str) -> list[str]:
    """The words of a line in lower case; `place` names it in errors."""
    if b"\0" in line:  # it ends a word in a .bin file
        raise ValueError(f"{place}: not plain text, but a zero byte")
    try:
        return line.decode("utf-8-sig").lower().split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 at byte {error.start + 1} of the line") from error


class _Progress(CallbackAny2Vec):  # type: ignore[misc]
    """A bar on stderr, a step for each epoch."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def on_epoch_end(self, model: Any) -> None:
        self._bar.update()


def train(
    corpus: str | os.PathLike[str],
    dimension: int = 100,
    epochs: int = 5,
    min_count: int = 2,
    buckets: int = 200_000,
    workers: int = 2,
    seed: int = 0,
) -> Any:
    """A gensim FastText model (skip-grams) of a corpus. With one worker, a seed gives the same vectors every time.

    Args:
        corpus: a text file with a sentence in each line, or a folder of such .txt files.
        dimension: the length of a vector.
        epochs: passes over the corpus.
        min_count: words that occur less often get no vector of their own.
        buckets: vectors for character n-grams, which share them by a hash; they are most of a .bin file.
        workers: threads.
        seed: of the first vectors and of the order of the samples.

    Raises:
        ValueError: the corpus is not there, not UTF-8, or has no word that occurs often enough.
    """
    sentences = Sentences(corpus)
    settings = {"vector_size": dimension, "epochs": epochs, "min_count": min_count, "bucket": buckets}
    model = FastText(sg=1, workers=workers, seed=seed, **settings)
    model.build_vocab(sentences)
    if not len(model.wv):
        raise ValueError(f"corpus {corpus} has no word that occurs at least {min_count} times")
    with tqdm(total=epochs, desc="fastText", unit="epoch", file=sys.stderr) as bar:
        model.train(sentences, total_examples=model.corpus_count, epochs=epochs, callbacks=[_Progress(bar)])
    return model


def save(model: Any, output: str | os.PathLike[str]) -> None:
    """Writes a fastText .bin, which keeps the subwords, or a .vec. The file is there whole, or not at all."""
    path = checked_output(Path(output))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if path.suffix == ".bin":
            save_facebook_model(model, str(temporary))
        else:
            model.wv.save_word2vec_format(str(temporary))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def checked_output(output: Path) -> Path:
    """The path of a .bin or .vec file in a folder that exists; any other is refused."""
    if output.suffix not in (".bin", ".vec"):
        raise ValueError(f"output must end in .bin or .vec, got {output}")
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"output must be a file in a folder that exists, got {output}")
    return output
