"""Training jobs, run from the checkout."""
