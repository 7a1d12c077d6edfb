"""The word-level LSTM language model of McMahan et al. 2018, appendix B: small, with one table for input and output."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from edpsgd._arguments import check_count

NO_TARGET = -100  # where there is nothing to predict
State = tuple[Tensor, Tensor]

_RANGE = 0.05  # of the first weights of the LSTM


class LanguageModel(nn.Module):
    """Predicts the next word: embedding -> LSTM -> output embedding, scored against the same table of embeddings.

    Every row of the table is used at length 1, whatever the length of the stored one: no step, clipping or noise can
    break the constraint.

    Args:
        words: rows of the table; the words of the dictionary, UNK, BOS and EOS.
        dimension: of an embedding.
        hidden: width of the LSTM's state.

    Example:
        >>> import torch
        >>> model = LanguageModel(words=10_003)
        >>> sum(parameter.numel() for parameter in model.parameters())
        1347456
        >>> logits, state = model(torch.tensor([[1, 5, 7]]))
        >>> tuple(logits.shape)
        (1, 3, 10003)
    """

    def __init__(self, words: int, dimension: int = 96, hidden: int = 256) -> None:
        super().__init__()
        check_count("words", words)
        check_count("dimension", dimension)
        check_count("hidden", hidden)
        self.embedding = nn.Embedding(words, dimension)
        self.lstm = nn.LSTM(dimension, hidden, batch_first=True)
        self.output = nn.Linear(hidden, dimension)
        self._initialise()

    def _initialise(self) -> None:
        """From torch's generator, so that a seed repeats it; the stored rows begin at a length of about 1."""
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        for parameter in self.lstm.parameters():
            nn.init.uniform_(parameter, -_RANGE, _RANGE)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def settings(self) -> dict[str, int]:
        """The arguments, to make it again."""
        return {
            "words": self.embedding.num_embeddings,
            "dimension": self.embedding.embedding_dim,
            "hidden": self.lstm.hidden_size,
        }

    def table(self) -> Tensor:
        """The embeddings, (words, dimension), each of length 1."""
        return functional.normalize(self.embedding.weight, dim=1)

    def encode(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The output embeddings (B, T, dimension), whose products with the table are the logits, and the last state.

        Args:
            tokens: numbers of words, (B, T).
            state: of an earlier call that these tokens go on from, two tensors (1, B, hidden); None at the beginning.
        """
        outputs, state = self.lstm(functional.normalize(self.embedding(tokens), dim=2), state)
        return self.output(outputs), state

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits of the word after each token, (B, T, words), and the last state; arguments as for encode."""
        outputs, state = self.encode(tokens, state)
        return outputs @ self.table().T, state

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log-likelihood (natural logarithm) of each row's targets, (B,).

        Args:
            tokens: (B, T).
            targets: the word after each token, (B, T); -100 where there is none. A row without any has a loss of 0.
        """
        each, is_real = self._each(tokens, targets, "none")
        row_of_each = is_real.nonzero()[:, 0]
        sums = each.new_zeros(len(targets)).index_add(0, row_of_each, each)
        return sums / is_real.sum(dim=1).clamp(min=1)

    def mean_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over all targets, a scalar; arguments as for losses, with at least one target."""
        return self._each(tokens, targets, "mean")[0]

    def _each(self, tokens: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """The losses of all targets, (targets,) or reduced, and where targets are, (B, T).

        Logits are the greater part of the work, and none are made for padding.
        """
        is_real = targets != NO_TARGET
        outputs, _ = self.encode(tokens)
        logits = outputs[is_real] @ self.table().T
        return functional.cross_entropy(logits, targets[is_real], reduction=reduction), is_real
