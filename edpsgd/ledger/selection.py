"""The best of a random number of trainings: what its ledger says of the choice, and what that costs.

ε of such a ledger covers the choice. All that the ledger holds counts as a part of the training that was chosen, also
what came later: that costs more than it would beside it, never less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edpsgd import accounting
from edpsgd._arguments import check_choice, check_number
from edpsgd.accounting import Steps, TrialLaw
from edpsgd.ledger.events import LedgerError, is_int, is_noise
from edpsgd.ledger.typed_record import TypedRecord, constructor_arguments, refusal

SCORES = ("public", "noisy", "exact")
_MOST = 2**31  # steps of a pass, and passes


class PlannedSteps(NamedTuple):
    """Alike passes of a training that could have been drawn.

    Attributes:
        noise_multiplier: of the steps.
        sampling_rate: of Poisson sampling; None if every example is in one step of a pass.
        steps: of a pass.
        passes: how many there are.
    """

    noise_multiplier: float
    sampling_rate: float | None
    steps: int
    passes: int

    def releases(self) -> Steps:
        """What they cost: a pass in which every example is in one step is one release."""
        if self.sampling_rate is None:
            return Steps(self.noise_multiplier, 1.0, self.passes)
        return Steps(self.noise_multiplier, self.sampling_rate, self.steps * self.passes)

    def every_step(self) -> Steps:
        """What they would cost if every example were in every step."""
        return Steps(self.noise_multiplier, 1.0, self.steps * self.passes)

    @classmethod
    def parse(cls, data: object) -> PlannedSteps:
        """Of the JSON of a file; a LedgerError if they cannot be."""
        if not isinstance(data, Mapping) or data.keys() != set(cls._fields):
            raise refusal("candidates")
        found = cls(**data)
        rate = found.sampling_rate
        counts = (found.steps, found.passes)
        is_possible = is_noise(found.noise_multiplier) and all(is_int(one) and 0 <= one <= _MOST for one in counts)
        if not is_possible or not (rate is None or (is_noise(rate) and rate <= 1)):
            raise refusal("candidates")
        return found


Candidate = tuple[PlannedSteps, ...]


@dataclass(frozen=True, kw_only=True)
class Selection(TypedRecord):
    """Says that a training is one of a random number of them, of which only the best is released.

    The number is drawn from a public law, independently of the data, and is told nobody, as nothing of the other
    trainings is. All trainings of one tuning are given the same.

    Attributes:
        mean: of the number of trainings.
        shape: of its law: 1 for the geometric one, 0 for the logarithmic one (``accounting.TrialLaw``).
        score: by what the best is chosen. "public": measured on public data, or without any. "noisy": with Gaussian
            noise of ``score_noise``, on private data. "exact": on private data without noise, which nothing covers.
        score_noise: the noise's standard deviation over how far one example can move the score, also if it is replaced.
        held_out: whether a noisy score is measured on examples that no training uses, and each example decides by
            itself whether it is one of them: then an example is in a training or in the score, and pays for one.
        candidates: if each training draws its settings from several, what all of them would cost.
        id: of the tuning: another one of the same settings has another.

    Example:
        >>> Selection(mean=10.0, score="noisy", score_noise=5.0).law
        TrialLaw(mean=10.0, shape=1.0)
    """

    mean: float
    shape: float = 1.0
    score: str = "public"
    score_noise: float | None = None
    held_out: bool = False
    candidates: tuple[Candidate, ...] = ()
    id: str = ""

    def __post_init__(self) -> None:
        TrialLaw(self.mean, self.shape)
        check_choice("score of a Selection", self.score, SCORES)
        if (self.score_noise is not None) != (self.score == "noisy"):
            raise ValueError("score_noise of a Selection belongs to score='noisy', and to no other")
        if self.score_noise is not None:
            check_number("score_noise of a Selection", self.score_noise, 0.0, strict=True)
        super().__post_init__()
        if self.held_out and self.score != "noisy":
            raise ValueError(f"held_out of a Selection is for score='noisy', got {self.score!r}")

    @property
    def law(self) -> TrialLaw:
        """Of the number of trainings."""
        return TrialLaw(float(self.mean), float(self.shape))

    @classmethod
    def from_settings(cls, settings: object) -> Selection:
        """Of the JSON of a file; a LedgerError says what no run can have written."""
        if not isinstance(settings, Mapping):
            raise LedgerError("the selection of a run must have names and values")
        arguments = constructor_arguments(cls, settings)
        candidates = arguments.get("candidates", [])
        if "mean" not in arguments or not isinstance(candidates, list | tuple):
            raise refusal("selection")
        arguments["candidates"] = tuple(_candidate(one) for one in candidates)
        try:
            return cls(**arguments)
        except LedgerError:
            raise
        except (ValueError, OverflowError):
            raise refusal("selection") from None

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data."""
        data = self._recorded()
        if self.candidates:
            data["candidates"] = [[planned._asdict() for planned in one] for one in self.candidates]
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_settings, (self.to_json(),)


def _candidate(data: object) -> Candidate:
    if not isinstance(data, list | tuple):
        raise refusal("candidates")
    return tuple(PlannedSteps.parse(one) for one in data)


def epsilon_of_best(
    selection: Selection,
    own: Sequence[Steps],
    delta: float,
    *,
    fixed_size: bool = False,
    every_step: bool = False,
    distance: float = 1.0,
) -> float:
    """ε of the best of the trainings (privacy.md section 15).

    Args:
        selection: how it is chosen.
        own: the releases of the training itself; what it and the candidates cost most counts.
        delta: the δ to find ε for.
        fixed_size: whether the steps are rounds of a fixed size.
        every_step: whether every example may be in every step of a candidate.
        distance: how many times further apart the neighbours are than what the noise multipliers are for.
    """
    trials = [list(own)]
    for candidate in selection.candidates:
        trials.append([planned.every_step() if every_step else planned.releases() for planned in candidate])
    trials = [[step._replace(noise_multiplier=step.noise_multiplier / distance) for step in trial] for trial in trials]
    if selection.score_noise is None:
        return accounting.selected_epsilon(trials, delta, selection.law, fixed_size=fixed_size)
    score = Steps(float(selection.score_noise), 1.0, 1)
    if not selection.held_out:
        together = [[score, *trial] for trial in trials]
        return accounting.selected_epsilon(together, delta, selection.law, fixed_size=fixed_size)
    of_training = accounting.selected_epsilon(trials, delta, selection.law, fixed_size=fixed_size)
    of_score = accounting.selected_epsilon([[score]], delta, selection.law)
    return max(of_training, of_score)


def in_words(selection: Selection) -> str:
    """How the training was chosen, in a few words: for the method of a bound."""
    return f"best of a random number of trainings, {selection.mean:g} on average"
