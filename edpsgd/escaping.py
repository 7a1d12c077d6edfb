"""Text from files and labels as it may be shown: nothing in it moves the cursor, hides, reorders or becomes markup."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

_JOINERS = "\u200c\u200d"  # parts of words in Persian and Hindi, and of emoji


def visible(text: str, keep: str = "") -> str:
    r"""The text with control, format and line-separating characters spelled out.

    These are C0 and C1 controls, such as the escape of a terminal, marks that turn the direction of writing, and halves
    of characters.

    Args:
        text: of any source.
        keep: characters that stay, such as the ends of lines in a page.

    Example:
        >>> visible("call\x1b[2J \u202eanna")
        'call\\x1b[2J \\u202eanna'
    """
    if text.isascii() and text.isprintable():
        return text
    characters = []
    for character in text:
        is_shown = character in keep or not _is_hidden(character)
        characters.append(character if is_shown else _spelled(character))
    return "".join(characters)


def _is_hidden(character: str) -> bool:
    """Whether a terminal or page would act on the character instead of showing it."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS


def _spelled(character: str) -> str:
    """The character as Python spells it in a literal."""
    return character.encode("unicode_escape", "surrogatepass").decode()


def json_ready(value: Any) -> Any:
    """The data as dicts, lists and numbers; NaN and infinities, which JSON does not have, become strings.

    Example:
        >>> json_ready({"epsilon": float("inf"), "steps": (1, 2)})
        {'epsilon': 'inf', 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def json_text(data: Any, indent: int | None = None) -> str:
    r"""Data as JSON that can be read in any language, with hidden characters spelled as JSON spells them.

    Example:
        >>> json_text({"intent": "größe\x9b2J"})
        '{"intent": "größe\\u009b2J"}'
    """
    text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)
    if text.isascii() and "\x7f" not in text:
        return text
    characters = []
    for character in text:
        is_shown = character == "\n" or not _is_hidden(character)
        characters.append(character if is_shown else json.dumps(character)[1:-1])
    return "".join(characters)


def markdown(text: str) -> str:
    r"""Text that stays text in a page: no HTML, no links, no cells, no hidden characters.

    Example:
        >>> markdown("<b> [link](x)")
        '&lt;b> \\[link\\](x)'
    """
    plain = visible(text).replace("\\", "\\\\")
    for mark in "|[]":
        plain = plain.replace(mark, f"\\{mark}")
    return plain.replace("&", "&amp;").replace("<", "&lt;")
