"""A run that another one begins with, usually on public utterances: its encoder is taken, and its heads are not.

What it was trained on is in the new model too, and the new run's ε says nothing of it. The new card names it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from edpsgd import card, files
from edpsgd.ledger.guarantee import format_epsilon
from models.bert import BERT
from models.clc import CLC
from models.frozen_clc import FrozenCLC
from models.heads import HeadSettings, IntentSlotModel
from tasks.common import progress
from tasks.nlu import configuration, run_folder
from tasks.nlu.configuration import Config
from tasks.nlu.run_folder import Parts

_FILE, _CARD = "earlier_run.json", "earlier_run_card.md"
_HEADS = ("intent.", "slots.", "crf.")


@dataclass(frozen=True)
class EarlierRun:
    """What its folder says of it.

    Attributes:
        name: of the folder, without the way to it.
        task: what it was trained on.
        epsilon: of its own utterances, at ``delta``; None if it was trained without privacy.
        delta: of that.
    """

    name: str
    task: str
    epsilon: float | None
    delta: float | None

    def statement(self) -> str:
        """For the card of the run that begins with it."""
        if self.epsilon is None:
            protection = "without privacy"
        else:
            protection = f"with ε = {format_epsilon(self.epsilon)} at δ = {self.delta:g}, of which {_CARD} has the card"
        return f"the utterances of the run that this one began with: {self.name}, trained on {self.task} {protection}"


def read(folder: str | Path) -> tuple[Parts, EarlierRun]:
    """The model of a run that has ended, and what its folder says of it."""
    folder = Path(folder)
    run_folder.check_ended(folder)
    parts = run_folder.load(folder)
    settings = configuration.read_file(folder / "config.yaml")
    lines = files.read_text(folder / progress.METRICS, files.LARGE).splitlines()
    epsilon = files.parse_json(lines[-1]).get("epsilon")
    return parts, EarlierRun(folder.name, str(settings["task"]), epsilon, settings["delta"] if epsilon else None)


def check_kind(config: Config, model: IntentSlotModel) -> None:
    """Refuses settings that do not go with the model of an earlier run, which brings its own words and sizes."""
    kind = "bert" if isinstance(model, BERT) else "clc"
    if kind != config.model:
        raise ValueError(f"the run {config.init_from} is a {kind}: begin with it by --model {kind}")
    usual = Config(private="off")
    for name in ("vectors", "pretrained", "vocabulary", "train_vectors", "dimension", "hidden", "layers"):
        if getattr(config, name) != getattr(usual, name):
            raise ValueError(f"{name} comes from the run {config.init_from}: leave it out")
    if isinstance(model, FrozenCLC):
        raise ValueError(f"the run {config.init_from} trained heads alone, and has nothing to begin with")
    if isinstance(model, BERT) and model.adapters:
        raise ValueError(f"the encoder of {config.init_from} has adapters: begin with a run without them")


def check_other_data(config: Config) -> None:
    """Refuses a private run on the data of the earlier one: its ε would say nothing of what that learned of them."""
    before = Config(**configuration.read_file(Path(config.init_from or "", "config.yaml")))
    if config.private != "off" and _has_same_data(before, config):
        raise ValueError(
            f"the run {config.init_from} was trained on these data, and ε would not cover that: begin with a run on "
            "public ones"
        )


def _has_same_data(one: Config, other: Config) -> bool:
    """Whether two jobs read the same place, or generate some of the same utterances."""
    if one.task != other.task:
        return False
    if one.task == "generated":  # more of them begin with the same ones
        return one.data_seed == other.data_seed and one.domain_names == other.domain_names
    return Path(one.data or "").resolve() == Path(other.data or "").resolve()


def with_new_heads(clc: CLC, config: Config, intents: int, tags: int, heads: HeadSettings) -> CLC:
    """The same but for its heads."""
    dropout = 0.4 if config.dropout is None else config.dropout
    settings = {**clc.settings(), "dropout": dropout, "word_dropout": config.word_dropout, "heads": heads}
    model = CLC(**settings, intents=intents, tags=tags)
    kept = {name: tensor for name, tensor in clc.state_dict().items() if not name.startswith(_HEADS)}
    model.load_state_dict(kept, strict=False)
    return model


def save(folder: Path, earlier: str) -> None:
    """What the new run folder keeps of the earlier one: what it was, and its card."""
    _, about = read(earlier)
    files.write_text(folder / _FILE, json.dumps(asdict(about), indent=1))
    page = Path(earlier, f"{card.NAME}.md")
    if page.exists():
        files.write_text(folder / _CARD, files.read_text(page))


def not_covered(folder: Path) -> list[str]:
    """What the card of a run says of the one that it began with; nothing if there is none."""
    if not (folder / _FILE).exists():
        return []
    return [EarlierRun(**files.read_json(folder / _FILE)).statement()]
