r"""Word vectors for the word table of a model: fastText files, or the wordpieces of a pretrained encoder.

The words are those of the vectors' own public file, never those of a training set. A look-up tries a word as it is,
and then in lower case. A word that is not in the table can still get a vector, made of its parts, where the source has
them.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "tiny.vec").write_text("2 3\ncall 1 0 0\nanna 0 -1 0\n")
    >>> vectors = load(folder / "tiny.vec", scale=False)
    >>> vectors.table
    array([[ 1.,  0.,  0.],
           [ 0., -1.,  0.]], dtype=float32)
    >>> vectors.save(folder)
    >>> restore(folder).lookup(["Anna", "omar"])
    array([ 1, -1])
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from edpsgd import files
from edpsgd._arguments import check_count
from models.subwords import FastText, Matrix, Subwords, WordPieces, root_mean_square

VEC, BIN, PIECES = "fasttext-vec", "fasttext-bin", "wordpieces"
RMS = 0.3  # of the entries of a scaled table: about what an LSTM likes
_ABOUT, _WORDS = "vectors.json", "words.json"
_LONGEST_WORD, _LONGEST_NUMBER = 4096, 64  # bytes in a line of a .vec file
_COMPRESSION = 50  # numbers as text are packed to a third, a line of one byte to a thousandth
_SLACK = files.MEBIBYTE  # what a small file may unpack to anyway


class WordVectors:
    """Words, their vectors, and vectors for other words. Made by ``load`` or, from a run folder, by ``restore``.

    Attributes:
        words: the known words, in the order of the source: the most frequent first in fastText files.
        table: their vectors, a row each; None after ``restore``, since the model's weights hold it.
        source: "fasttext-vec", "fasttext-bin" or "wordpieces".
        dimension: the length of a vector.
        index: the row of every word.

    Example:
        >>> vectors = WordVectors(["call", "Anna"], np.eye(2, dtype=np.float32), "fasttext-vec", 2)
        >>> vectors.lookup(["Call", "Anna", "omar"])
        array([ 0,  1, -1])
        >>> vectors.out_of_vocabulary("omar") is None
        True
    """

    def __init__(
        self,
        words: Sequence[str],
        table: Matrix | None,
        source: str,
        dimension: int,
        subwords: Subwords | None = None,
        factor: float = 1.0,
    ) -> None:
        self.words, self.table, self.source, self.dimension = list(words), table, source, dimension
        self.index = {word: row for row, word in enumerate(self.words)}
        self._subwords, self._factor = subwords, factor

    def lookup(self, words: Sequence[str]) -> npt.NDArray[np.int64]:
        """The row of each word, or else of its lower case, (words,); -1 if neither is known."""
        return np.fromiter(map(self._row_of, words), np.int64, len(words))

    def _row_of(self, word: str) -> int:
        row = self.index.get(word)
        return self.index.get(word.lower(), -1) if row is None else row

    def out_of_vocabulary(self, word: str) -> Matrix | None:
        """A vector made of the parts of a word, on the scale of the table; None if the source has no such parts."""
        vector = self._subwords.vector(word) if self._subwords else None
        return None if vector is None else (self._factor * vector).astype(np.float32)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes the words and what ``out_of_vocabulary`` needs, but not the table, into a folder for ``restore``.

        A fastText .bin file has gigabytes: only its path and a fingerprint are noted.
        """
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {"source": self.source, "dimension": self.dimension, "factor": self._factor}
        about["subwords"] = self._subwords.save(folder) if self._subwords else None
        files.write_text(folder / _WORDS, json.dumps(self.words))
        files.write_text(folder / _ABOUT, json.dumps(about, indent=2))


def load(path_or_name: str | PathLike[str], max_words: int = 100_000, scale: bool = True) -> WordVectors:
    """Reads word vectors.

    Args:
        path_or_name: a fastText .vec, .vec.gz or .bin file, or the folder or name of a Hugging Face encoder with
            wordpieces, such as BERT.
        max_words: only so many words, the first of the source, are in the table.
        scale: multiply all vectors by one number, so that the entries of the table have a root mean square of 0.3.

    Raises:
        ValueError: there is no such file, or it is damaged or of another kind.
    """
    check_count("max_words", max_words)
    kind, subwords = _open(path_or_name)
    if subwords is None:
        words, table = _read_text(Path(path_or_name), max_words)
    else:
        words, table = subwords.first_words(max_words)
    if not words:
        raise ValueError(f"vectors {path_or_name} hold no words")
    size = root_mean_square(table, path_or_name)
    if scale and not size:
        raise ValueError(f"vectors {path_or_name} are all zero and cannot be scaled: say scale=False to have them so")
    factor = RMS / size if scale else 1.0
    return WordVectors(words, (factor * table).astype(np.float32), kind, table.shape[1], subwords, factor)


