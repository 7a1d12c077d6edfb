"""How a job draws its batches."""

from __future__ import annotations

from collections.abc import Sized

import edpsgd
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.base import Batches
from tasks.nlu.configuration import Config


def make_batches(config: Config, data: int | Sized, collective: Collective) -> Batches:
    """The sampler of a job. Single examples are drawn as many as a micro-batch would hold.

    Given the data and not only their number, it compares their order between the workers.
    """
    examples = data if isinstance(data, int) else len(data)
    size, number = config.batch_size, config.micro_batches  # of one worker in a step
    together = config.private == "edp" and config.in_one_pass
    if config.sampling == "poisson" and config.private != "off":
        rate = collective.size * size * number / examples
        if rate > 1:
            raise ValueError(
                f"a step takes {collective.size * size * number} utterances ({collective.size} workers x micro_batches "
                f"{number} x batch_size {size}), and there are {examples} to draw from: choose a smaller batch_size"
            )
        unit = "example" if config.private == "example" else "micro_batch"
        return edpsgd.PoissonBatches(
            data,
            rate,
            unit=unit,
            micro_batches=number,
            together=together,
            collective=collective,
            seed=config.seed,
        )
    if config.private == "example":  # every example is a micro-batch of its own
        size, number = 1, size
    return edpsgd.ShuffledBatches(
        data, size, micro_batches=number, together=together, collective=collective, seed=config.seed
    )
