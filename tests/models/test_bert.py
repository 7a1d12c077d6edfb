"""What BERT reads, against the tokenizer's own answers; frozen parts; pretrained weights."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertModel, DistilBertConfig, PreTrainedTokenizerFast

from edpsgd.per_example import UnitGradients
from models.bert import BERT, MOST_PIECES, BertInputs
from tests.helpers.small_models import ENCODER, Said, batch, tiny, tiny_configuration
from tests.helpers.unit_loop import check, trained

SENTENCES = [
    ["call", "xylophonists", "at", "Zürich", "by", "nine", "o'clock"],
    ["日本", "new-york", "🤖", "[MASK]", "x"],
    ["unaffable"],
]


@pytest.fixture(scope="module")
def minilm() -> BertInputs:
    return BertInputs.pretrained(str(ENCODER))


def arrays(sentences: list[list[str]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Distinct words, the numbers of all words, and the lengths."""
    distinct = sorted({word for words in sentences for word in words})
    numbers = np.array([distinct.index(word) for words in sentences for word in words])
    return distinct, numbers, np.array([len(words) for words in sentences])


def read(inputs: BertInputs, sentences: list[list[str]]) -> dict[str, torch.Tensor]:
    distinct, numbers, lengths = arrays(sentences)
    return inputs.table(distinct).batch(numbers, lengths)


def test_pieces_are_those_of_the_tokenizer(minilm) -> None:
    """Words are cut once each, and it is as if each utterance had been cut as a whole."""
    found = read(minilm, SENTENCES)
    for row, words in enumerate(SENTENCES):
        expected = minilm.tokenizer(words, is_split_into_words=True)
        pieces = found["pieces"][row][found["read"][row]]
        assert pieces.tolist() == expected.input_ids
        assert not found["pieces"][row][len(pieces) :].any()  # padding has number 0
        owners = expected.word_ids()
        firsts = [owners.index(number) for number in range(len(words))]
        assert found["first"][row][found["mask"][row]].tolist() == firsts
        assert not found["first"][row][len(words) :].any()


def test_first_pieces_by_hand(minilm) -> None:
    found = read(minilm, SENTENCES[:1])
    tokens = minilm.tokenizer.convert_ids_to_tokens(found["pieces"][0].tolist())
    assert " ".join(tokens) == "[CLS] call x ##yl ##op ##hon ##ists at zurich by nine o ' clock [SEP]"
    assert found["first"].tolist() == [[1, 2, 7, 8, 9, 10, 11]]


def test_the_first_piece_carries_the_slot(minilm) -> None:
    """The outputs that the slot head gets are those of the encoder at the words' first pieces."""
    torch.manual_seed(0)
    model = BERT(tiny_configuration(len(minilm.tokenizer)), 2, 3).eval()
    given = read(minilm, SENTENCES)
    with torch.no_grad():
        words, utterances = model.features(given)
        for row, sentence in enumerate(SENTENCES):
            whole = minilm.tokenizer(sentence, is_split_into_words=True, return_tensors="pt")
            alone = model.encoder(**whole).last_hidden_state[0]
            firsts = [whole.word_ids().index(number) for number in range(len(sentence))]
            torch.testing.assert_close(words[row, : len(sentence)], alone[firsts], rtol=0, atol=1e-5)
            torch.testing.assert_close(utterances[row], alone.mean(0), rtol=0, atol=1e-5)


def test_words_without_pieces_and_with_many(minilm) -> None:
    """A word of which nothing is left counts as unknown; of a very long one only the beginning is read."""
    long = "xq" * 40
    cut = minilm.tokenizer([long], is_split_into_words=True, add_special_tokens=False).input_ids
    assert len(cut) > MOST_PIECES
    found = read(minilm, [["\u200b", "call", long, "anna"]])
    begin, end, unknown = (minilm.tokenizer.convert_tokens_to_ids(name) for name in ("[CLS]", "[SEP]", "[UNK]"))
    call, anna = (minilm.tokenizer.convert_tokens_to_ids(name) for name in ("call", "anna"))
    assert found["pieces"].tolist() == [[begin, unknown, call, *cut[:MOST_PIECES], anna, end]]
    assert found["first"].tolist() == [[1, 2, 3, 3 + MOST_PIECES]]


