"""For each operation that takes a parameter: what it adds to the units' gradients of that.

A rule reads the activations that autograd saved of the operation, the output gradient that it
received, and to which unit each row of it belongs. Parameters that go into an operation without a
rule are left to autograd, one unit at a time (``fallback``).

A rule for another operation is one more entry in the table of one of these modules.
"""

from __future__ import annotations

from edpsgd.per_example.graph import result_metadata
from edpsgd.per_example.rules import elementwise, lookups, lstm, products
from edpsgd.per_example.rules.rule import Rule
from edpsgd.per_example.uses import Use

__all__ = ["RULES", "Rule", "find_rule"]

RULES: dict[str, Rule] = {
    **products.RULES,
    **lookups.RULES,
    **elementwise.RULES,
    **lstm.RULES,
}


def find_rule(use: Use) -> Rule | None:
    """The rule that serves a use, if there is one."""
    rule = RULES.get(use.node.name())
    # No rule conjugates factors, or knows that a real parameter takes the real part alone.
    is_complex = any(result.dtype.is_complex for result in result_metadata(use.node))
    if rule is None or is_complex:
        return None
    if use.is_reshaped and (use.is_turned or not rule.takes_any_shape):
        return None
    return rule if rule.fits(use) else None
