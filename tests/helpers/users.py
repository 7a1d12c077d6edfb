"""Users' texts as lists, and files of them that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.common.text_files import ReadError
from tasks.language.user_texts import UserData

Lists = list[list[list[int]]]


def lists(data: UserData) -> Lists:
    return [[words.tolist() for words in data.of_user(k)] for k in range(len(data))]


def assert_refused(read: Callable[[Path], object], folder: Path, content: bytes, message: str) -> None:
    """The error names the file and the line, and tells nothing of the secret in it."""
    (folder / "file").write_bytes(content)
    with pytest.raises(ReadError, match=f"file{message}") as caught:
        read(folder / "file")
    assert "secret" not in str(caught.value).replace(str(folder), "").lower()
