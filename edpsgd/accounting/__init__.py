"""From noise multipliers to ε, and from ε to the noise that it needs (privacy.md section 7).

A noise multiplier is the noise's standard deviation over the sensitivity, and lists of them have one entry per epoch.
Noise of multiplier 0 gives an infinite ε, and so does whatever cannot be computed: a bound that is wrong must be wrong
upwards.
"""

from edpsgd.accounting.calibration import (
    calibrate,
    calibrate_fixed_size,
    calibrate_selected,
    decay_factors,
    scale_to_target,
)
from edpsgd.accounting.gaussian import gaussian_epsilon, zcdp_epsilon, zcdp_rho
from edpsgd.accounting.pld import Composition, Steps
from edpsgd.accounting.sampled import (
    compose,
    fixed_size_epsilon,
    moments_epsilon,
    moments_of,
    poisson_epsilon,
    rdp_epsilon,
)
from edpsgd.accounting.selection import TrialLaw, selected_epsilon

__all__ = [
    "Composition",
    "Steps",
    "TrialLaw",
    "calibrate",
    "calibrate_fixed_size",
    "calibrate_selected",
    "compose",
    "decay_factors",
    "fixed_size_epsilon",
    "gaussian_epsilon",
    "moments_epsilon",
    "moments_of",
    "poisson_epsilon",
    "rdp_epsilon",
    "scale_to_target",
    "selected_epsilon",
    "zcdp_epsilon",
    "zcdp_rho",
]
