"""What heads read of an encoder that may stay as it is: several layers of each word, its neighbours, its own pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

LAST = "last"  # the last layer alone: how an encoder that is trained itself is usually read
AUTO = "auto"
OWN_PIECES = 0  # the number of the layer below all others: a word's pieces, before the encoder has seen any other word


def parse_layers(text: str, depth: int) -> list[int]:
    """The layers that a text names; 1 is the lowest, and 0 stands for a word's own pieces.

    Args:
        text: "last"; "auto" for a word's own pieces, the middle and the last layer; or "layers:3,6".
        depth: how many layers there are.

    Returns:
        In ascending order; empty for "last", which is read without all this.

    Example:
        >>> parse_layers("auto", 6), parse_layers("layers:2,4", 6), parse_layers("last", 6)
        ([0, 3, 6], [2, 4], [])
    """
    if text == LAST:
        return []
    if text == AUTO:
        return [OWN_PIECES, *sorted({max(1, depth // 2), depth})]
    match = re.fullmatch(r"layers:(\d+(?:,\d+)*)", text)
    layers = [] if match is None else sorted({int(number) for number in match[1].split(",")})
    if not layers or layers[-1] == OWN_PIECES or layers[-1] > depth:
        raise ValueError(
            f"features must be last, auto or layers:N,M,... with numbers up to {depth}, one of them 1 or more; "
            f"got {text!r}"
        )
    return layers


def word_width(layers: int, width: int, window: int) -> int:
    """Of what ``of_words`` returns.

    Example:
        >>> word_width(layers=2, width=384, window=1)
        1536
    """
    return (layers + 2 * window) * width


def of_words(states: torch.Tensor, mask: torch.Tensor, layers: Sequence[int], window: int) -> torch.Tensor:
    """All layers of each word, and the lowest one of its neighbours that has seen the others.

    Args:
        states: utterances x words x layers x width.
        mask: utterances x words, true where there is a word; beyond an utterance's ends, neighbours are zero.
        layers: their numbers, in ascending order. A word's own pieces get the length of the next layer, so that
            clipping and noise weigh them alike.
        window: how many neighbours on each side.

    Returns:
        Utterances x words x ``word_width``, zero where there is no word.
    """
    states = states * mask[:, :, None, None]
    has_pieces = layers[0] == OWN_PIECES
    lowest = states[:, :, int(has_pieces)]
    parts = [states.flatten(2)]
    if has_pieces:
        length = lowest.norm(dim=2, keepdim=True)
        pieces = nn.functional.normalize(states[:, :, 0], dim=2) * length
        parts = [pieces, states[:, :, 1:].flatten(2)]
    words = lowest.shape[1]
    padded = nn.functional.pad(lowest, (0, 0, window, window))
    for distance in range(1, window + 1):
        parts.append(padded[:, window - distance : window - distance + words])
        parts.append(padded[:, window + distance : window + distance + words])
    return torch.cat(parts, dim=2) * mask.unsqueeze(2)  # a place beyond the end may have a neighbour


def of_utterances(means: torch.Tensor, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Directions of the mean states, as long as the words' features are: then one clip norm suits both heads.

    Args:
        means: utterances x width.
        words: their words' features, utterances x words x features, zero where there is no word.
        mask: utterances x words.

    Returns:
        Utterances x width.
    """
    squares = words.square().sum((1, 2)) / mask.sum(1).clamp(min=1)
    return nn.functional.normalize(means, dim=1) * squares.sqrt().unsqueeze(1)


def means_of_pieces(pieces: torch.Tensor, first: torch.Tensor, read: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over each word's pieces.

    Args:
        pieces: utterances x pieces x width, of whatever each piece has.
        first: the place of each word's first piece, utterances x words.
        read: utterances x pieces, true where there is a piece; the last of them is the end mark.
        mask: utterances x words.

    Returns:
        Utterances x words x width; what stands where there is no word means nothing.
    """
    end_mark = read.sum(1, keepdim=True) - 1
    following = torch.cat([first[:, 1:], torch.zeros_like(end_mark)], dim=1)
    is_last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    end = torch.where(is_last, end_mark, following)
    sums = nn.functional.pad(pieces.double().cumsum(1), (0, 0, 1, 0))  # of all pieces before a place

    def sums_before(places: torch.Tensor) -> torch.Tensor:
        return sums.gather(1, places.unsqueeze(2).expand(-1, -1, sums.shape[2]))

    counts = (end - first).clamp(min=1).unsqueeze(2)
    return ((sums_before(end) - sums_before(first)) / counts).to(pieces.dtype)
