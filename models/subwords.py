"""Vectors for words that no table holds, made of their parts: fastText's n-grams, or an encoder's wordpieces."""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gensim.models.fasttext import ft_ngram_hashes, load_facebook_vectors
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from edpsgd import files

Matrix = npt.NDArray[np.float32]

_TOKENIZER, _TABLE = "tokenizer.json", "pieces.safetensors"


class Subwords(Protocol):
    """What makes the vectors of words that are not in a table."""

    def first_words(self, count: int) -> tuple[list[str], Matrix]:
        """The first words of the source, and their vectors."""

    def vector(self, word: str) -> Matrix | None:
        """A vector for any word, or None if no part of it is known."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes what a look-up needs into a folder, and returns what is to be noted beside it."""


def root_mean_square(matrix: Matrix, name: str | PathLike[str]) -> float:
    """That of the entries. NaN or an infinite entry is a ValueError with the name of the vectors' file.

    Example:
        >>> root_mean_square(np.array([[3.0, 4.0, 0.0, 0.0]], np.float32), "my.vec")
        2.5
    """
    squares = float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64))  # large numbers do not overflow there
    if not math.isfinite(squares):
        raise ValueError(f"vectors {name} hold numbers that are NaN or infinite")
    return math.sqrt(squares / max(1, matrix.size))


# -------------------------------------------------------------------- fastText .bin


class FastText:
    """All words of a fastText .bin file, and the vectors of its character n-grams. Made by ``read``."""

    def __init__(self, keyed: Any, path: Path) -> None:
        self._keyed, self._path = keyed, path
        self._has_case = any(word != word.lower() for word in keyed.index_to_key)

    @classmethod
    def read(cls, path: Path) -> FastText:
        """All of the file: the published ones take minutes and gigabytes."""
        _check_layout(path)
        try:
            keyed = load_facebook_vectors(str(path))
        except Exception as error:  # gensim asserts, unpacks and allocates what a damaged file says
            raise ValueError(f"vectors file {path} is damaged or of an unknown version: {error}") from error
        keyed.vectors_vocab = keyed.buckets_word = None  # for training only, and as large as the words' vectors
        root_mean_square(keyed.vectors_ngrams, path)
        return cls(keyed, path)

    @classmethod
    def restore(cls, noted: dict[str, Any], original: str | PathLike[str] | None) -> FastText | None:
        """The file that was noted by ``save``, if it is still there and the same; a warning if not."""
        path = Path(original or noted["path"])
        if path.is_file() and _fingerprint(path) == noted["fingerprint"]:
            return cls.read(path)
        state = "is not the one that the run was made with" if path.is_file() else "is gone"
        text = f"the vectors file {path.name} {state}: words that are not in the table get no vectors"
        warnings.warn(text, stacklevel=3)
        return None

    def first_words(self, count: int) -> tuple[list[str], Matrix]:
        """The first words of the file, and their vectors."""
        return self._keyed.index_to_key[:count], self._keyed.vectors[:count]

    def vector(self, word: str) -> Matrix | None:
        """That of the file if it has the word, as it is or in lower case; else the mean of its n-grams' vectors.

        The n-grams are those of the lower case if the file has no capital letters.
        """
        known, lower = self._keyed.key_to_index, word.lower()
        if word in known:
            form = word
        elif lower in known or not self._has_case:
            form = lower
        else:
            form = word
        if form not in known and not self._has_parts(form):
            return None  # gensim would write the word, which is private, into the log
        vector: Matrix = self._keyed.get_vector(form)
        return vector

    def _has_parts(self, word: str) -> bool:
        keyed = self._keyed
        return bool(keyed.bucket and ft_ngram_hashes(word, keyed.min_n, keyed.max_n, keyed.bucket))

    def save(self, folder: Path) -> dict[str, Any]:
        """Only notes where the file is, and a fingerprint of it."""
        return {"path": str(self._path.resolve()), "fingerprint": _fingerprint(self._path)}


def _check_layout(path: Path) -> None:
    """Walks over the file first: gensim would read a vocabulary that has no end for ever."""
    # magic number, version, 13 settings; words and labels in all, words, labels; tokens, pruned rows (fastText's
    # saveModel). Behind it are the vocabulary and two matrices.
    head = struct.Struct("<2i12id3i2q")
    try:
        with files.open_bytes(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, *_, words, _, labels, _, pruned = head.unpack_from(data)
            if magic != 793712314 or labels or not words:
                raise ValueError("it is no fastText model of words, or older than 2017")
            position = _end_of_vocabulary(data, head.size, words)
            position += 8 * max(0, pruned)  # two numbers of 4 bytes for each pruned row
            for _ in ("vectors", "weights of the output"):
                quantised, rows, columns = struct.unpack_from("<?2q", data, position)
                position += 17 + 4 * rows * columns  # 1 + 8 + 8 bytes of sizes, then floats
                if quantised or min(rows, columns) < 1 or position > len(data):
                    raise ValueError("its vectors are quantised or incomplete")
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"vectors file {path} is cut off, damaged or of another kind: {error}") from error


