"""A new model for a corpus: its word list or vectors, its labels, and what no noise covers in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from transformers import AutoModel

from edpsgd import files
from models import vectors as word_vectors
from models.bert import BERT, BertInputs, has_own_pieces, paper_configuration
from models.clc import CLC, ClcInputs
from models.features import AUTO, LAST, OWN_PIECES, parse_layers
from models.frozen_clc import WINDOW, FrozenCLC, FrozenClcInputs
from models.heads import HeadSettings
from models.vectors import WordVectors
from tasks.nlu import earlier_run, generator, label_schema
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.label_schema import Schema
from tasks.nlu.labels import Labels
from tasks.nlu.run_folder import Parts


def build(config: Config, corpus: Corpus, rows: Rows) -> Parts:
    """A new model for a corpus of which some rows are for training."""
    if config.model == "clc":
        _check_clc(config)
    if config.init_from is not None:
        return _from_earlier(config, corpus, rows)
    of_the_other = config.pretrained if config.model == "clc" else config.vectors
    if of_the_other is not None:
        raise ValueError(f"vectors are for clc and pretrained is for bert, and the model is {config.model}")
    words = _word_list(config, corpus, rows) if _has_word_list(config) else None
    labels, heads = _labels_and_heads(config, corpus, rows)
    if config.model == "bert":
        return _new_bert(config, words, labels, heads)
    if config.freeze == "encoder":
        return _new_frozen_clc(config, labels, heads)
    return _new_clc(config, words, labels, heads)


def _check_clc(config: Config) -> None:
    """Refuses settings that do not go with a CLC, or with one whose encoder is frozen."""
    if config.freeze not in ("none", "encoder"):
        raise ValueError(f"freeze must be none or encoder where the model is clc, got {config.freeze!r}")
    is_frozen = config.freeze == "encoder"
    of_bert = {
        "features": config.features,
        "window": config.window and not is_frozen,
        "keep_features": config.keep_features,
        "states_from": config.states_from,
    }
    for name, is_given in of_bert.items():
        if is_given:
            raise ValueError(f"{name} is for a frozen bert, and the model is clc: got {getattr(config, name)}")
    if is_frozen:
        _check_frozen_clc(config)


def _check_frozen_clc(config: Config) -> None:
    """Refuses settings of what is not there: layers, and word vectors of the run's own."""
    if config.init_from is not None:
        raise ValueError(
            "init_from takes the BiLSTM of another run to train it further, and freeze encoder has none: leave one out"
        )
    if config.vectors is None:
        raise ValueError("freeze encoder needs vectors: a word list has none that could stay as they are")
    usual = Config(private="off")
    of_trained = ("vocabulary", "train_vectors", "dimension", "hidden", "layers", "word_dropout")
    given = [name for name in of_trained if getattr(config, name) != getattr(usual, name)]
    if given:
        raise ValueError(f"freeze encoder leaves nothing to train but the heads: leave {', '.join(given)} out")


def not_covered(config: Config, labels: Labels) -> list[str]:
    """What no noise covers in a model, to be said in its card."""
    has_private_labels = labels.read_from_data or config.labels == "training-set"
    has_private_words = _has_word_list(config) and config.vocabulary == "training-set"
    statements = {
        "the label set: intents and slot types were read from the training set": has_private_labels,
        "the word list: it was read from the training set, and the run folder holds it": has_private_words,
        "whoever reads config.yaml or checkpoints/: they hold the seed of the noise": config.seed is not None,
        "metrics.jsonl, tensorboard/ and checkpoints/: exact losses, clip fractions and error rates": True,
        "data.json and the number of training utterances: exact counts": True,
        "canaries.jsonl: which canaries were trained on": config.canaries > 0,
    }
    return [text for text, applies in statements.items() if applies]


def _has_word_list(config: Config) -> bool:
    return config.vectors is None and config.pretrained is None and config.init_from is None


def _labels_and_heads(config: Config, corpus: Corpus, rows: Rows) -> tuple[Labels, HeadSettings]:
    schema = _schema(config, corpus, rows)
    labels = schema.labels()
    heads = HeadSettings(
        transitions=config.transitions,
        zero_start=config.zero_heads,
        intent_weight=config.intent_weight,
        allowed=None if schema.slots_of is None else labels.allowed_tags(schema.slots_of),
    )
    return labels, heads


