"""What an attacker sees of a model: its probabilities for some utterances, as features of a fixed size."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edpsgd import files
from models.heads import Outputs
from tasks.nlu.corpus import Corpus, Rows
from tasks.nlu.example_batches import Examples, States, to_device
from tasks.nlu.run_folder import Parts

VERSION = 1  # of the features; to be raised whenever they mean something else
BATCH = 64
TOP = 5  # probabilities that are kept of the intents, and of the tags of a word


@dataclass(frozen=True)
class View:
    """A model's answers to some utterances.

    Attributes:
        features: utterances x 4 TOP, see ``features``; the same size for every model.
        log_probabilities: of the true intent and tags together, the negative loss.
    """

    features: npt.NDArray[np.float32]
    log_probabilities: npt.NDArray[np.float64]

    def save(self, path: str | Path) -> None:
        """Writes a feature file; it holds numbers only, and is whole or not there."""
        temporary = Path(path).with_suffix(".new.npz")
        temporary.unlink(missing_ok=True)  # whatever it is
        np.savez(temporary, version=VERSION, features=self.features, log_probabilities=self.log_probabilities)
        os.replace(temporary, path)

    @staticmethod
    def load(path: str | Path) -> View:
        """What save wrote; a file of another version is refused."""
        try:
            os.close(files.open_regular(path))  # np.load would wait for a FIFO
            _check_stored(Path(path))
            with np.load(path) as file:
                version = int(file["version"])
                if version == VERSION:
                    return View(file["features"], file["log_probabilities"])
        except (OSError, EOFError, KeyError, ValueError, TypeError, MemoryError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no feature file, or damaged ({type(error).__name__}): delete it") from None
        raise ValueError(f"{path} holds features of version {version}, and this is version {VERSION}: delete the file")


def _check_stored(path: Path) -> None:
    """Feature files are not compressed: one that is can grow without bounds."""
    with zipfile.ZipFile(path) as file:
        if any(one.compress_type != zipfile.ZIP_STORED for one in file.infolist()):
            raise ValueError("compressed")


def view(
    parts: Parts,
    corpus: Corpus,
    rows: Rows,
    device: torch.device | str = "cpu",
    shown: Callable[[int], object] | None = None,
    states: States | None = None,
) -> View:
    """Asks a model about utterances of a corpus.

    Args:
        parts: the model and its labels (``tasks.nlu.run_folder.load``).
        corpus: where the utterances are.
        rows: which; their labels must be among the model's.
        device: where to compute.
        shown: told the number of utterances after each batch, for a progress bar.
        states: what the model's encoder made of the corpus, if that was kept; else the encoder runs.
    """
    device = torch.device(device)
    model = parts.model.to(device).eval()
    examples = Examples(corpus, rows, parts.inputs.table(corpus.words), parts.labels, BATCH)
    examples.states = states
    found = View(np.empty((len(rows), 4 * TOP), np.float32), np.empty(len(rows), np.float64))
    for numbers in examples.sorted_parts(np.arange(len(rows))):
        batch = to_device(examples.batch(numbers), device)
        outputs = model.outputs(batch)
        found.features[numbers] = features(outputs, batch["mask"]).cpu().numpy()
        found.log_probabilities[numbers] = outputs.losses.neg().cpu().numpy()
        if shown is not None:
            shown(len(numbers))
    return found


def features(outputs: Outputs, mask: torch.Tensor) -> torch.Tensor:
    """The largest probabilities, sorted: of the intents, and of the tags of a word as mean, least and most over words.

    Neither the number of labels nor that of words changes the size; missing labels have probability 0.

    Args:
        outputs: of a model.
        mask: utterances x words.

    Example:
        >>> tags = torch.tensor([[[0.1, 0.9], [0.5, 0.5], [0.0, 0.0]]])
        >>> found = Outputs(torch.zeros(1), torch.tensor([[0.2, 0.7, 0.1]]), tags)
        >>> [round(x, 3) for x in features(found, torch.tensor([[True, True, False]]))[0, ::TOP].tolist()]
        [0.7, 0.7, 0.5, 0.9]
    """
    intents, words, here = _largest(outputs.intents), _largest(outputs.tags), mask.unsqueeze(2)
    mean = words.masked_fill(~here, 0.0).sum(1) / here.sum(1)
    least, most = words.masked_fill(~here, torch.inf).amin(1), words.masked_fill(~here, -torch.inf).amax(1)
    return torch.cat([intents, mean, least, most], dim=1).float()


def _largest(probabilities: torch.Tensor) -> torch.Tensor:
    kept = probabilities.topk(min(TOP, probabilities.shape[-1]), dim=-1).values
    return torch.nn.functional.pad(kept, (0, TOP - kept.shape[-1]))
