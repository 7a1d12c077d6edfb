"""A new model for a corpus: its word list or vectors, its labels, and what no noise covers in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edpsgd import files
from models import vectors as word_vectors
from models.bert import BERT, BertInputs, paper_configuration
from models.clc import CLC, ClcInputs
from models.vectors import WordVectors
from tasks.nlu import generator
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.labels import Labels
from tasks.nlu.run_folder import Parts


def build(config: Config, corpus: Corpus, rows: Rows) -> Parts:
    """A new model for a corpus of which some rows are for training."""
    if config.model == "clc" and config.freeze != "none":
        raise ValueError(f"freeze is for bert, and the model is clc: got {config.freeze}")
    of_the_other = config.pretrained if config.model == "clc" else config.vectors
    if of_the_other is not None:
        raise ValueError(f"vectors are for clc and pretrained is for bert, and the model is {config.model}")
    words = _word_list(config, corpus, rows) if _has_word_list(config) else None
    labels = _labels(config, corpus, rows)
    if config.model == "clc":
        return _new_clc(config, words, labels)
    return _new_bert(config, words, labels)


def not_covered(config: Config) -> list[str]:
    """What no noise covers in a new model, to be said in its card."""
    has_private_words = _has_word_list(config) and config.vocabulary == "training-set"
    statements = {
        "the label set: intents and slot types were read from the training set": config.labels == "training-set",
        "the word list: it was read from the training set, and the run folder holds it": has_private_words,
        "whoever reads config.yaml or checkpoints/: they hold the seed of the noise": config.seed is not None,
        "metrics.jsonl, tensorboard/ and checkpoints/: exact losses, clip fractions and error rates": True,
        "data.json and the number of training utterances: exact counts": True,
        "canaries.jsonl: which canaries were trained on": config.canaries > 0,
    }
    return [text for text, applies in statements.items() if applies]


def _has_word_list(config: Config) -> bool:
    return config.vectors is None and config.pretrained is None


def _labels(config: Config, corpus: Corpus, rows: Rows) -> Labels:
    if config.labels == "training-set":
        return Labels.of_rows(corpus, rows)
    try:
        content = files.read_json(Path(config.labels))
        labels = Labels.of_slots(_strings(content, "intents"), _strings(content, "slots"))
    except (OSError, ValueError) as error:
        raise ValueError(f"labels {config.labels} must be JSON with the lists intents and slots: {error}") from None
    found = Labels.of_rows(corpus, rows)
    intents, tags = set(found.intents) - set(labels.intents), set(found.tags) - set(labels.tags)
    if intents or tags:
        lacking = f"{len(intents)} intents and {len(tags) // 2} slots"  # a slot has two tags
        raise ValueError(f"labels {config.labels} lack {lacking} of the training set")
    return labels


def _strings(content: Any, name: str) -> list[str]:
    values = content.get(name) if isinstance(content, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{name} is not a list of strings")
    return values


def _word_list(config: Config, corpus: Corpus, rows: Rows) -> list[str]:
    """Public words: those of the generator or of a file; or, on request, those of the training set."""
    if config.vocabulary == "public":
        return generator.words()
    if config.vocabulary == "training-set":
        used = np.unique(corpus.word_ids[word_places(corpus, rows)])
        return sorted({corpus.words[number].lower() for number in used})
    try:
        words: list[str] = []
        with files.open_bytes(config.vocabulary) as file:
            for line in files.lines(file):
                words += line.decode().split()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the word list {config.vocabulary}: {error}") from None
    if not words:
        raise ValueError(f"the word list {config.vocabulary} is empty")
    return list(dict.fromkeys(words))


def _new_clc(config: Config, words: list[str] | None, labels: Labels) -> Parts:
    """With the vectors of a file, or with a word list whose vectors are to be learned."""
    if words is None:
        vectors = word_vectors.load(config.vectors or "", config.max_words)
    else:
        vectors = WordVectors(words, None, "list", config.dimension)
    model = CLC(
        words=len(vectors.words) + 1,
        dimension=vectors.dimension,
        intents=len(labels.intents),
        tags=len(labels.tags),
        train_words=config.train_vectors or words is not None,
        hidden=config.hidden,
        layers=config.layers,
        dropout=0.4 if config.dropout is None else config.dropout,
        word_dropout=config.word_dropout,
    )
    if vectors.table is not None:
        model.set_words(vectors.table)
    return Parts(model, ClcInputs(vectors), labels)


def _new_bert(config: Config, words: list[str] | None, labels: Labels) -> Parts:
    """With pretrained weights, or the paper's configuration with a word list."""
    dropout = 0.1 if config.dropout is None else config.dropout
    sizes = len(labels.intents), len(labels.tags), dropout
    if words is None:
        inputs, model = _pretrained(config.pretrained or "", *sizes)
    else:
        inputs = BertInputs.from_words(words)
        model = BERT(paper_configuration(len(inputs.tokenizer)), *sizes)
    model.freeze(config.freeze)
    return Parts(model, inputs, labels)


def _pretrained(name_or_folder: str, intents: int, tags: int, dropout: float) -> tuple[BertInputs, BERT]:
    try:
        return BertInputs.pretrained(name_or_folder), BERT.pretrained(name_or_folder, intents, tags, dropout)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the pretrained encoder {name_or_folder}: {error}") from None
