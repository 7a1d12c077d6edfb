"""Noise: how it decays over the epochs, and where the Gaussian numbers come from."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

Decay = Callable[[int], float]

_CPU_CHUNK = 1 << 17  # elements that several operations in a row find in the cache


def _check_tau(tau: float) -> None:
    if not (math.isfinite(tau) and tau >= 0):
        raise ValueError(f"tau must be a finite number >= 0, got {tau!r}")


@dataclass(frozen=True)
class LinearDecay:
    """The factor 1/(1 + tau·t) on the noise multiplier of epoch t, counted from 0.

    Example:
        >>> LinearDecay(0.5)(2)
        0.5
    """

    tau: float

    def __post_init__(self) -> None:
        _check_tau(self.tau)

    def __call__(self, epoch: int) -> float:
        """The factor of an epoch."""
        return 1.0 / (1.0 + self.tau * epoch)


@dataclass(frozen=True)
class ExponentialDecay:
    """The factor exp(−tau·t) on the noise multiplier of epoch t, counted from 0.

    Example:
        >>> round(ExponentialDecay(0.5)(2), 6)
        0.367879
    """

    tau: float

    def __post_init__(self) -> None:
        _check_tau(self.tau)

    def __call__(self, epoch: int) -> float:
        """The factor of an epoch."""
        return math.exp(-self.tau * epoch)


def parse_decay(text: str) -> Decay | None:
    """A decay from its name: none, linear:TAU or exponential:TAU.

    Example:
        >>> parse_decay("linear:0.05")
        LinearDecay(tau=0.05)
    """
    name, colon, tau = text.partition(":")
    if text == "none":
        return None
    kinds: dict[str, Callable[[float], Decay]] = {"linear": LinearDecay, "exponential": ExponentialDecay}
    if name not in kinds or not colon:
        raise ValueError(f"decay must be none, linear:TAU or exponential:TAU, got {text!r}")
    try:
        return kinds[name](float(tau))
    except ValueError:
        raise ValueError(f"decay must have a finite TAU >= 0, as in {name}:0.05, got {text!r}") from None


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
        self._process = os.getpid()
        seed = self.seed
        self._secret = secrets.token_bytes(32) if seed is None else hashlib.sha256(str(seed).encode()).digest()

    def stream(self, step: int, purpose: str = "gradient") -> GaussianStream:
        """The noise of one step; two purposes in one step get independent noise."""
        if self._process != os.getpid():
            self._draw_secret()
        key = hashlib.blake2b(f"{purpose}/{self.rank}/{step}".encode(), key=self._secret, digest_size=16).digest()
        return GaussianStream(key, self._scratch)


class GaussianStream:
    """A sequence of Gaussian numbers that is consumed by adding it to tensors."""

    def __init__(self, key: bytes, scratch: bytearray) -> None:
        self._key = key
        self._scratch = scratch
        self._cipher: CipherContext | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_to(self, target: torch.Tensor, std: float) -> None:
        """Adds N(0, std²) to every element of a contiguous tensor, in place."""
        if std == 0.0:
            return
        for part in chunks(target.view(-1)):
            if on_cpu(part):
                self._add_on_cpu(part, std)
            else:
                noise = torch.randn(
                    part.shape, dtype=precision(part), device=part.device, generator=self._generator(part.device)
                )
                part.add_(noise, alpha=std)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            seed = int.from_bytes(hashlib.sha256(self._key + str(device).encode()).digest()[:8], "little", signed=True)
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]

    def _add_on_cpu(self, target: torch.Tensor, std: float) -> None:
        """Box and Muller's method on 62 random bits for the radius (tails to 9.2 σ) and 32 for the angle.

        Drawn in the precision of the target: coarser noise would leave the low bits of the gradient bare.
        """
        half = (target.numel() + 1) // 2
        bits = self._random_bits(3 * half)
        dtype = precision(target)
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
        if self._cipher is None:
            self._cipher = Cipher(algorithms.AES(self._key), modes.CTR(bytes(16))).encryptor()
        self._cipher.update_into(memoryview(_ZEROS)[: 4 * count], self._scratch)
        return torch.frombuffer(self._scratch, dtype=torch.int32, count=count)


_ZEROS = bytes(6 * _CPU_CHUNK + 64)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On another device, without waiting for it; but what comes to the CPU must have arrived before it is read."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def precision(tensor: torch.Tensor) -> torch.dtype:
    """In which sums and noise are computed: single, or what the tensor has if that is more."""
    return torch.promote_types(tensor.dtype, torch.float32)


def on_cpu(tensor: torch.Tensor) -> bool:
    """CPUs have a cache to stay in, other devices kernels to launch as few of as possible."""
    return tensor.device.type == "cpu"


def chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces that several operations in a row can work on: cache-sized on CPUs, large elsewhere."""
    yield from torch.split(flat, _CPU_CHUNK if on_cpu(flat) else 1 << 26)
