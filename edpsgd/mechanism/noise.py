"""Gaussian noise: independent numbers for every worker and step, drawn from one secret (privacy.md section 3)."""

from __future__ import annotations

import hashlib
import math
import os
import secrets

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from edpsgd import tensors


class GaussianSource:
    """Independent Gaussian noise for every (rank, step), from one secret (privacy.md section 3).

    Without a seed the secret is 256 bits from the operating system, different on every worker and in every forked
    process, and it is never stored: copies and checkpoints of whatever holds a source draw a new one. With a seed the
    noise can be repeated, and is private only as long as the seed is secret.

    On CPUs the numbers come from AES in counter mode, which nobody can predict without the secret; other devices use
    torch's own generator there, started from 64 bits of the secret. (torch's CPU generator would be slower, and
    starts from only 32 bits: few enough to try them all, and to meet the same noise twice in a long run.)
    """

    def __init__(self, seed: int | None, rank: int) -> None:
        self.seed = seed
        self.rank = rank
        self._scratch = bytearray(len(_ZEROS))
        self._draw_secret()

    def _draw_secret(self) -> None:
        """A secret of this process: a fork that kept its parent's would repeat the parent's noise."""
        self._process = os.getpid()
        if self.seed is None:
            self._secret = secrets.token_bytes(32)
        else:
            self._secret = hashlib.sha256(str(self.seed).encode()).digest()

    def stream(self, step: int, purpose: str = "gradient") -> GaussianStream:
        """The noise of one step; two purposes in one step get independent noise.

        Args:
            step: its number. One that comes again gets the same noise again, which must not be released twice.
            purpose: what the noise is for.
        """
        if self._process != os.getpid():
            self._draw_secret()
        key = hashlib.blake2b(f"{purpose}/{self.rank}/{step}".encode(), key=self._secret, digest_size=16).digest()
        return GaussianStream(key, self._scratch)


class GaussianStream:
    """A sequence of Gaussian numbers; adding them to a tensor uses them up.

    Args:
        key: 16 bytes from which all numbers follow.
        scratch: memory for random bits, which streams of one source share.
    """

    def __init__(self, key: bytes, scratch: bytearray) -> None:
        self._key = key
        self._scratch = scratch
        self._cipher: CipherContext | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_to(self, target: torch.Tensor, std: float) -> None:
        """Adds N(0, std²) to every element of a contiguous tensor, in place."""
        if std == 0.0:
            return
        for part in tensors.chunks(target.view(-1)):
            if tensors.on_cpu(part):
                self._add_on_cpu(part, std)
            else:
                noise = torch.randn(
                    part.shape,
                    dtype=tensors.precision(part),
                    device=part.device,
                    generator=self._generator(part.device),
                )
                part.add_(noise, alpha=std)

    def _generator(self, device: torch.device) -> torch.Generator:
        """A generator of torch on a device; each device of a stream has other numbers."""
        if device not in self._generators:
            digest = hashlib.sha256(self._key + str(device).encode()).digest()
            seed = int.from_bytes(digest[:8], "little", signed=True)
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]

    def _add_on_cpu(self, target: torch.Tensor, std: float) -> None:
        """Box and Muller's method on 62 random bits for the radius (tails to 9.2 σ) and 32 for the angle.

        With u and v uniform between 0 and 1, √(−2·ln u) is the radius and 2π·v the angle of a point whose coordinates
        are two independent normal numbers. They are drawn in the precision of the target: coarser noise would leave
        the low bits of the gradient bare.
        """
        half = (target.numel() + 1) // 2
        bits = self._random_bits(3 * half)
        dtype = tensors.precision(target)
        # u: 31 high bits, and 31 low ones behind them, in the middle of the smallest step so that it is not 0.
        radius = bits[:half].bitwise_and_(0x7FFFFFFF).to(dtype)
        fraction = bits[half : 2 * half].bitwise_and_(0x7FFFFFFF).to(dtype)
        radius.add_(fraction.add_(0.5), alpha=2.0**-31).mul_(2.0**-31)
        radius.clamp_(max=1.0 - torch.finfo(dtype).eps / 2)  # rounded to 1, it would be no noise at all
        radius.log_().mul_(-2.0).sqrt_()
        angle = fraction.copy_(bits[2 * half :]).mul_(math.pi * 2.0**-31)
        rest = target.numel() - half
        target[:half].addcmul_(radius, angle.cos(), value=std)
        target[half:].addcmul_(radius[:rest], angle.sin_()[:rest], value=std)

    def _random_bits(self, count: int) -> torch.Tensor:
        """So many integers of 32 random bits, in memory that the next call overwrites."""
        if self._cipher is None:
            self._cipher = Cipher(algorithms.AES(self._key), modes.CTR(bytes(16))).encryptor()
        self._cipher.update_into(memoryview(_ZEROS)[: 4 * count], self._scratch)
        return torch.frombuffer(self._scratch, dtype=torch.int32, count=count)


# Encrypted, they are the random bits: three words of four bytes for two numbers of a chunk.
_ZEROS = bytes(6 * tensors.CPU_CHUNK + 64)
