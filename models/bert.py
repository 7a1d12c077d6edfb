"""BERT, or any Hugging Face encoder, with the two heads; the first piece of a word carries its slot."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, inject_adapter_in_model
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, PretrainedConfig, PreTrainedTokenizerFast

from edpsgd import files
from models.features import OWN_PIECES, means_of_pieces, of_utterances, of_words, word_width
from models.heads import Batch, HeadSettings, IntentSlotModel, length_mask, pad

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MOST_PIECES = 12  # of one word; the rest of a longer word is not read


def paper_configuration(vocabulary: int) -> BertConfig:
    """The encoder of the paper: 4 layers, 12 heads, 312 wide."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=312,
        num_hidden_layers=4,
        num_attention_heads=12,
        intermediate_size=1200,
        max_position_embeddings=512,
    )


def has_own_pieces(encoder: Any) -> bool:
    """Whether a piece is as wide before the encoder as in its layers; some encoders have narrower ones."""
    width: int = encoder.config.hidden_size
    return encoder.get_input_embeddings().embedding_dim == width


class BERT(IntentSlotModel):
    """An encoder with an intent head on the mean of its outputs, and a slot head on the first piece of every word.

    Args:
        encoder: a Hugging Face encoder; or the configuration of a new one, as an object or as a mapping.
        intents: how many there are.
        tags: how many there are.
        dropout: before the heads; the encoder has its own.
        adapters: the rank of low-rank adapters in the encoder; 0 for none. See ``freeze``.
        layers: the hidden layers that the heads read (``models.features``); none: the last one, as it is.
        window: how many neighbours of a word its slot head sees on each side, in the lowest of the layers.
        heads: how they begin and answer.

    Example:
        >>> model = BERT(BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2), 3, 5)
        >>> model.freeze("layers:1")
        >>> any("layer.0" in name for name, p in model.named_parameters() if p.requires_grad)
        False
    """

    def __init__(
        self,
        encoder: Any,
        intents: int,
        tags: int,
        dropout: float = 0.1,
        adapters: int = 0,
        layers: Sequence[int] = (),
        window: int = 0,
        heads: HeadSettings | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(encoder, Mapping):
            encoder = AutoConfig.for_model(**encoder)
        if isinstance(encoder, PretrainedConfig):
            encoder = AutoModel.from_config(encoder)
        width = encoder.config.hidden_size
        if window and not layers:
            raise ValueError(f"window is for chosen layers of the encoder, and none are: got window {window}")
        if OWN_PIECES in layers and not has_own_pieces(encoder):
            raise ValueError(f"its pieces have another width than its layers: choose layers above {OWN_PIECES}")
        of_word = word_width(len(layers) or 1, width, window)
        super().__init__(of_word, intents, tags, dropout, heads, utterance_width=width)
        self.layers, self.window = list(layers), window
        self.has_fixed_encoder = False
        self.encoder: Any = encoder.float()  # some are published in half precision, too coarse to train
        self.encoder.pooler = None  # never used: it would be noised for nothing
        self.adapters = 0
        if adapters:
            self._adapt(adapters)

    @staticmethod
    def pretrained(name_or_folder: str, intents: int, tags: int, dropout: float = 0.1, **settings: Any) -> BERT:
        """With the weights of a Hugging Face encoder; further settings are those of BERT itself."""
        return BERT(AutoModel.from_pretrained(name_or_folder), intents, tags, dropout, **settings)

    def settings(self) -> dict[str, Any]:
        """The encoder's configuration, what the heads read of it, and how they are."""
        return {
            "encoder": self.encoder.config.to_diff_dict(),
            "dropout": self.dropout.p,
            "adapters": self.adapters,
            "layers": self.layers,
            "window": self.window,
            "heads": self.head_settings(),
        }

    def freeze(self, what: str) -> None:
        """Trains less, so that less noise is needed.

        Args:
            what: "none", "embeddings", "layers:N" (the embeddings and the N lowest layers), "encoder" (all but the
                heads) or "adapters:R" (all but the heads and adapters of rank R, which are added: Hu et al. 2022).
        """
        if what.startswith("adapters:"):
            return self._adapt(int(what[9:]) if what[9:].isdecimal() else 0)
        frozen: list[nn.Module] = []
        if what in ("embeddings", "encoder") or what.startswith("layers:"):
            frozen.append(self.encoder if what == "encoder" else self.encoder.embeddings)
        if what.startswith("layers:"):
            layers = next(m for m in self.encoder.modules() if isinstance(m, nn.ModuleList))
            number = int(what[7:]) if what[7:].isdecimal() else -1
            if not 0 <= number <= len(layers):
                raise ValueError(f"freeze must be layers:N with N from 0 to {len(layers)}, got {what!r}")
            frozen.extend(layers[:number])
        elif not frozen and what != "none":
            raise ValueError(f"freeze must be none, embeddings, layers:N, encoder or adapters:R, got {what!r}")
        for module in frozen:
            module.requires_grad_(False)
        self.has_fixed_encoder = what == "encoder"
        self.train(self.training)
        return None

    def train(self, mode: bool = True) -> BERT:
        """An encoder that is not trained says the same of an utterance each time: its dropout stays off."""
        super().train(mode)
        if self.has_fixed_encoder:
            self.encoder.eval()
        return self

    def _adapt(self, rank: int) -> None:
        """Adds a product of two thin matrices to every linear layer of the encoder, and freezes all else of it."""
        if rank < 1 or self.adapters not in (0, rank):
            raise ValueError(f"adapters must have one rank of at least 1, got {rank} and had {self.adapters}")
        if self.adapters == 0:
            inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"), self.encoder)
            self.adapters = rank

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the words and of the utterances, from states that are computed now or that the batch brings along."""
        if "word_states" in batch:
            dtype = self.slots.weight.dtype
            words, means = batch["word_states"].to(dtype), batch["utterance_states"].to(dtype)
        else:
            words, means = self.states(batch)
        if not self.layers:
            return words.squeeze(2), means
        mask = batch["mask"]
        of_each_word = of_words(words, mask, self.layers, self.window)
        return of_each_word, of_utterances(means, of_each_word, mask)

    def states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the layers that the heads read, or of the last one.

        Returns:
            Those at the first piece of each word (utterances x words x layers x width), and the means over all pieces
            and all layers but a word's own pieces (utterances x width).
        """
        pieces, read = batch["pieces"], batch["read"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.has_fixed_encoder):
            found = self.encoder(input_ids=pieces, attention_mask=read, output_hidden_states=bool(self.layers))
            layers = [found.hidden_states[layer] for layer in self.layers if layer != OWN_PIECES]
            hidden = torch.stack(layers or [found.last_hidden_state], dim=2)
            first = batch["first"][:, :, None, None].expand(-1, -1, *hidden.shape[2:])
            words = hidden.gather(1, first)
            if OWN_PIECES in self.layers:
                table = self.encoder.get_input_embeddings()
                own = means_of_pieces(table(pieces), batch["first"], read, batch["mask"])
                words = torch.cat([own.unsqueeze(2).to(words.dtype), words], dim=2)
            weights = read.unsqueeze(2).to(hidden.dtype)
            return words, (hidden.mean(2) * weights).sum(1) / weights.sum(1)


class BertInputs:
    """Turns words into pieces. Every distinct word is cut once, whatever the number of utterances that it stands in.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        most: the longest sequence of pieces that the encoder takes.
    """

    def __init__(self, tokenizer: Any, most: int = 512) -> None:
        if not tokenizer.is_fast:
            raise ValueError("the encoder needs a fast tokenizer, and Hugging Face has only a slow one for it")
        if None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise ValueError("the encoder's tokenizer must have tokens for begin, end, padding and unknown, as BERT's")
        self.tokenizer, self.most = tokenizer, most

    @staticmethod
    def pretrained(name_or_folder: str) -> BertInputs:
        """The tokenizer of a Hugging Face encoder."""
        limit = getattr(AutoConfig.from_pretrained(name_or_folder), "max_position_embeddings", 512)
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder, add_prefix_space=True)
        return BertInputs(tokenizer, min(limit, tokenizer.model_max_length))  # RoBERTa has positions that it cannot use

    @staticmethod
    def from_words(words: Iterable[str]) -> BertInputs:
        """Whole words of a list, also at the beginning of longer ones; and single characters for all else.

        Example:
            >>> inputs = BertInputs.from_words(["call", "anna"])
            >>> inputs.tokenizer.convert_ids_to_tokens(inputs.tokenizer("Call bo").input_ids)
            ['[CLS]', 'call', 'b', '##o', '[SEP]']
        """
        letters = string.ascii_lowercase + string.digits + string.punctuation
        normalizer = normalizers.BertNormalizer(lowercase=True)
        known = (piece for word in words for piece in normalizer.normalize_str(word).split())
        pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{c}" for c in letters), *known])
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.WordPiece()
        names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        fast.backend_tokenizer.post_processor = _framed(vocabulary)
        return BertInputs(fast)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer, which knows nothing of the data."""
        self.tokenizer.save_pretrained(folder)
        files.write_text(folder / "limit.json", json.dumps(self.most))

    @staticmethod
    def load(folder: Path) -> BertInputs:
        """What save wrote."""
        files.check_tree(folder)  # the tokenizer would wait for a FIFO
        most = files.read_json(folder / "limit.json")
        return BertInputs(AutoTokenizer.from_pretrained(folder), most)

    def table(self, words: Sequence[str]) -> BertTable:
        """Cuts every distinct word of some data into pieces, once."""
        cut: list[list[int]] = []
        for begin in range(0, len(words), 10_000):
            part = [[word] for word in words[begin : begin + 10_000]]
            cut += self.tokenizer(part, is_split_into_words=True, add_special_tokens=False).input_ids
        unknown = [self.tokenizer.unk_token_id]
        cut = [pieces[:MOST_PIECES] or unknown for pieces in cut]
        tokenizer = self.tokenizer
        frame = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        return BertTable(cut, frame, self.most)


class BertTable:
    """The distinct words of some data as pieces."""

    def __init__(self, cut: Sequence[Sequence[int]], frame: tuple[int, int, int], most: int) -> None:
        self._sizes = np.array([len(pieces) for pieces in cut], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._pieces = np.fromiter((piece for pieces in cut for piece in pieces), dtype=np.int64)
        self._begin, self._end, self._padding = frame
        self._most = most

    def check(self, word_ids: npt.NDArray[np.integer], starts: npt.NDArray[np.int64]) -> None:
        """Refuses utterances that are too long for the encoder, before training rather than in the middle of it."""
        before = np.concatenate([[0], np.cumsum(self._sizes[word_ids])])
        self._check(np.diff(before[starts]), advice="; --longest WORDS leaves out those with more words")

    def _check(self, totals: npt.NDArray[np.int64], advice: str = "") -> None:
        too_long = np.count_nonzero(totals + 2 > self._most)
        if too_long:
            raise ValueError(
                f"{too_long} of {len(totals)} utterances have more than the {self._most - 2} pieces that the encoder "
                f"reads, the longest {totals.max()}{advice}"
            )

    def batch(self, word_ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """What BERT reads of utterances whose words stand one after the other."""
        sizes = self._sizes[word_ids]  # pieces of each word
        ends = np.cumsum(sizes)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
        pieces = self._pieces[np.repeat(self._starts[word_ids], sizes) + within]
        padded_sizes = pad(sizes, lengths)
        totals = padded_sizes.sum(axis=1)
        self._check(totals)
        framed = np.full((len(lengths), int(totals.max(initial=1)) + 2), self._padding, dtype=np.int64)
        framed[:, 0] = self._begin
        framed[:, 1:-1][length_mask(totals)] = pieces
        framed[np.arange(len(totals)), totals + 1] = self._end
        batch = {
            "pieces": framed,
            "read": length_mask(totals + 2),
            "first": (np.cumsum(padded_sizes, axis=1) - padded_sizes + 1) * length_mask(lengths),
            "mask": length_mask(lengths),
        }
        return {name: torch.from_numpy(value) for name, value in batch.items()}


def _framed(vocabulary: dict[str, int]) -> TemplateProcessing:
    """[CLS] before and [SEP] after the pieces, for whoever calls the tokenizer itself."""
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    return TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
