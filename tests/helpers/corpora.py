"""Small corpora in every format, and where the real ones are."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tasks.nlu.corpus import Utterance
from tests.helpers.paths import ROOT

Files = dict[str, str | bytes]

# one utterance, and how each format spells it
GOOD = Utterance(("call", "anna", "lee"), ("O", "B-name", "I-name"), "phone_call")
WORDS, TAGS, INTENT = "call anna lee\n", "O B-name I-name\n", "phone_call\n"
HEADER, ROW = "answerid;scenario;intent;answer_annotation\n", '1;phone;call;"call [name : anna lee]"\n'
OBJECT = '{"tokens": ["call", "anna", "lee"], "tags": ["O", "B-name", "I-name"], "intent": "phone_call"}\n'
BLOCK = "# intent = phone_call\ncall\tO\nanna\tB-name\nlee\tI-name\n\n"


def data_folder() -> Path:
    """The folder of the real corpora; the test is skipped if there is none."""
    folder = Path(os.environ.get("EDPSGD_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} with corpora; EDPSGD_DATA may name another one")
    return folder


def written(folder: Path, files: Files) -> Path:
    """The folder, after the files were written into it."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def aligned(words: str | bytes, tags: str | bytes, intents: str | bytes) -> Files:
    return {"train/seq.in": words, "train/seq.out": tags, "train/label": intents}


def corpus(path: Path, lines: int = 200) -> Path:
    """Sentences in which numbers stand beside numbers, and names beside names."""
    rng = random.Random(0)
    groups = [["one", "two", "three", "four"], ["Anna", "Omar", "Lena", "Raj"]]
    path.write_text("".join(" ".join(rng.choices(groups[i % 2], k=6)) + "\n" for i in range(lines)), encoding="utf-8")
    return path
