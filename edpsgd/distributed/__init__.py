"""The workers: one process, Horovod or torch.distributed, what they add up and what they must agree on."""

from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve

__all__ = ["Collective", "resolve"]
