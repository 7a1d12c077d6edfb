"""Settings that pages name and results files do not hold."""

from __future__ import annotations

from benchmarks.harness.rows.trainings import Flags
from edpsgd import LinearDecay
from tasks.nlu.configuration import Config

# accounting: the training whose ε is computed, and the ε that calibration aims at
EPOCHS, STEPS, DELTA, TARGET = 100, 1000, 1e-5, 1.0
DECAY = LinearDecay(0.02)

LOADED_BATCH = 64  # data_loading: utterances of a worker
RANK_SECONDS = 600  # exposure: what one canary may take on two cores

# the reduced trainings of recipes and of Table 1
SMALL: Flags = {"examples": 800, "hidden": 32, "layers": 1, "dimension": 16, "dropout": 0.0}

# membership: the model that knows its utterances by heart, and the shadow models of the attacks
OVERFITTED = Config(
    task="generated",
    examples=600,
    model="clc",
    hidden=48,
    layers=1,
    dimension=32,
    dropout=0.0,
    epochs=30,
    batch_size=16,
    learning_rate=5e-3,
    private="off",
    tensorboard=False,
    seed=0,
)
SHADOWS = 16
