"""The privacy card: what a training run released, in plain words and as JSON, from its ledger alone."""

from edpsgd.card.card import NAME, Card, make, stated, write

__all__ = ["NAME", "Card", "make", "stated", "write"]
