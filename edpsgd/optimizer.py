"""PrivateOptimizer: eDP-SGD around any torch optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.profiler import record_function

from edpsgd import bookkeeping, step_message
from edpsgd._arguments import check_count
from edpsgd.bookkeeping import Books
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.compression import check_compression, wire_dtype
from edpsgd.distributed.horovod import horovod_broadcast_root
from edpsgd.distributed.launchers import resolve
from edpsgd.ledger.budget import Budget
from edpsgd.ledger.guarantee import Bound
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.records import RunRecord
from edpsgd.mechanism import accumulator, amp, clipping, layer_scales
from edpsgd.mechanism.accumulator import Contributions, claim_losses, release_losses
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.mechanism.noise import GaussianSource
from edpsgd.mechanism.parameters import Layers, describe_parameters, find_scales
from edpsgd.mechanism.settings import Settings
from edpsgd.mechanism.torch_optimizer import OptimizerWrapper
from edpsgd.per_example import UnitGradients, WrongGradients
from edpsgd.sampling.base import Batches
from edpsgd.schedules import Decay
from edpsgd.step_message import StepMessage
from edpsgd.validation import optimizers


class PrivateOptimizer(OptimizerWrapper):
    """Wraps a torch optimizer so that every step is differentially private, on one process or many workers.

    Each worker clips the gradient of its micro-batch and adds its share of Gaussian noise; the noised gradients are
    summed over the workers, divided by the public number of micro-batches and handed to the wrapped optimizer. After
    ``step()`` the gradients are consumed: ``.grad`` is None, so that nothing can be used twice.

    Args:
        optimizer: the torch optimizer to wrap.
        named_parameters: ``model.named_parameters()``. Every parameter that the optimizer holds must be among them.
        clip_norm: C, the largest norm of a micro-batch's gradient.
        noise_multiplier: z, the noise std over the sensitivity, in epoch 0. 0 switches the noise off.
        noise_decay: None, ``LinearDecay(tau)``, ``ExponentialDecay(tau)`` or any callable epoch -> factor > 0.
        clipping: "flat" clips the whole gradient by one factor, "per_layer" each parameter tensor by its own.
        unit: "micro_batch", "example" if every micro-batch holds exactly one example: half the sensitivity (without
            ``batches``, close each with ``accumulate()`` or use ``backward(losses)``); or "user", which
            ``edpsgd.Federated`` is for.
        layer_scaling: None, public scales by parameter name, or ``FirstStepNorms(...)``.
        noise: "calibrated" for the noise that the multiplier promises, or "paper" for the published algorithm, whose
            real multiplier is smaller and is what the ledger records.
        noise_placement: who adds which noise. "sharded" (the default, and the fastest): each worker noises its own
            1/N of the coordinates; whoever sees one worker's message before the sum sees the rest of it bare, so
            trust the workers and the network between them. "per_worker": every worker noises all coordinates with
            1/N of the variance; c colluding workers know c/N of the noise.
        collective: "auto" (the launcher decides), "horovod", "torch", "local", or an object with the protocol
            ``edpsgd.distributed.Collective``.
        seed: None for operating-system entropy. An int repeats the noise, for tests: ε holds only while it is secret.
        divisor: for unit="example", the public, expected number of examples in a step over all workers.
        compression: None, "fp16" or (torch.distributed only) "bf16" on the wire; needs per-worker noise.
        verify: "spot" compares the gradients of ``backward(losses)`` with autograd on the first batches and on some
            later ones; "always" on all of them before anything is released, which takes about twice the time.
        ledger: a file that records every step before it is released; continued if it exists. In memory without.
            Worker 0 writes it, and all workers must name one.
        batches: the ``ShuffledBatches`` or ``PoissonBatches`` that the training draws from. It vouches for the batching
            in the ledger, and steps that do not match its batches are refused. Without one, batching is your word.
        budget: ``Budget(epsilon, delta)``; the step that would exceed it raises ``BudgetExhausted`` on all workers.

    Attributes:
        discarded: how many micro-batches, over all workers, held NaN or infinities and counted as zero.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = PrivateOptimizer(optimizer, model.named_parameters(), clip_norm=1.0, noise_multiplier=0.8)
        >>> optimizer.set_epoch(0)
        >>> model(torch.ones(8, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.ledger.events[0].steps
        1
    """

    # GradScaler then always calls step(), whatever the gradient holds; step() unscales and discards by itself.
    _step_supports_amp_scaling = True

    _epoch: int | None
    _steps: int
    _measured: dict[str, float] | None  # scales found by FirstStepNorms
    _noise_multiplier: float  # of the current epoch
    _layers: Layers  # what the wrapped optimizer holds and trains
    _parts: Contributions  # the micro-batches of the step so far
    _scaling: amp.LossScaling  # of the step so far
    _wrong: WrongGradients | None  # what step() must refuse
    _is_inner_known: bool  # whether the wrapped optimizer was seen to keep no gradient
    _are_losses_checked: bool  # whether check_losses found that no loss depends on other examples

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        clip_norm: float,
        noise_multiplier: float,
        noise_decay: Decay | None = None,
        clipping: str = "flat",
        unit: str = "micro_batch",
        layer_scaling: Mapping[str, float] | FirstStepNorms | None = None,
        noise: str = "calibrated",
        noise_placement: str = "sharded",
        collective: str | Collective = "auto",
        seed: int | None = None,
        divisor: float | None = None,
        compression: str | None = None,
        verify: str = "spot",
        ledger: str | os.PathLike[str] | None = None,
        batches: Batches | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._collective = resolve(collective)

        def prepare() -> dict[str, Any]:
            optimizers.check_inner(optimizer)
            super(PrivateOptimizer, self).__init__(optimizer)
            self._named = optimizers.named_layers(named_parameters)
            bookkeeping.check_books(batches, budget, unit, ledger, self._collective)
            self._settings = Settings(
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier,
                noise_decay=noise_decay,
                clipping=clipping,
                unit=unit,
                layer_scaling=layer_scaling,
                noise=noise,
                noise_placement=noise_placement,
                seed=seed,
                divisor=divisor if batches is None or unit == "micro_batch" else divisor or batches.expected_batch,
                compression=compression,
                verify=verify,
                reach=1.0 if batches is None else batches.reach,
            )
            check_compression(self._collective, compression)
            self._set_up()
            optimizers.check_no_ddp(list(self._layers.parameters.values()))
            others = {
                "the trained parameters": self._layers.description,
                "budget": repr(budget),
                "whether there is a ledger file": ledger is not None,
            }
            return {**self._run(batches).to_json(), **describe_parameters(self._named), **others}

        # All workers fail together: one that raised alone would leave the others waiting.
        consensus.check_alike(consensus.together(self._collective, prepare))
        self._books = Books(self._collective, ledger, self._run(batches), batches, budget)

    def _run(self, batches: Batches | None) -> RunRecord:
        described = None if batches is None else batches.describe()
        settings = {**self._settings.describe(), "batches": described}
        return RunRecord.from_settings({"workers": self._collective.size, **settings})

    @property
    def ledger(self) -> Ledger:
        """The privacy events so far."""
        return self._books.ledger

    @property
    def batches(self) -> Batches | None:
        """The sampler that vouches for the batching, if there is one."""
        return self._books.batches

    @property
    def epoch(self) -> int | None:
        """What set_epoch said last."""
        return self._epoch

    @property
    def clip_norm(self) -> float:
        """C. It may be changed between two steps, alike on all workers: the noise follows, so that ε stays as it is."""
        return self._settings.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float) -> None:
        if self._parts.closed:
            raise RuntimeError("clip_norm was set between accumulate() and step(): finish the step first")
        self._change_clip_norm(clip_norm)

    def _change_clip_norm(self, clip_norm: float, **marks: bool) -> None:
        if clip_norm != self.clip_norm:
            settings = replace(self._settings, clip_norm=clip_norm)
            self._books.note({**settings.describe(), **marks})  # if that fails, nothing has changed
            self._settings = settings
            self._start_step()

    @property
    def clip_fraction(self) -> float:
        """The share of this worker's micro-batches that were clipped in this epoch; NaN if there were none.

        Per layer, one clipped layer is enough. Empty micro-batches and discarded ones do not count. Only reading it
        waits for the device. It is a diagnostic that no noise covers: it is for the trainer's eyes only, and once it
        was read, a change of ``clip_norm`` is a condition of ε. So it cannot be read once the ledger is closed.
        """
        self._books.note_once("clip_fraction_read")
        return self._clips.share()

    def epsilon(self, delta: float) -> Bound:
        """The tightest sound ε of everything in the ledger, with its conditions; cheap to ask after every epoch."""
        return self.ledger.epsilon(delta)

    def note_checked_losses(self) -> None:
        """Says that ``edpsgd.check_losses`` accepted the losses; it calls this by itself."""
        self._are_losses_checked = True

    # ---------------------------------------------------------------- the algorithm

    def set_epoch(self, epoch: int) -> None:
        """Says that a new pass over the data begins: the noise decays by epochs, and the ledger counts them.

        The sampler begins a pass too or, if a checkpoint of the middle of this epoch was loaded, goes on where it was.
        """
        check_count("epoch", epoch, least=0)
        if self._parts.closed:
            raise RuntimeError("set_epoch() between accumulate() and step(): finish the step first")
        noise_multiplier = self._settings.noise_at(epoch)  # asked once, so that noise and ledger agree
        self._books.open_epoch(epoch)
        self._epoch, self._noise_multiplier, self._clips = epoch, noise_multiplier, clipping.ClipCounter()
        self._start_step()

    @torch.no_grad()
    def accumulate(self, scaler: GradScaler | None = None) -> None:
        """Closes a micro-batch: clips what backward left in .grad, adds it to the step's sum and clears .grad.

        With K − 1 calls before backward and ``step()``, or with K calls before ``step()``, a worker contributes K
        micro-batches to the step; all workers must use the same K. Without gradients it closes an empty micro-batch.

        Args:
            scaler: the GradScaler that scaled the loss, if there is one. A worker without data must call
                ``accumulate(scaler=scaler)`` too before ``scaler.step()``: a GradScaler wants to see something.
        """
        self._follow_parameters()
        self._parts.add(self._layers.take_gradients(), self._loss_scale(scaler))

    @torch.no_grad()
    def _accumulate_update(self, was_clipped: torch.Tensor | None) -> None:
        """For Federated: the same for a user's update, which was made within the ball."""
        self._follow_parameters()
        self._parts.add(self._layers.take_gradients(), self._loss_scale(None), was_clipped=was_clipped)

    def _loss_scale(self, scaler: GradScaler | None) -> torch.Tensor | None:
        scale = self._scaling.scale(scaler, self, self._layers.sum.home)
        if scale is not None:
            self._books.note_once("loss_scaling")
        return scale

    def backward(
        self,
        losses: torch.Tensor,
        units: torch.Tensor | None = None,
        count: int | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Instead of ``losses.mean().backward()``: clips every unit in one pass, and adds it to the step's sum.

        With unit="example" every loss is a unit. With unit="micro_batch" the losses are grouped as the sampler drew
        them (``together=True``), or as ``units`` says; without either they are one micro-batch. It may be called
        several times before ``step()``. ``.grad`` is not used.

        Args:
            losses: one for each example, (B,), not averaged. Each must depend on its own example only.
            units: the number of each example's micro-batch in this call, if no sampler knows it.
            count: how many micro-batches there are, with ``units``; the last ones may be empty.
            scaler: the GradScaler that scaled the losses, if there is one.
        """
        accumulator.check_one_for_each(losses)
        self._follow_parameters()
        self._books.note_once("one_pass")
        loss_scale = self._loss_scale(scaler)
        claim_losses(losses, self)
        try:
            numbers, count = self._books.grouping(losses, units, count, self._settings.unit)
            self._parts.add_units(self._engine, losses, numbers, count, loss_scale)
        except WrongGradients as wrong:  # step() raises it, on all workers
            self.abandon()
            self._wrong = wrong
            if self._settings.verify == "spot" and self._steps > 0:  # batches that nobody compared were released
                self._books.note_once("wrong_gradients")
        except BaseException:  # some units may be counted, and not in the sum
            release_losses(losses)
            self.abandon()
            raise
        if self._engine.has_shared_rows and not self._are_losses_checked:
            self._books.note_once("shared_rows")
        if self._engine.has_uncompared and self._settings.verify == "always":
            self._books.note_once("uncompared")

    def abandon(self) -> None:
        """Forgets the micro-batches of the step so far; nothing of them was released."""
        self.zero_grad()
        self._start_step()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Closes the last micro-batch, adds noise, sums over the workers, and steps the wrapped optimizer."""
        if closure is not None:
            raise ValueError("step(closure) would evaluate the model inside the step: call backward() before step()")
        if horovod_broadcast_root() is not None:
            self._state_made = True
            return self._make_inner_state(list(self._layers.parameters.values()))
        with amp.forgotten_on_failure(self):
            self._take_step()
        return None

    def _take_step(self) -> None:
        """The algorithm: clip, pay, add noise, sum over the workers, update."""
        self._check_scaling()
        self._follow_parameters()
        refusal = self._wrong or self._refusal_of_place() or self._refusal_of_open_example()
        if self._layers.have_gradients():
            self._parts.add(self._layers.take_gradients(), getattr(self, "grad_scale", None), is_last=True)
        else:
            self._parts.add_empty(self._books.empty_units(self._parts.closed))
        self._has_released = True
        number, self._steps = self._steps, self._steps + 1  # even if the step fails, its noise is not used again
        try:
            if self._layers.scales is None:
                self._measure_scales(number, refusal)
            else:
                with record_function("edpsgd.ledger"):
                    refusal = self._charge(refusal)
                self._add_noise(number)
                with record_function("edpsgd.allreduce"):
                    self._send(number, refusal)
                with record_function("edpsgd.inner_step"):
                    self._update()
        finally:
            self._scaling.report(self, self._parts.discarded)
            self._start_step()

    def _check_scaling(self) -> None:
        try:
            self._scaling.check(self)
        except RuntimeError:
            self.abandon()
            raise
        if getattr(self, "found_inf", None) is not None:  # set by GradScaler, also where unscale_() came before
            self._books.note_once("loss_scaling")

    def _refusal_of_place(self) -> Exception | None:
        """A worker that has become another one sends an empty message of the size that the others expect."""
        refusal = self._books.displaced()
        if refusal is not None:
            self.zero_grad()
            self._lay_out()
            self._start_step()
        return refusal

    def _refusal_of_open_example(self) -> Exception | None:
        """Without a sampler nobody knows how many examples are in a gradient that step() finds."""
        is_known = self._settings.unit != "example" or self.batches is not None
        return None if is_known or not self._layers.have_gradients() else RuntimeError(accumulator.OPEN_EXAMPLE)

    def _add_noise(self, number: int) -> None:
        """Adds this worker's share of the noise to its sum."""
        self._parts.add_noise_(self._source.stream(number), self._noise_multiplier, self._collective.rank)

    def _charge(self, refusal: Exception | None) -> Exception | None:
        """Pays, before the sum: no worker has a sum without worker 0's part, which comes after the entry is on disk.

        If the step must not be taken, says why. The worker then sends noise only, and all of them raise an error.
        """
        workers, scales = self._collective.size, self._layers.scales or []
        z = self._settings.effective_noise(self._noise_multiplier, workers, self._parts.closed, scales)
        refusal = refusal or self._books.refusal(z, self._parts.closed, self._epoch)
        refusal = refusal or self._books.charge(z, self._epoch)
        if refusal is not None:
            self._layers.sum.clear()
        return refusal

    def _update(self) -> None:
        """Steps the wrapped optimizer on the noised mean, and on nothing else."""
        self.zero_grad()  # also what a parameter got before it was frozen
        self._layers.hand_over_sum()
        try:
            self._inner.step()
            if not self._is_inner_known:
                optimizers.check_keeps_no_gradient(self._inner, self._layers.sum.wire)
                self._is_inner_known = True
        finally:
            self.zero_grad()

    # ---------------------------------------------------------------- scales measured in the first step

    def _measure_scales(self, number: int, refusal: Exception | None) -> None:
        """The first step with FirstStepNorms: one small message, no update, no gradient released (section 5)."""
        layers, workers = len(self._layers), self._collective.size
        message = torch.zeros(layers + consensus.slots(workers), dtype=torch.float32, device=self._layers.sum.home)
        z = self._settings.first_step_norms.noise_multiplier or 0.0
        refusal = refusal or self._books.refusal_of_layer_norms(z, self._parts.closed)
        refusal = refusal or self._books.charge_layer_norms(z)
        if refusal is None:
            message[:layers] += self._parts.norms
        std = self._settings.first_step_norms.noise_std / math.sqrt(workers)
        self._source.stream(number, "layer norms").add_to(message[:layers], std)
        self._sum_over_workers([message], message[layers:], number, refusal)
        scales = layer_scales.measured_scales(message[:layers].tolist())
        self._measured = dict(zip(self._layers.parameters, scales, strict=True))
        self._lay_out()

    # ---------------------------------------------------------------- the workers

    def _send(self, number: int, refusal: Exception | None) -> None:
        """Replaces the worker's noised part by the noised mean over all workers, compressed on the way if so asked."""
        gradients, dtype = self._layers.sum, wire_dtype(self._settings.compression)
        factor = self._parts.fit_float16_(self._noise_multiplier) if dtype is torch.float16 else 1.0
        self._sum_over_workers(gradients.wire, gradients.tail, number, refusal, dtype)
        gradients.scale_(1.0 / factor)

    def _sum_over_workers(
        self,
        tensors: list[torch.Tensor],
        tail: torch.Tensor,
        number: int,
        refusal: Exception | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The one message of the step, with what the workers must agree on and the discards riding in the tail."""
        is_counted = self._settings.unit == "micro_batch"  # else it follows each worker's draw
        state = {
            "the number of micro-batches in a step": self._parts.closed if is_counted else None,
            "the step counter": number,
            "the epoch": self._epoch,
            "the noise multiplier": self._noise_multiplier,
            "the clip norm": self.clip_norm,
            "the trained parameters": self._layers.description,
        }
        expected = self._settings.divisor if self.batches is None else None
        message = StepMessage(self._collective, self._books, self._parts, expected)
        discarded = message.sum_(tensors, tail, state, refusal, dtype)
        if discarded and not self.discarded:
            step_message.warn_of_discards(discarded, number)
        self.discarded += discarded

    # ---------------------------------------------------------------- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; its parameters must be among the named ones."""
        params = param_group["params"]
        group = {**param_group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}
        tensors = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        optimizers.check_all_named(tensors, self._named)
        if self._parts.closed:
            raise RuntimeError("add_param_group() between accumulate() and step(): finish the step first")
        added = {id(tensor) for tensor in tensors if tensor.requires_grad}
        names = [name for name, p in self._named.items() if id(p) in added]
        find_scales(names, self._named, self._settings.layer_scaling, self._measured)  # fails before anything changes
        self._inner.add_param_group(group)
        self._lay_out()
        self._start_step()

    def _set_up(self) -> None:
        """What a new optimizer and a copy of one have in common."""
        self._source = GaussianSource(self._settings.seed, self._collective.rank)
        self._epoch, self._noise_multiplier = None, self._settings.noise_at(0)
        self._steps = 0
        self._measured = None
        self.discarded = 0
        self._clips = clipping.ClipCounter()
        self._state_made = False
        self._started = False
        self._has_released = False
        self._copies = 0
        self._is_inner_known = False
        self._are_losses_checked = False
        self._lay_out()
        self._start_step()

    def _lay_out(self) -> None:
        tail = consensus.slots(self._collective.size)
        self._layers = Layers(self.param_groups, self._named, self._settings.layer_scaling, self._measured, tail)
        self._engine = UnitGradients(self._layers.parameters, self._collective.size, self._settings.verify == "always")

    def _follow_parameters(self) -> None:
        """Notices parameters that were added, frozen, moved or given to DDP since they were laid out."""
        if not self._started:
            optimizers.check_no_ddp(list(self._layers.parameters.values()))
            self._started = True
        if not self._layers.fit(self.param_groups):
            if self._parts.closed:
                raise RuntimeError("parameters were added, frozen or moved between accumulate() and step()")
            self._lay_out()
            self._start_step()

    def _start_step(self) -> None:
        self._parts = Contributions(self._layers, self._settings, self._clips, self._collective.size)
        self._scaling = amp.LossScaling()
        self._wrong = None

    # ---------------------------------------------------------------- checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under "edpsgd", ledger, epoch, step counter and measured scales.

        Never the state of a random generator; the seed only if one was given.
        """
        root = horovod_broadcast_root()
        if root is not None and not self._state_made:  # broadcast_optimizer_state() asks first, on all workers
            states, moves = zip(*self._collective.gather((self._own_state(), self._books.moves)), strict=True)
            self._books.moves = max(moves)
            consensus.together(self._collective, lambda: self._load_own_state(states[root]))
        self._state_made = False
        return super().state_dict()

    def _own_state(self) -> dict[str, Any]:
        state = {
            "format": 1,
            "epoch": self._epoch,
            "step": self._steps,
            "scales": self._measured,
            "discarded": self.discarded,
            "clip_norm": float(self.clip_norm),
            **self._books.state_dict(),
        }
        return state if self._settings.seed is None else {**state, "seed": self._settings.seed}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if state.get("format") != 1:
            raise ValueError(f"the state has format {state.get('format')!r}, this version reads 1")
        if self._parts.closed:
            raise RuntimeError("load_state_dict() between accumulate() and step(): finish the step first")
        self._books.load_state_dict(state)
        was_seeded = self._settings.seed is not None
        self._settings = replace(self._settings, seed=state.get("seed", self._settings.seed))
        marks = {} if self._has_released else {"clip_norm_restored": True}  # nothing was released under this one
        self._change_clip_norm(state.get("clip_norm", self.clip_norm), **marks)
        if self._settings.seed is not None and not was_seeded:
            self.ledger.begin_branch(self._run(self.batches), "seeded")
        if "copy" in state:
            self._begin_copy(state["copy"])
        self._books.resume()
        self._source = GaussianSource(self._settings.seed, self._collective.rank)  # without a seed, fresh entropy
        self._epoch, self._steps = state["epoch"], state["step"]
        self._noise_multiplier = self._settings.noise_at(self._epoch or 0)
        self._measured, self.discarded = state["scales"], state["discarded"]
        self._lay_out()
        self._start_step()

    def _begin_copy(self, number: int) -> None:
        """What the copy releases is no part of the original's history: it is a run of its own in its ledger."""
        if self._collective.size == 1:
            self.ledger.begin_run(self._run(self.batches))
        else:
            self.ledger.begin_branch(self._run(self.batches), f"copy {number}")

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("_inner", "_named", "_settings", "_collective", "_books")}
        self._copies += 1
        return {**kept, "own": {**self._own_state(), "copy": self._copies}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state.pop("own")
        self.__dict__.update(state)
        super().__setstate__({})
        bookkeeping.check_place(self.batches, self._collective)
        self._set_up()
        self._load_own_state(own)
