"""Labels that share weights where their names have parts in common, such as fromloc.city and toloc.city.

A rare label then learns from its relatives, and the noise on what they share is averaged over all of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

_BREAK = re.compile(r"[\W_]+|(?<=[a-z])(?=[A-Z])")  # fromloc.city_name, partySize
_SHARE = math.sqrt(0.5)  # of a label's own weights and of each part's: with one part, scores are as large as without


def name_parts(name: str) -> list[str]:
    """The parts of a label's name.

    Example:
        >>> name_parts("fromloc.city_name"), name_parts("partySize"), name_parts("date")
        (['fromloc', 'city', 'name'], ['party', 'size'], ['date'])
    """
    return [part.lower() for part in _BREAK.split(name) if part]


def mixing_matrix(parts: Sequence[Sequence[str]]) -> torch.Tensor:
    """What the score of each label is made of: its own one and those of the parts that others have too.

    Args:
        parts: of each label.

    Returns:
        Labels x (labels + shared parts).

    Example:
        >>> mixing_matrix([["O"], ["B-city", "B-from"], ["B-city", "B-to"]]).gt(0).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]]
    """
    counts = Counter(part for own in parts for part in set(own))
    shared = sorted(part for part, count in counts.items() if count > 1)
    columns = {part: len(parts) + number for number, part in enumerate(shared)}
    matrix = torch.zeros(len(parts), len(parts) + len(shared))
    matrix.fill_diagonal_(_SHARE)
    for label, own in enumerate(parts):
        for part in own:
            if part in columns:
                matrix[label, columns[part]] = _SHARE
    return matrix


class SharedLinear(nn.Linear):
    """A linear layer whose labels share weights.

    Args:
        width: of the features.
        parts: of each label; what two of them have in common they share.

    Example:
        >>> layer = SharedLinear(4, [["O"], ["B-city", "B-from"], ["B-city", "B-to"]])
        >>> layer(torch.ones(2, 4)).shape, layer.weight.shape
        (torch.Size([2, 3]), torch.Size([4, 4]))
    """

    mixing: torch.Tensor

    def __init__(self, width: int, parts: Sequence[Sequence[str]]) -> None:
        matrix = mixing_matrix(parts)
        super().__init__(width, matrix.shape[1])
        self.register_buffer("mixing", matrix, persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scores of the labels: ... x labels."""
        scores = super().forward(features)
        return scores @ self.mixing.T.to(scores.dtype)