def _open(path_or_name: str | PathLike[str]) -> tuple[str, Subwords | None]:
    """The kind of the vectors and, if they have subwords, these. A name with a file's ending never goes to the hub."""
    path = Path(path_or_name)
    is_encoder_folder = (path / "config.json").is_file()
    is_hub_name = not (path.exists() or path.suffix[1:].isalpha())
    if is_encoder_folder or is_hub_name:
        return PIECES, WordPieces.read(str(path_or_name))
    if path.is_dir():
        raise ValueError(f"{path} must be a vectors file or the folder of an encoder, and holds no config.json")
    if not path.name.endswith((".vec", ".vec.gz", ".bin")):
        raise ValueError(f"vectors file {path} must end in .vec, .vec.gz or .bin")
    if not path.is_file():
        raise ValueError(f"there is no vectors file {path}")
    if path.suffix == ".bin":
        return BIN, FastText.read(path)
    return VEC, None


def restore(folder: str | PathLike[str], original: str | PathLike[str] | None = None) -> WordVectors:
    """What ``save`` wrote into a folder, without the table.

    Args:
        folder: where it was saved.
        original: where the fastText .bin file is now, if it has moved. Without the file, words that are not in the
            table get no vectors, and a warning says so.
    """
    about = _read_json(Path(folder, _ABOUT), dict)
    words = _read_json(Path(folder, _WORDS), list)
    subwords: Subwords | None = None
    try:
        kind, dimension, factor = about["source"], about["dimension"], about["factor"]
        noted = about["subwords"]
        if kind == BIN:
            subwords = FastText.restore(noted, original)
        elif kind == PIECES:
            subwords = WordPieces.restore(Path(folder))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{Path(folder, _ABOUT)} is damaged") from error
    return WordVectors(words, None, kind, dimension, subwords, factor)


def _read_json(path: Path, kind: type) -> Any:
    try:
        data = files.read_json(path, files.LARGE)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged") from error
    if not isinstance(data, kind):
        raise ValueError(f"{path} is damaged")
    return data


# -------------------------------------------------------------------- fastText .vec


def _read_text(path: Path, max_words: int) -> tuple[list[str], Matrix]:
    """The words of a .vec file and their vectors, (words, dimension).

    It is read line by line, so that an error names the line, which gensim's reader cannot; and it
    is several times as fast.
    """
    rows: dict[str, Matrix] = {}
    try:
        with files.open_bytes(path) as raw, _unpacked(raw, path) as file:
            sizes = re.fullmatch(rb"(\d{1,12}) ([1-9]\d{0,5})\s*", file.readline(1000))
            if not sizes:
                raise ValueError(f"{path}:1: must hold the number of words and the dimension")
            missing, dimension = min(int(sizes[1]), max_words), int(sizes[2])
            text = _bounded(file, dimension, path)
            for number, line in zip(range(2, missing + 2), text, strict=False):
                word, row = _parse(line, dimension, f"{path}:{number}")
                rows.setdefault(word, row)  # of a word that stands there twice, the first counts
                missing -= 1
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"vectors file {path} cannot be read: {error}") from error
    if missing:
        raise ValueError(f"vectors file {path} is cut off: it lacks {missing} of the words that line 1 promises")
    table = np.array(list(rows.values()), np.float32)
    return list(rows), table.reshape(len(rows), dimension)  # also if there are none


def _unpacked(file: BinaryIO, path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def _bounded(file: IO[bytes], dimension: int, path: Path) -> Iterator[bytes]:
    """The lines, as long as each has the length of one and all together that of a file of numbers."""
    most = _SLACK + _COMPRESSION * path.stat().st_size
    read = 0
    try:
        for line in files.lines(file, _LONGEST_WORD + _LONGEST_NUMBER * dimension):
            read += len(line)
            if read > most:
                raise ValueError(f"{path} unpacks to more than {_COMPRESSION} times its size: no vectors do")
            yield line
    except files.LongLine as error:
        raise ValueError(f"{path}:{error.number + 1}: the line is too long for {dimension} numbers") from None


def _parse(line: bytes, dimension: int, place: str) -> tuple[str, Matrix]:
    """The word of a line and its vector, (dimension,); `place` names the line in errors."""
    word, *numbers = line.rstrip().split(b" ")
    if len(numbers) != dimension:
        raise ValueError(f"{place}: must hold a word and {dimension} numbers, got {len(numbers)}")
    try:
        return word.decode(), np.array(numbers, np.float32)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: the word is not UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{place}: not all of the {dimension} values are numbers") from error
