"""The data of a job: users to train on, users to test on, and the dictionary of both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tasks.common.flags import require
from tasks.common.text_files import numbered_lines
from tasks.language import readers, user_generator
from tasks.language.configuration import Config
from tasks.language.dictionary import Dictionary
from tasks.language.user_texts import RawUsers, UserData, split_users


@dataclass(frozen=True)
class Texts:
    """Users to train on and users to test on, with the dictionary of both."""

    train: UserData
    test: UserData
    dictionary: Dictionary


def load_texts(config: Config) -> Texts:
    """Reads or generates the users, and numbers their words."""
    raw = _read(config)
    dictionary = _dictionary(config, raw)
    train, test = _split(config, raw, dictionary)
    for name, part in (("training", train), ("test", test)):
        if not len(part.tokens):
            raise ValueError(f"the {name} users have no words: there are {len(train)} and {len(test)} users")
    if config.iid:
        train = train.iid(config.data_seed)
    return Texts(train.cut(config.budget), test, dictionary)


def _read(config: Config) -> RawUsers:
    if config.task == "generated":
        return user_generator.generate(config.users, config.data_seed, config.sentences, config.words)
    path = config.data or ""
    if config.task == "shakespeare":
        return readers.read_shakespeare(path)
    return readers.read_jsonl(path)


def _split(config: Config, raw: RawUsers, dictionary: Dictionary) -> tuple[UserData, UserData]:
    data = raw.numbered(dictionary)
    if config.test_data is None:
        return split_users(data, raw.names, config.data_seed, config.held_out)
    return data, readers.read_jsonl(config.test_data).numbered(dictionary)


def has_private_dictionary(config: Config) -> bool:
    """Whether the words were read from the data themselves."""
    if config.dictionary == "training-set":
        return True
    if config.data is None or not config.dictionary.startswith("text:"):
        return False
    text = Path(config.dictionary.removeprefix("text:")).resolve()
    data = Path(config.data).resolve()
    return text == data or data in text.parents


def _dictionary(config: Config, raw: RawUsers) -> Dictionary:
    if config.dictionary == "public":
        require(config.task == "generated", "dictionary", "public", "a file, text:FILE or training-set")
        return Dictionary(user_generator.generate_words(config.words))
    if config.dictionary == "training-set":
        return Dictionary.from_texts(chain.from_iterable(raw.texts), config.dictionary_size)
    if config.dictionary.startswith("text:"):
        file = Path(config.dictionary.removeprefix("text:"))
        public_lines = (line for _, line in numbered_lines(file))
        return Dictionary.from_texts(public_lines, config.dictionary_size)
    return Dictionary.load(Path(config.dictionary))
