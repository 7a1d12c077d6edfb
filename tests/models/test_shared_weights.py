"""Labels with common parts share weights: against sums by hand, and a private step against a loop."""

from __future__ import annotations

import math

import pytest
import torch

import edpsgd
from models.bert import BERT
from models.heads import HeadSettings
from models.shared_weights import SharedLinear, mixing_matrix, name_parts
from tests.helpers.small_models import INTENTS, TAGS, Said, batch, inputs, tiny_configuration

PARTS = [["O"], ["B-from", "B-city"], ["I-from", "I-city"], ["B-to", "B-city"], ["I-to", "I-city"]]
SAID = [Said([0, 1, 2], [0, 1, 2], 3), Said([1, 7], [2, 2], 0), Said([4], [1], 1)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fromloc.city_name", ["fromloc", "city", "name"]),
        ("entityName", ["entity", "name"]),
        ("URL", ["url"]),
        ("__", []),
        ("größe-2", ["größe", "2"]),
    ],
)
def test_parts_of_names(name, parts) -> None:
    assert name_parts(name) == parts


def test_scores_are_sums_of_own_and_shared_ones() -> None:
    torch.manual_seed(0)
    layer = SharedLinear(6, PARTS).double()
    features = torch.randn(2, 3, 6, dtype=torch.float64)
    of_columns = torch.einsum("abd,cd->abc", features, layer.weight) + layer.bias
    shared = ["B-city", "I-city"]  # in the order of their columns; from and to are one tag's own each
    for number, own in enumerate(PARTS):
        columns = [number, *(len(PARTS) + shared.index(part) for part in own if part in shared)]
        expected = math.sqrt(0.5) * of_columns[..., columns].sum(-1)
        torch.testing.assert_close(layer(features)[..., number], expected)


def test_a_part_that_stands_twice_in_a_name_counts_once() -> None:
    assert mixing_matrix([["B-a", "B-a"], ["B-b"]]).shape == (2, 2), "no other tag has it"
    assert mixing_matrix([["B-a", "B-a"], ["B-a"]])[:, 2].tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_tags_of_unrelated_names_train_alone() -> None:
    torch.testing.assert_close(mixing_matrix([["O"], ["B-a"], ["I-a"]]), math.sqrt(0.5) * torch.eye(3))


def test_parts_must_be_there_for_every_tag() -> None:
    with pytest.raises(ValueError, match=f"tag_parts must have a list for each of {TAGS} tags, got 1"):
        made([["O"]])


def test_clipped_gradients_are_those_of_a_loop() -> None:
    parts = [["O"], *([f"{'BI'[tag % 2]}-common", f"{tag}"] for tag in range(1, TAGS))]
    model = made(parts)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    units = edpsgd.per_example.UnitGradients(named, workers=1)
    found = units.backward(model(batch("bert", SAID)))
    loop = []
    for said in SAID:
        gradients = torch.autograd.grad(model(batch("bert", [said])).sum(), list(named.values()))
        loop.append(torch.stack([one.norm() for one in gradients]))
    torch.testing.assert_close(found, torch.stack(loop), rtol=1e-4, atol=1e-6)


def made(parts: list[list[str]]) -> BERT:
    """Its layers have weights that are neither zero nor small."""
    torch.manual_seed(0)
    pieces = len(inputs("bert").tokenizer)
    model = BERT(tiny_configuration(pieces), INTENTS, TAGS, heads=HeadSettings(tag_parts=parts, transitions="bio"))
    model.freeze("encoder")
    for head in (model.intent, model.slots):
        torch.nn.init.normal_(head.weight, std=0.5)
    return model.eval()
