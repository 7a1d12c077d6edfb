"""The attack of the paper: a classifier learns from a shadow model what members look like (Shokri et al. 2017)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Features = npt.NDArray[np.floating[Any]]
CLASSIFIERS = ("boosting", "logistic", "mlp")


def membership(
    features: Features, members: npt.NDArray[np.bool_], target: Features, classifier: str = "boosting", seed: int = 0
) -> npt.NDArray[np.float64]:
    """How likely each utterance of a target is a member, by what the shadow's members look like.

    Args:
        features: of the shadow model's members and non-members, utterances x features.
        members: which of them the shadow was trained on.
        target: features of the target model's candidates; the same features.
        classifier: boosting, logistic or mlp.
        seed: of the classifier.

    Returns:
        The probability of membership, one for each candidate.

    Example:
        >>> known = np.array([[0.9], [0.8], [0.4], [0.3]])
        >>> found = membership(known, np.array([True, True, False, False]), np.array([[0.95], [0.2]]), "logistic")
        >>> bool(found[0] > found[1])
        True
    """
    if features.ndim != 2 or target.ndim != 2 or features.shape[1] != target.shape[1]:
        raise ValueError(
            "features must be utterances x features, as many for the shadow as for the target; got the shapes "
            f"{features.shape} and {target.shape}"
        )
    if members.shape != features.shape[:1] or not members.any() or members.all():
        raise ValueError(
            f"the shadow must have members and non-members: got {len(members)} flags, {int(members.sum())} of them "
            f"members, for {len(features)} utterances"
        )
    model = _classifier(classifier, seed).fit(features, members)
    return np.asarray(model.predict_proba(target)[:, 1], np.float64)


def _classifier(name: str, seed: int) -> Any:
    if name == "boosting":
        return HistGradientBoostingClassifier(max_iter=200, learning_rate=0.05, early_stopping=True, random_state=seed)
    if name == "logistic":
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    if name == "mlp":
        network = MLPClassifier((64, 32), early_stopping=True, max_iter=500, random_state=seed)
        return make_pipeline(StandardScaler(), network)
    raise ValueError(f"classifier must be one of {', '.join(CLASSIFIERS)}, got {name!r}")
