"""Damaged run folders of a language model."""

from __future__ import annotations

import pytest

from tasks.language.run_folder import load_model
from tests.helpers.language_jobs import FEDAVG, train


def test_damaged_folders(tmp_path) -> None:
    with pytest.raises(ValueError, match="not the run folder of a language model"):
        load_model(tmp_path)
    train(tmp_path / "run", *FEDAVG)
    with pytest.raises(SystemExit, match="holds a run"):
        train(tmp_path / "run", *FEDAVG)
    words = (tmp_path / "run" / "dictionary.txt").read_text(encoding="utf-8")
    (tmp_path / "run" / "dictionary.txt").write_text(words.partition("\n")[2], encoding="utf-8")
    with pytest.raises(ValueError, match="43 words in the model, 42 in its dictionary"):
        load_model(tmp_path / "run")