def _schema(config: Config, corpus: Corpus, rows: Rows) -> Schema:
    """That of a file, or the labels of the training set, of which every intent may have every slot."""
    if config.labels == "training-set":
        found = label_schema.of_rows(corpus, rows)
        return replace(found, slots_of=None)
    if config.labels == "grammar":
        found = label_schema.of_generator(config.domain_names)
    else:
        found = label_schema.read(config.labels)
    if config.canaries and found.slots_of is not None:
        raise ValueError("canaries have any slots with any intent: give --labels without slots of single intents")
    found.check_covers(corpus, rows, config.labels)
    return found


def _word_list(config: Config, corpus: Corpus, rows: Rows) -> list[str]:
    """Public words: those of the generator or of a file; or, on request, those of the training set."""
    if config.vocabulary == "public":
        return generator.words(config.domain_names)
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


def _new_clc(config: Config, words: list[str] | None, labels: Labels, heads: HeadSettings) -> Parts:
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
        heads=heads,
    )
    if vectors.table is not None:
        model.set_words(vectors.table)
    return Parts(model, ClcInputs(vectors), labels)


def _new_frozen_clc(config: Config, labels: Labels, heads: HeadSettings) -> Parts:
    """With the vectors of a file, which stay as they are."""
    vectors = word_vectors.load(config.vectors or "", config.max_words)
    model = FrozenCLC(
        words=len(vectors.words) + 1,
        dimension=vectors.dimension,
        intents=len(labels.intents),
        tags=len(labels.tags),
        window=WINDOW if config.window is None else config.window,
        dropout=0.1 if config.dropout is None else config.dropout,
        heads=heads,
    )
    if vectors.table is not None:
        model.set_words(vectors.table)
    return Parts(model, FrozenClcInputs(vectors), labels)


def _new_bert(config: Config, words: list[str] | None, labels: Labels, heads: HeadSettings) -> Parts:
    """With pretrained weights, or the paper's configuration with a word list."""
    if words is None:
        inputs, encoder = _pretrained(config.pretrained or "")
    else:
        inputs = BertInputs.from_words(words)
        encoder = AutoModel.from_config(paper_configuration(len(inputs.tokenizer)))
    return Parts(_around(encoder, config, labels, heads), inputs, labels)


def _around(encoder: Any, config: Config, labels: Labels, heads: HeadSettings) -> BERT:
    """A BERT with this encoder."""
    is_fixed = config.freeze == "encoder"
    text = config.features or (AUTO if is_fixed else LAST)
    layers = parse_layers(text, encoder.config.num_hidden_layers)
    if text == AUTO and not has_own_pieces(encoder):
        layers.remove(OWN_PIECES)
    model = BERT(
        encoder,
        intents=len(labels.intents),
        tags=len(labels.tags),
        dropout=0.1 if config.dropout is None else config.dropout,
        layers=layers,
        window=config.window if config.window is not None else min(1, len(layers)),
        heads=heads,
    )
    model.freeze(config.freeze)
    return model


def _from_earlier(config: Config, corpus: Corpus, rows: Rows) -> Parts:
    """With the encoder and the words of another run, and new heads."""
    earlier, _ = earlier_run.read(config.init_from or "")
    earlier_run.check_kind(config, earlier.model)
    earlier_run.check_other_data(config)
    labels, heads = _labels_and_heads(config, corpus, rows)
    if isinstance(earlier.model, BERT):
        return Parts(_around(earlier.model.encoder, config, labels, heads), earlier.inputs, labels)
    if not isinstance(earlier.model, CLC):
        raise TypeError(f"no model can begin with a {type(earlier.model).__name__}")
    sizes = len(labels.intents), len(labels.tags)
    return Parts(earlier_run.with_new_heads(earlier.model, config, *sizes, heads), earlier.inputs, labels)


def _pretrained(name_or_folder: str) -> tuple[BertInputs, Any]:
    try:
        return BertInputs.pretrained(name_or_folder), AutoModel.from_pretrained(name_or_folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the pretrained encoder {name_or_folder}: {error}") from None