def test_too_long_utterances() -> None:
    """The limit counts the two tokens around the pieces; the error has numbers and no words."""
    inputs = BertInputs(BertInputs.from_words(["call", "anna"]).tokenizer, most=6)
    assert read(inputs, [["call"] * 4])["pieces"].shape == (1, 6)
    with pytest.raises(ValueError, match="1 of 2 utterances have more than the 4 pieces .* the longest 5$") as error:
        read(inputs, [["call"], ["call"] * 3 + ["bo"]])
    assert "bo" not in str(error.value)


def test_too_long_utterances_are_found_before_training() -> None:
    inputs = BertInputs(BertInputs.from_words(["call"]).tokenizer, most=6)
    table = inputs.table(["call", "bo"])  # one piece, two pieces
    words = np.array([0, 0, 0, 0, 0, 1, 0, 1])
    table.check(words, np.array([0, 4, 7, 8]))
    with pytest.raises(ValueError, match="1 of 2 utterances .* the longest 7; --longest WORDS"):
        table.check(words, np.array([0, 3, 8]))


@pytest.mark.parametrize(("said", "limit"), [(20, 20), (100, 64)])
def test_limit_is_the_smaller_of_two(tmp_path, said, limit) -> None:
    """That of the encoder's positions and that of its tokenizer: RoBERTa has positions that it cannot use."""
    tokenizer = BertInputs.from_words(["call"]).tokenizer
    tokenizer.model_max_length = said
    tokenizer.save_pretrained(tmp_path)
    tiny_configuration(len(tokenizer)).save_pretrained(tmp_path)
    assert BertInputs.pretrained(str(tmp_path)).most == limit


def test_batch_without_utterances(minilm) -> None:
    nothing = np.array([], dtype=np.int64)
    for words in (["call"], []):
        found = minilm.table(words).batch(nothing, nothing)
        assert found["mask"].shape == found["first"].shape == (0, 1)
        assert len(found["pieces"]) == 0


def test_list_of_words() -> None:
    """Whole words as the tokenizer writes them, characters for others, and the unknown token for other scripts."""
    inputs = BertInputs.from_words(["Call", "café", "o'clock", "東京", "call"])
    tokenizer = inputs.tokenizer
    cut = [tokenizer.tokenize(word) for word in ("CALL", "Café", "o'clock", "calls", "7up", "東京", "大")]
    assert cut[:3] == [["call"], ["cafe"], ["o'clock"]]
    assert cut[3:5] == [["call", "##s"], ["7", "##u", "##p"]]
    assert cut[5:] == [["東", "京"], ["[UNK]"]]
    assert tokenizer.convert_ids_to_tokens(tokenizer("call bo").input_ids) == ["[CLS]", "call", "b", "##o", "[SEP]"]
    assert tokenizer.pad_token_id == 0


def test_tokenizer_without_the_tokens_that_are_needed() -> None:
    backend = BertInputs.from_words(["call"]).tokenizer.backend_tokenizer
    with pytest.raises(ValueError, match="must have tokens for begin, end, padding and unknown"):
        BertInputs(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("what", "frozen"),
    [
        ("none", ()),
        ("embeddings", ("encoder.embeddings.",)),
        ("layers:0", ("encoder.embeddings.",)),
        ("layers:1", ("encoder.embeddings.", "encoder.encoder.layer.0.")),
        ("layers:2", ("encoder.embeddings.", "encoder.encoder.layer.")),
        ("encoder", ("encoder.",)),
    ],
)
def test_frozen_parts_get_no_gradients(what, frozen) -> None:
    model = tiny("bert").train()
    model.freeze(what)
    model(batch("bert", [Said([0, 1], [0, 1], 2), Said([4, 7, 8], [0, 2, 1], 0)])).mean().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    expected = {name for name, _ in model.named_parameters() if frozen and name.startswith(frozen)}
    assert without == expected
    assert bool(expected) == (what != "none")


@pytest.mark.parametrize("what", ["layers:3", "layers:-1", "layers:", "layers:x", "layers:1.5"])
def test_layers_that_there_are_not(what) -> None:
    with pytest.raises(ValueError, match="freeze must be layers:N with N from 0 to 2, got"):
        tiny("bert").freeze(what)


