"""Hidden states of a frozen encoder, computed once for every utterance: an epoch then costs the heads alone.

The encoder reads each utterance alone, so that its states are a function of that utterance and nothing else. In a
batch, the sums of a matrix product and, after rounding, the states would depend a little on the others: the removal of
one utterance would move many. That takes about twice the time, once. States are kept in half precision, in memory or,
if there are too many, in a private file of the run folder. Words can be read from them nearly as well as from the text,
so the file is deleted when the training ends, unless it is to be kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from edpsgd import files
from models.bert import BERT
from models.heads import length_mask
from tasks.common.progress import Progress
from tasks.common.workers import Workers
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.example_batches import WordTable, to_device

FOLDER = "encoder_states"
KEPT = f"{FOLDER}/: hidden states of all utterances, from which words can be read; delete it when it is not needed"
_STATES, _ABOUT = "states.f16", "about.json"
_ROUND = 512  # utterances that a worker computes before the workers exchange what they have
_MARGIN = 64 * files.MEBIBYTE  # that must stay free on the disk: checkpoints and the ledger come later


@dataclass(frozen=True)
class EncoderStates:
    """States of all utterances of a corpus.

    Attributes:
        words: in the order of the corpus's words, words x layers x width.
        utterances: means over the pieces of each, utterances x width.
        file: where they are kept, if not in memory.
    """

    words: npt.NDArray[np.float16]
    utterances: npt.NDArray[np.float16]
    file: Path | None

    def batch(self, corpus: Corpus, rows: Rows) -> dict[str, torch.Tensor]:
        """What the model reads instead of the pieces of these utterances."""
        lengths = corpus.starts[rows + 1] - corpus.starts[rows]
        mask = length_mask(lengths)
        words = np.zeros((*mask.shape, *self.words.shape[1:]), dtype=np.float16)
        words[mask] = self.words[word_places(corpus, rows)]
        return {
            "word_states": torch.from_numpy(words),
            "utterance_states": torch.from_numpy(self.utterances[rows]),
            "mask": torch.from_numpy(mask),
        }


def compute(
    config: Config, team: Workers, folder: Path, model: BERT, corpus: Corpus, table: WordTable
) -> EncoderStates:
    """The states of a corpus; each worker computes a share. Those of a file that an earlier start left are taken.

    Args:
        config: how much memory they may take.
        team: the workers, of which all call this; ``model`` is on their devices.
        folder: the run folder.
        model: its encoder is frozen.
        corpus: all utterances.
        table: its words, as the encoder reads them.
    """
    started, about = time.monotonic(), _about(model, corpus)
    size = about["bytes"]
    place = _place(config, folder, size)
    cure = "delete it" if config.states_from is None else "leave out --states-from"
    seen = team.on_first(lambda: place is not None and _is_complete(place, about, cure))
    is_there = bool(team.collective.gather(seen)[0])
    if config.states_from is not None and not is_there:
        raise ValueError(f"{config.states_from} holds no hidden states: --keep-features keeps those of a run")
    if place is not None and not is_there:
        team.on_first(lambda: _reserve(place, size))
    found = team.together(lambda: _opened(place, model, corpus, is_writable=not is_there))
    if not is_there:
        _fill(found, team, folder, model, corpus, table)
        if place is not None:
            team.on_first(lambda: files.write_text(place.with_name(_ABOUT), json.dumps(about)))
    if team.is_first:
        where = "in memory" if place is None else f"in {FOLDER}/, a private file"
        seconds = time.monotonic() - started
        print(f"hidden states of {len(corpus)} utterances: {size / 1e6:.0f} MB {where}, {seconds:.0f} s", flush=True)
    return found


def kept_by(folder: Path, config: Config) -> Path | None:
    """The run folder that holds the states of a run: that which it took them from, or its own; None if none does."""
    holder = folder if config.states_from is None else Path(config.states_from)
    return holder if (holder / FOLDER / _ABOUT).exists() else None


def open_kept(folder: Path, model: BERT, corpus: Corpus) -> EncoderStates | None:
    """The states that a run folder keeps, for reading.

    Args:
        folder: the run folder (``kept_by``).
        model: reads them instead of running its encoder.
        corpus: all utterances.

    Returns:
        The states; None if they are those of another encoder, of other layers or of other data.
    """
    place = folder / FOLDER / _STATES
    about = _about(model, corpus)
    if _read_about(place, "delete it") != about:
        return None
    _is_complete(place, about, "delete it")
    return _opened(place, model, corpus, is_writable=False)


def _place(config: Config, folder: Path, size: int) -> Path | None:
    """The file for the states: another run's, this run's own, or None where they stay in memory."""
    if config.states_from is not None:
        return Path(config.states_from) / FOLDER / _STATES
    if size <= config.feature_memory * files.MEBIBYTE and not config.keep_features:
        return None
    return folder / FOLDER / _STATES


def delete(folder: Path) -> None:
    """Deletes the file of a run folder, if it has one; what cannot be deleted is an error."""
    if (folder / FOLDER).exists():
        shutil.rmtree(folder / FOLDER)


class _About(TypedDict):
    """What a file of states is of, and its size."""

    encoder: str
    data: str
    bytes: int


def _about(model: BERT, corpus: Corpus) -> _About:
    layers, width = len(model.layers) or 1, model.encoder.config.hidden_size
    size = 2 * (len(corpus.word_ids) * layers + len(corpus)) * width  # two bytes for each number
    return {"encoder": _encoder_digest(model), "data": _data_digest(corpus), "bytes": size}


def _encoder_digest(model: BERT) -> str:
    digest = hashlib.blake2b(json.dumps(model.layers).encode(), digest_size=16)
    for name, tensor in sorted(model.encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _data_digest(corpus: Corpus) -> str:
    digest = hashlib.blake2b("\n".join(corpus.words).encode(), digest_size=16)
    digest.update(corpus.word_ids.tobytes())
    digest.update(corpus.starts.tobytes())
    return digest.hexdigest()


def _is_complete(place: Path, about: _About, cure: str) -> bool:
    """Whether the file has all states; those of something else are an error, which says what to do."""
    before = _read_about(place, cure)
    if before is None:
        return False
    if before != about or place.stat().st_size != about["bytes"]:
        raise ValueError(f"{place.parent} holds hidden states of another encoder or of other data: {cure}")
    return True


def _read_about(place: Path, cure: str) -> Any:
    """What the file is of; None if there is no complete one."""
    try:
        return files.read_json(place.with_name(_ABOUT))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{place.parent} is damaged, {cure}: {type(error).__name__}") from None


def _reserve(place: Path, size: int) -> None:
    """Makes the file in its full size, before the first utterance is read."""
    files.make_private(place.parent)
    free = shutil.disk_usage(place.parent).free
    if free < size + _MARGIN:
        raise ValueError(
            f"the hidden states take {size / 1e9:.1f} GB, and {place.parent} has {free / 1e9:.1f} GB free: choose "
            "fewer layers with --features, or another --output"
        )
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _opened(place: Path | None, model: BERT, corpus: Corpus, is_writable: bool) -> EncoderStates:
    """The arrays, of words first, in memory or in the file."""
    layers, width = len(model.layers) or 1, model.encoder.config.hidden_size
    of_words, of_utterances = len(corpus.word_ids) * layers, len(corpus)
    shape = (of_words + of_utterances, width)
    whole: npt.NDArray[np.float16]
    if place is None:
        whole = np.empty(shape, dtype=np.float16)
    else:
        whole = np.memmap(place, np.float16, mode="r+" if is_writable else "r", shape=shape)
    return EncoderStates(whole[:of_words].reshape(-1, layers, width), whole[of_words:], place)


Computed = tuple[Rows, npt.NDArray[np.float16], npt.NDArray[np.float16]]


def _fill(found: EncoderStates, team: Workers, folder: Path, model: BERT, corpus: Corpus, table: WordTable) -> None:
    """Each worker computes a share of every round. In memory each worker needs all; a file is there for all of them."""
    at_once = team.collective.size * _ROUND
    shown = Progress(folder, len(corpus), 0, team.is_first, tensorboard=False, unit="utterance")
    with closing(shown):
        for begin in range(0, len(corpus), at_once):
            round_ = np.arange(begin, min(begin + at_once, len(corpus)))
            mine = round_[team.collective.rank :: team.collective.size]
            own = team.together(partial(_of_rows, mine, team, model, corpus, table))
            shares = [own] if found.file is not None else team.collective.gather(own)
            for rows, words, means in shares:
                found.words[word_places(corpus, rows)] = words
                found.utterances[rows] = means
            shown.move(len(round_))
            if shown.wants():
                shown.show("hidden states")
    if isinstance(found.words, np.memmap):
        found.words.flush()
        found.utterances.flush()  # type: ignore[attr-defined]
    team.collective.gather(None)  # nobody reads before all have written


def _of_rows(rows: Rows, team: Workers, model: BERT, corpus: Corpus, table: WordTable) -> Computed:
    """States of some utterances; their words stand one after the other."""
    words: list[npt.NDArray[np.float16]] = []
    means: list[npt.NDArray[np.float16]] = []
    for row in rows:
        of_words, of_utterance = _of_utterance(int(row), team, model, corpus, table)
        words.append(of_words)
        means.append(of_utterance)
    if not words:  # this worker has no share in the last round
        layers, width = len(model.layers) or 1, model.encoder.config.hidden_size
        return rows, np.empty((0, layers, width), np.float16), np.empty((0, width), np.float16)
    return rows, np.concatenate(words), np.concatenate(means)


def _of_utterance(
    row: int, team: Workers, model: BERT, corpus: Corpus, table: WordTable
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Of its words, words x layers x width, and of the whole, 1 x width."""
    place = slice(corpus.starts[row], corpus.starts[row + 1])
    word_ids = corpus.word_ids[place]
    batch = table.batch(word_ids, np.array([len(word_ids)]))
    with torch.inference_mode():
        words, mean = model.states(to_device(batch, team.device))
    kept = words[0].half().cpu().numpy(), mean.half().cpu().numpy()
    if not all(np.isfinite(one).all() for one in kept):
        raise ValueError("hidden states of the encoder do not fit half precision: name other layers with --features")
    return kept
