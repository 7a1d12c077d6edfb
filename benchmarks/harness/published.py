"""Figures of Dupuy et al. 2021, by model and corpus."""

from __future__ import annotations

ERROR_RATES = {  # SER of plain training in %, Table 1
    ("clc", "atis"): 6.3,
    ("clc", "snips"): 13.0,
    ("clc", "nlu-eval"): 26.7,
    ("bert", "atis"): 5.4,
    ("bert", "snips"): 12.7,
    ("bert", "nlu-eval"): 24.1,
}
ATTACK_AUCS = {  # AUC of the attack on plain training in %, Table 1
    ("clc", "atis"): 67.5,
    ("clc", "snips"): 70.6,
    ("clc", "nlu-eval"): 65.3,
    ("bert", "atis"): 56.1,
    ("bert", "snips"): 65.3,
    ("bert", "nlu-eval"): 63.6,
}
CHANGES = {  # by decay: changes of SER and AUC in %, log10 ε; Table 1
    ("clc", "atis"): {
        "none": (-12.9, -8.26, 4.4),
        "linear": (-10.6, -11.6, 5.8),
        "exponential": (-11.9, -11.3, 24.4),
    },
    ("clc", "snips"): {
        "none": (-1.8, -2.5, 3.1),
        "linear": (-10.3, 1.8, 6.5),
        "exponential": (-6.7, 4.4, 17.4),
    },
    ("clc", "nlu-eval"): {
        "none": (-0.7, -1.4, 2.0),
        "linear": (3.6, -7.6, 2.7),
        "exponential": (1.4, -4.6, 22.1),
    },
    ("bert", "atis"): {
        "none": (1.3, -2.5, 5.9),
        "linear": (-9.7, -5.2, 6.3),
        "exponential": (-4.1, -5.8, 11.1),
    },
    ("bert", "snips"): {
        "none": (-21.5, -8.3, 2.7),
        "linear": (-20.3, -9.2, 2.3),
        "exponential": (-7.1, -8.3, 2.7),
    },
    ("bert", "nlu-eval"): {
        "none": (-2.4, -7.6, 2.2),
        "linear": (4.6, -11.6, 1.7),
        "exponential": (0.3, -9.5, 2.3),
    },
}
EPOCH_RATIOS = {  # time over SGD: vanilla DP-SGD, eDP-SGD; Table 2
    ("clc", "ATIS"): (2.1, 1.04),
    ("clc", "SNIPS"): (5.1, 1.01),
    ("clc", "NLU-EVAL"): (7.3, 1.03),
    ("bert", "ATIS"): (13.0, 1.29),
    ("bert", "SNIPS"): (22.8, 1.52),
    ("bert", "NLU-EVAL"): (29.2, 1.62),
}
