"""What CLC reads: rows of the word table, vectors made of subwords, and characters, each against a slow computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_packed_sequence

from models import vectors
from models.clc import ALPHABET, CLC, LONGEST_WORD, ClcInputs
from models.vectors import WordVectors
from tests.helpers.small_models import ENCODER, LISTED, WORDS, inputs, tiny

LONG = "x" * 11 + "abcdef" + "y" * 13  # 30 characters


def model_of(words: int, dimension: int, **settings) -> CLC:
    torch.manual_seed(0)
    sizes = {"hidden": 8, "layers": 1, "characters": 4, "filters": 6, "dropout": 0.0}
    model = CLC(words, dimension, 3, 3, **{**sizes, **settings})
    for part in (model.characters, model.convolution):
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter)
    return model.eval()


def read(model: CLC, made: ClcInputs, words: list[str], lengths: list[int]) -> torch.Tensor:
    """What goes into the LSTM: utterances x words x (vector and features of characters)."""
    seen = []
    hook = model.lstm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model.features(made.table(words).batch(np.arange(len(words)), np.array(lengths)))
    hook.remove()
    return pad_packed_sequence(seen[0], batch_first=True)[0]


def spelling(model: CLC, plain: str) -> np.ndarray:
    """Filters over three characters at a time, with nothing before the first and after the last; their maximum."""
    table, kernel = model.characters.weight.detach().numpy(), model.convolution.weight.detach().numpy()
    codes = [ALPHABET.index(c) + 2 if c in ALPHABET else 1 for c in plain]
    nothing = np.zeros(table.shape[1])
    rows = [nothing, *(table[code] for code in codes), nothing]
    found = [np.einsum("fct,tc->f", kernel, np.array(rows[i : i + 3])) for i in range(len(codes))]
    return np.maximum(0, np.max(found, axis=0) + model.convolution.bias.detach().numpy())


@pytest.mark.parametrize("words", ["call zz call anna", "call anna anna call", "zz zz q zz"])
def test_words_that_are_kept_apart_are_read_alike(words) -> None:
    """In the table, or with vectors made of their subwords; also if all are."""
    said = words.split()
    distinct = list(dict.fromkeys(said))
    made = ClcInputs(WordVectors(["call", "anna"], np.eye(2, 5, dtype=np.float32), "list", 5))
    made.vectors.out_of_vocabulary = lambda word: np.full(5, len(word), np.float32)
    model = model_of(3, 5, train_words=True)
    batch = made.table(distinct).batch(np.array([distinct.index(word) for word in said]), np.array([3, 1]))
    found = []
    for model.keeps_apart in (False, True):
        found.append(model._inputs(batch)[batch["mask"]])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("call", "call"),
        ("Call", "Call"),
        ("a", "a"),
        ("Zürich", "Zurich"),
        ("ﬁre", "fire"),
        ("İstanbul", "Istanbul"),
        ("o'clock", "o'clock"),
        ("日本語", "日本語"),
        ("🤖", "🤖"),
        ("x" * LONGEST_WORD, "x" * LONGEST_WORD),
        (LONG, "x" * 11 + "a" + "y" * 12),
    ],
)
def test_characters(word, plain) -> None:
    """Accents are left out, of a long word the ends are read, and other scripts count as one unknown character."""
    model, made = model_of(8, 8), inputs("clc")
    found = read(model, made, [word, "internationalisation"], [1, 1])
    np.testing.assert_allclose(found[0, 0, 8:], spelling(model, plain), rtol=0, atol=1e-5)
    np.testing.assert_allclose(read(model, made, [word], [1])[0, 0, 8:], spelling(model, plain), rtol=0, atol=1e-5)


def test_word_without_characters() -> None:
    """An accent alone has no features, and does no harm."""
    model, made = model_of(8, 8), inputs("clc")
    found = read(model, made, ["\u0301", "call"], [2])
    assert found[0, 0, 8:].tolist() == [0.0] * 6
    model.train()(
        {
            **made.table(["\u0301"]).batch(np.array([0]), np.array([1])),
            "tags": torch.tensor([[1]]),
            "intents": torch.tensor([1]),
        }
    ).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_rows_of_the_word_table() -> None:
    """As it is, else in lower case; row 0 for all others."""
    model, made = model_of(len(LISTED) + 1, 8), inputs("clc")
    with torch.no_grad():
        model.words.weight.copy_(torch.arange(8.0).unsqueeze(1).expand(8, 8))
    found = read(model, made, ["anna", "CALL", "unlisted", "Anna", "日本"], [3, 2])
    assert found[0, :, 0].tolist() == [2.0, 1.0, 0.0]
    assert found[1, :2, 7].tolist() == [2.0, 0.0]


def test_new_word_table() -> None:
    """Unknown words begin with zeros, and pretrained vectors come after them."""
    model = model_of(3, 2)
    model.set_words(np.array([[1, 2], [3, 4]], dtype=np.float32))
    assert model.words.weight.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert not model.words.weight.requires_grad
    assert model_of(3, 2, train_words=True).words.weight.requires_grad


@pytest.fixture(scope="module")
def wordpieces() -> WordVectors:
    return vectors.load(ENCODER, max_words=2500)


def test_vectors_made_of_wordpieces(wordpieces) -> None:
    """In any mixture with words of the table, and without any."""
    model, made = model_of(len(wordpieces.words) + 1, 384), ClcInputs(wordpieces)
    model.set_words(wordpieces.table)
    listed = [word for word in wordpieces.words if word.isalpha()][::400]
    words = ["xylophonists", listed[0], "Zürichs", listed[1], "日本語", "o'clocks", listed[2], "xylophonists"]
    for chosen, lengths in (
        (words, [5, 3]),
        (words[:1], [1]),
        (["Zürichs", "o'clocks"], [1, 1]),
        (listed, [len(listed)]),
    ):
        found = read(model, made, chosen, lengths)
        flat = torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])
        for vector, word in zip(flat, chosen, strict=True):
            known = wordpieces.index.get(word)
            expected = wordpieces.out_of_vocabulary(word) if known is None else wordpieces.table[known]
            np.testing.assert_array_equal(vector[:384].numpy(), expected)
    assert not {"xylophonists", "zürichs", "o'clocks"} & set(wordpieces.words)


def test_word_that_has_no_parts(wordpieces) -> None:
    """It gets the row of unknown words, beside words that get made vectors."""
    model, made = model_of(len(wordpieces.words) + 1, 384), ClcInputs(wordpieces)
    assert wordpieces.out_of_vocabulary("\u200b") is None
    found = read(model, made, ["\u200b", "xylophonists"], [2])
    assert not found[0, 0, :384].any()
    np.testing.assert_array_equal(found[0, 1, :384].numpy(), wordpieces.out_of_vocabulary("xylophonists"))


def test_word_dropout() -> None:
    """In training only: a vector is there or it is not, place by place, and the characters stay."""
    model, made = model_of(8, 8, word_dropout=0.25), inputs("clc")
    torch.nn.init.ones_(model.words.weight)
    words = ["anna"] * 400
    still = read(model, made, words, [200, 200])
    assert bool((still[:, :, :8] == 1).all())
    moving = read(model.train(), made, words, [200, 200])
    assert set(moving[:, :, :8].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(moving[:, :, 0], moving[:, :, 7])
    assert 60 <= int((moving[:, :, 0] == 0).sum()) <= 140  # 100 are expected, with a deviation of 9
    assert torch.equal(moving[:, :, 8:], still[:, :, 8:])
    model.word_dropout = 0.0
    assert torch.equal(read(model, made, words, [200, 200]), still)


def test_batch_without_utterances() -> None:
    nothing = np.array([], dtype=np.int64)
    found = inputs("clc").table(WORDS).batch(nothing, nothing)
    assert found["mask"].shape == found["place"].shape == (0, 1)
    assert len(inputs("clc").table([]).batch(nothing, nothing)["rows"]) == 0


def test_settings_make_the_same_model() -> None:
    model = tiny("clc")
    other = CLC(**model.settings(), intents=4, tags=3)
    assert {name: p.shape for name, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert (other.word_dropout, other.dropout.p) == (model.word_dropout, model.dropout.p)
