"""The run folder of a language model: what is in it, and what no noise covers.

config.yaml, language_model.json, dictionary.txt, weights.safetensors, metrics.jsonl, head_words.json, checkpoints/ and,
with noise, ledger.jsonl and the privacy card.
"""

from __future__ import annotations

import json
from pathlib import Path

from edpsgd import files
from models.language_model import LanguageModel
from tasks.common import checkpoints
from tasks.common.flags import write_file
from tasks.common.run_opening import WEIGHTS
from tasks.language.configuration import Config
from tasks.language.dataset import has_private_dictionary
from tasks.language.dictionary import Dictionary

MODEL, DICTIONARY = "language_model.json", "dictionary.txt"


def begin_run(folder: Path, config: Config, model: LanguageModel, dictionary: Dictionary) -> None:
    """Writes what stays the same in a run folder, and the initial weights."""
    files.make_private(folder)
    files.write_text(folder / MODEL, json.dumps(model.settings()))
    dictionary.save(folder / DICTIONARY)
    checkpoints.save_weights(folder / WEIGHTS, model.state_dict())
    write_file(folder / "config.yaml", config)


def load_model(folder: str | Path) -> tuple[LanguageModel, Dictionary]:
    """The model of a run folder, on the CPU and ready to predict, with its dictionary."""
    folder = Path(folder)
    try:
        model = LanguageModel(**files.read_json(folder / MODEL))
        model.load_state_dict(checkpoints.load_weights(folder / WEIGHTS))
        dictionary = Dictionary.load(folder / DICTIONARY)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{folder} is not the run folder of a language model, or it is damaged: {reason}") from None
    if len(dictionary) != model.settings()["words"]:
        raise ValueError(
            f"{folder}: {model.settings()['words']} words in the model, {len(dictionary)} in its dictionary"
        )
    return model.eval(), dictionary


def not_covered(config: Config) -> list[str]:
    """What no noise covers, to be said in the card."""
    statements = {
        "the people: users are made up, with sentences of many (--iid); ε is for a made-up user": config.iid,
        "the dictionary: it was read from the private texts, and the run folder holds it": has_private_dictionary(
            config
        ),
        "whoever reads config.yaml or checkpoints/: they hold the seed of the noise": config.seed is not None,
        "metrics.jsonl, head_words.json and checkpoints/: exact figures of held-out users": True,
        "the number of users, and of their words that the job prints": True,
    }
    return [text for text, applies in statements.items() if applies]
