"""Conditions of ε in reports."""

from __future__ import annotations

SECRET = "on condition that the seed is secret, which it is not here"
ONE_PASS = "on condition that examples lie in all batches as in those that were compared with autograd"
SECRET_HERE = "the noise being drawn from secret seeds"
