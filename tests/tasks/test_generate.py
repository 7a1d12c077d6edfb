"""The command that writes generated utterances."""

from __future__ import annotations

from tasks.generate import main
from tasks.nlu.generator import utterances
from tasks.nlu.readers import read


def test_the_command_writes_what_the_reader_reads(tmp_path):
    file = tmp_path / "some.jsonl"
    main(["30", "--seed", "4", "--output", str(file), "--domains", "health", "video"])
    corpus = read("jsonl", file)
    assert list(corpus) == list(utterances(30, seed=4, domains=["health", "video"]))
    assert corpus.repaired == 0
