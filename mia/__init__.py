"""Attacks and audits: what a trained model tells about its training data. Run from the checkout."""
