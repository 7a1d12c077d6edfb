"""Samplers whose steps are secret, independent draws: key, fork and copy (privacy.md sections 3 and 7)."""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import Any

from edpsgd.sampling.base import Batches


class RandomDraws(Batches):
    """Samplers whose steps are independent, secret draws, which must never come again unless a seed was given."""

    _process: int  # the one that may draw

    @property
    def _is_common(self) -> bool:
        """Whether all workers must draw the same, from the secret of worker 0."""
        raise NotImplementedError

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        self._process = os.getpid()
        return super()._prepare()[0], self._secret if self._is_common else None

    @property
    def common_draws(self) -> str | None:
        """A digest of what the draws follow from, where it must be alike on all workers."""
        return hashlib.blake2b(self._key, digest_size=8).hexdigest() if self._is_common else None

    def _epoch_key(self) -> bytes:
        # A pass over an epoch that was seen before draws anew, as the accounting wants independent steps; without a
        # seed, also what is run again after a checkpoint was loaded.
        what = f"pass {self.passes}"
        if self.seed is None:
            what += f", move {self.moves}"
        return hashlib.blake2b(what.encode(), key=self._secret, digest_size=32).digest()

    def _check_process(self) -> None:
        """Takes another secret if this process was forked: it must not draw the same as the one before."""
        if self._process != os.getpid():
            self._renew_secret()

    def _renew_secret(self) -> None:
        """Lets this process or copy draw by itself; with a seed it draws the same again."""
        self._process = os.getpid()
        if self.seed is None:
            if self._is_common and self._workers > 1:
                name = type(self).__name__
                raise RuntimeError(f"workers cannot agree on the draws of a copy of {name}: make a new one")
            self._secret = secrets.token_bytes(32)
        self._key = self._epoch_key()

    def __getstate__(self) -> dict[str, Any]:
        secret = ("_secret", "_key") if self.seed is None else ()
        return {name: value for name, value in self.__dict__.items() if name not in secret}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew_secret()