def _end_of_vocabulary(data: mmap.mmap, position: int, words: int) -> int:
    """Where the vocabulary ends that begins at this position."""
    for _ in range(words):
        end = data.find(b"\0", position)
        if end < 0:
            raise ValueError("its vocabulary is incomplete")
        position = end + 10  # the end of the word, its count, its type
    return position


def _fingerprint(path: Path, samples: int = 64, block: int = 65_536) -> str:
    """Size and SHA-256 of samples from all over the file; of all of it, if it is small."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with files.open_bytes(path) as file:
        for offset in range(0, size, max(block, size // samples)):
            file.seek(offset)
            digest.update(file.read(block))
    return f"{size}:{digest.hexdigest()}"


# -------------------------------------------------------------------- wordpieces


class WordPieces:
    """The tokenizer of an encoder, and the vectors of its wordpieces. Made by ``read``."""

    def __init__(self, tokenizer: Tokenizer, table: Matrix, special: frozenset[str] = frozenset()) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._table, self._special = tokenizer, table, special

    @classmethod
    def read(cls, name: str) -> WordPieces:
        """From the folder or the name of a Hugging Face encoder."""
        tokenizer, special = _read_tokenizer(name)
        table, pieces = _input_table(name), tokenizer.get_vocab_size()
        if max(tokenizer.get_vocab().values(), default=0) >= len(table):
            raise ValueError(f"the tokenizer of {name} has {pieces} wordpieces, and its table {len(table)} rows")
        root_mean_square(table, name)
        return cls(tokenizer, table, special)

    @classmethod
    def restore(cls, folder: Path) -> WordPieces:
        """From what ``save`` wrote."""
        try:
            files.check_tree(folder)  # both libraries would wait for a FIFO
            return cls(Tokenizer.from_file(str(folder / _TOKENIZER)), load_file(folder / _TABLE)["pieces"])
        except Exception as error:  # the tokenizer's own is a bare one
            raise ValueError(f"{folder} must hold {_TOKENIZER} and {_TABLE}, whole: {error}") from error

    def first_words(self, count: int) -> tuple[list[str], Matrix]:
        """The first pieces that are whole words, and their vectors."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        words = list(self._whole_words(vocabulary))[:count]
        return words, self._table[[vocabulary[word] for word in words]]

    def _whole_words(self, vocabulary: dict[str, int]) -> Iterator[str]:
        """The pieces that begin a word and are no special tokens, by their numbers."""
        for piece in sorted(vocabulary, key=vocabulary.__getitem__):
            continues_word = piece.startswith("##")
            is_special = piece in self._special or re.fullmatch(r"\[.+\]", piece)
            if not (continues_word or is_special):
                yield piece

    def vector(self, word: str) -> Matrix | None:
        """The mean of its wordpieces' vectors; a part that the tokenizer does not know counts as its unknown token."""
        pieces = self._tokenizer.encode(word, add_special_tokens=False).ids
        if not pieces:
            return None
        return np.asarray(self._table[pieces].mean(0))

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the tokenizer and the table of wordpieces."""
        self._tokenizer.save(str(folder / _TOKENIZER))
        save_file({"pieces": self._table}, folder / _TABLE)
        return {}


def _read_tokenizer(name: str) -> tuple[Tokenizer, frozenset[str]]:
    """The tokenizer of an encoder, which must make wordpieces, and its special tokens."""
    from transformers import AutoTokenizer  # takes seconds, and a restored run does without

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, the tokenizer's own among them
        raise ValueError(f"{name} must be a vectors file, or the folder or name of an encoder: {error}") from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    model = getattr(tokenizer, "model", loaded)
    makes_pieces = isinstance(model, WordPiece) and model.continuing_subword_prefix == "##"
    if isinstance(tokenizer, Tokenizer) and makes_pieces:
        return tokenizer, frozenset(loaded.all_special_tokens)
    raise ValueError(f"the tokenizer of {name} must make wordpieces with ##, as BERT's, got {type(model).__name__}")


def _input_table(name: str) -> Matrix:
    """The vectors of the wordpieces: this tensor alone, if the weights are in one safetensors file."""
    from transformers import AutoModel
    from transformers.utils.hub import cached_file

    try:
        with safe_open(cached_file(name, "model.safetensors"), "pt") as file:
            keys = [key for key in file.keys() if key.endswith("embeddings.word_embeddings.weight")]  # noqa: SIM118
            if len(keys) == 1:
                return np.asarray(file.get_tensor(keys[0]).float().numpy())
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged: {error}") from error
    except OSError:
        pass  # the weights are in other files
    try:
        return np.asarray(AutoModel.from_pretrained(name).get_input_embeddings().weight.detach().float().numpy())
    except Exception as error:
        raise ValueError(f"the weights of {name} cannot be read: {error}") from error
