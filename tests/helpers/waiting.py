"""Horovod workers that share few cores."""

from __future__ import annotations

import time

NAP = 0.001  # seconds, as long as Horovod's own background thread sleeps


def sleep_while_horovod_works() -> None:
    """Makes this process sleep until an operation of Horovod's has ended, and only then fetch its result.

    Horovod's own wait is a loop around sched_yield(). With more workers than cores such loops take
    the time from the threads that would end them: an operation takes three times as long, and four
    times the processor time. What an operation does is the same.
    """
    from horovod.torch import mpi_ops

    library = mpi_ops.mpi_lib
    fetch = library.horovod_torch_wait_and_clear

    def wait_and_fetch(handle: int) -> None:
        while not library.horovod_torch_poll(handle):
            time.sleep(NAP)
        fetch(handle)

    library.horovod_torch_wait_and_clear = wait_and_fetch
