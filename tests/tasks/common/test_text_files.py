"""Lines of text files: their ends, byte order marks, and files that there are not."""

from __future__ import annotations

import pytest

from tasks.nlu.readers import ReadError, read
from tests.helpers.corpora import BLOCK, GOOD, HEADER, INTENT, OBJECT, ROW, TAGS, WORDS, aligned, written


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("atis", aligned(WORDS, TAGS, INTENT)),
        ("nlu-eval", {"a.csv": HEADER + ROW}),
        ("jsonl", {"a.jsonl": OBJECT}),
        ("conll", {"a.conll": BLOCK}),
    ],
)
def test_windows_line_ends_and_a_byte_order_mark_are_fine(tmp_path, task, files):
    def windows(text: str) -> bytes:
        return b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()

    written(tmp_path, {name: windows(text) for name, text in files.items()})
    assert list(read(task, tmp_path)) == [GOOD]


@pytest.mark.parametrize("task", ["nlu-eval", "jsonl", "conll"])
def test_a_missing_file_is_named(tmp_path, task):
    with pytest.raises(ReadError, match="nowhere: there is no such file"):
        read(task, tmp_path / "nowhere")
