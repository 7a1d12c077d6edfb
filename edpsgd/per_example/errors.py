"""What is raised where gradients of single examples are not what autograd says."""

NOT_LINEAR_ADVICE = (
    "A gradient that was made so cannot be clipped in one pass with others: take the hook or "
    "function out, or use one backward and accumulate() for each example"
)


class WrongGradients(RuntimeError):
    """Gradients that were relied upon do not agree with autograd."""