@pytest.mark.parametrize("what", ["", "all", "Encoder", "layer:1", "embedding"])
def test_nothing_that_can_be_frozen(what) -> None:
    with pytest.raises(ValueError, match="freeze must be none, embeddings, layers:N, encoder or adapters:R, got"):
        tiny("bert").freeze(what)


SAID = [
    Said([0, 1], [0, 1], 2),
    Said([4, 7, 8], [0, 2, 1], 0),
    Said([3], [1], 1),
    Said([3, 4, 5, 6, 7], [1, 0, 1, 0, 1], 1),
]


def adapted(rank: int = 2) -> BERT:
    """With adapters that have been trained for a while."""
    model = tiny("bert")
    assert isinstance(model, BERT)
    model.freeze(f"adapters:{rank}")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_adapters_leave_the_model_as_it_is_at_first() -> None:
    model = tiny("bert")
    before = model(batch("bert", SAID))
    model.freeze("adapters:2")
    torch.testing.assert_close(model(batch("bert", SAID)), before)


def test_only_adapters_and_heads_are_trained() -> None:
    """Six linear layers in each of two layers, two thin matrices each: here all sizes are 16."""
    model = adapted()
    assert isinstance(model, BERT)
    found = trained(model)
    within = {name: p for name, p in found.items() if name.startswith("encoder.")}
    assert all("lora_" in name for name in within)
    assert sum(p.numel() for p in within.values()) == 2 * 6 * 2 * (16 * 2)
    assert {id(p) for name, p in found.items() if name not in within} == {id(p) for p in model.head_parameters()}


def test_adapters_are_part_of_the_settings() -> None:
    """A run folder gives the same model back, and training goes on with the same layers frozen."""
    model = adapted()
    again = BERT(**json.loads(json.dumps(model.settings())), intents=model.intent.out_features, tags=3).eval()
    again.load_state_dict(model.state_dict())
    again.freeze("adapters:2")
    torch.testing.assert_close(again(batch("bert", SAID)), model(batch("bert", SAID)))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("what", ["adapters:0", "adapters:", "adapters:-1", "adapters:x", "adapters:3"])
def test_adapters_that_cannot_be(what) -> None:
    with pytest.raises(ValueError, match="adapters must have one rank of at least 1, got"):
        adapted(2).freeze(what)


def test_gradients_of_single_examples_with_adapters() -> None:
    model = adapted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there are rules for all of it
        check(UnitGradients(trained(model)), model, model(batch("bert", SAID)))


def test_another_encoder() -> None:
    """DistilBERT keeps its layers elsewhere."""
    sizes = {"vocab_size": 100, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
    model = BERT(DistilBertConfig(**sizes, max_position_embeddings=32), 3, 3)
    model.freeze("layers:1")
    trained = {name for name, p in model.named_parameters() if p.requires_grad and name.startswith("encoder")}
    assert trained
    assert all(name.startswith("encoder.transformer.layer.1.") for name in trained)


def test_pretrained_weights(minilm) -> None:
    """Outputs are those of transformers' own model for the same sentence."""
    sentence = ["call", "Anna", "at", "nine", "o'clock"]
    model = BERT.pretrained(str(ENCODER), 2, 3).eval()
    whole = AutoTokenizer.from_pretrained(ENCODER)(" ".join(sentence), return_tensors="pt")
    with torch.no_grad():
        own = AutoModel.from_pretrained(ENCODER).eval()(**whole).last_hidden_state[0]
        words, utterances = model.features(read(minilm, [sentence]))
    torch.testing.assert_close(words[0], own[[1, 2, 3, 4, 5]], rtol=0, atol=1e-5)
    torch.testing.assert_close(utterances[0], own.mean(0), rtol=0, atol=1e-5)
    assert not any("pooler" in name for name, _ in model.named_parameters())


def test_weights_in_half_precision(tmp_path) -> None:
    """They are trained in single precision, also after a run folder."""
    BertModel(tiny_configuration(50)).half().save_pretrained(tmp_path)
    model = BERT.pretrained(str(tmp_path), 2, 3)
    again = BERT(**json.loads(json.dumps(model.settings())), intents=2, tags=3)
    assert {p.dtype for m in (model, again) for p in m.parameters()} == {torch.float32}
