"""PrivateOptimizer: eDP-SGD around any torch optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.profiler import record_function

from edpsgd import agreement, bookkeeping, checkpoints, step_message
from edpsgd._arguments import check_count
from edpsgd.bookkeeping import Bookkeeping, run_record
from edpsgd.checkpoints import Progress
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.compression import check_compression
from edpsgd.distributed.horovod import horovod_broadcast_root
from edpsgd.distributed.launchers import resolve
from edpsgd.ledger.budget import Budget
from edpsgd.ledger.guarantee import Bound
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.selection import Selection
from edpsgd.mechanism import amp, grouping
from edpsgd.mechanism.accumulator import StepAccumulator
from edpsgd.mechanism.clipping import ClipCounter
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.mechanism.noise import GaussianSource
from edpsgd.mechanism.parameters import Layers, find_scales
from edpsgd.mechanism.scale_measurement import ScaleMeasurement
from edpsgd.mechanism.settings import Settings
from edpsgd.mechanism.torch_optimizer import OptimizerWrapper, named_group
from edpsgd.per_example import UnitGradients, WrongGradients
from edpsgd.sampling.base import Batches
from edpsgd.schedules import Decay
from edpsgd.step_message import StepMessage
from edpsgd.validation import optimizers


class PrivateOptimizer(OptimizerWrapper):
    """Wraps a torch optimizer so that every step is differentially private, on one process or many workers.

    Each worker clips the gradient of its micro-batch, divides by the public number of all micro-batches and adds its
    share of Gaussian noise; these are summed over the workers and handed to the wrapped optimizer. After
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
        compression: None, or what gradients are rounded to when they are sent: "fp16" or (torch.distributed only)
            "bf16"; needs per-worker noise.
        verify: "spot" compares the gradients of ``backward(losses)`` with autograd on the first batches and on some
            later ones; "always" on all of them before anything is released, which takes two to three times as long.
        ledger: a file that records every step before it is released; continued if it exists. In memory without.
            Worker 0 writes it, and all workers must name one.
        batches: the sampler that the training draws from, such as ``ShuffledBatches`` or ``PoissonBatches``. What it
            says of its draws is in the ledger, and steps that do not match them are refused. Without one, batching is
            your word.
        budget: ``Budget(epsilon, delta)``; the step that would exceed it raises ``BudgetExhausted`` on all workers.
        selection: ``Selection(mean, ...)`` if this training is one of a random number, of which only the best is
            released: every ε then covers the choice.

    Attributes:
        discarded: how many units, over all workers, held NaN or infinities and counted as zero.

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

    _kept_by_copies = ("_inner", "_named", "_settings", "_collective", "_bookkeeping")

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
        selection: Selection | None = None,
    ) -> None:
        self._collective = resolve(collective)

        def prepare() -> dict[str, Any]:
            optimizers.check_inner(optimizer)
            super(PrivateOptimizer, self).__init__(optimizer)
            self._named = optimizers.named_layers(named_parameters)
            bookkeeping.check_arguments(batches, budget, selection, unit, ledger, self._collective)
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
                divisor=grouping.expected_units(divisor, unit, batches),
                compression=compression,
                verify=verify,
                sensitivity_factor=1.0 if batches is None else batches.reach,
            )
            check_compression(self._collective, compression)
            self._set_up()
            optimizers.check_no_ddp(list(self._layers.parameters.values()))
            run = run_record(self._settings, batches, self._collective.size, selection)
            return agreement.describe_start(run, self._named, self._layers, budget, ledger is not None)

        # All workers fail together: one that raised alone would leave the others waiting.
        consensus.check_alike(consensus.together(self._collective, prepare))
        self._bookkeeping = Bookkeeping(self._collective, ledger, batches, budget)
        self._bookkeeping.begin_run(run_record(self._settings, batches, self._collective.size, selection))

    def _set_up(self) -> None:
        """What a new optimizer and a copy of one have in common."""
        self._progress = Progress()
        self._noise_multiplier = self._settings.noise_at(0)  # of the current epoch
        self._source = GaussianSource(self._settings.seed, self._collective.rank)
        self._clips = ClipCounter()  # of the current epoch
        self._has_begun_step = False
        self._is_ddp_checked = False  # whether parameters were looked for in DDP once more, before they are used
        self._is_inner_state_made = False  # for hvd.broadcast_optimizer_state()
        self._are_losses_checked = False  # whether no loss depends on other examples, says check_losses
        self._wrong: WrongGradients | None = None  # what step() must refuse
        self._lay_out()
        self._start_step()

    # ---------------------------------------------------------------- what it says of itself

    @property
    def ledger(self) -> Ledger:
        """The privacy events so far."""
        return self._bookkeeping.ledger

    @property
    def batches(self) -> Batches | None:
        """The sampler that the training draws from, if there is one."""
        return self._bookkeeping.batches

    @property
    def epoch(self) -> int | None:
        """What set_epoch said last, None before."""
        return self._progress.epoch

    @property
    def discarded(self) -> int:
        """How many units, over all workers, held NaN or infinities and counted as zero."""
        return self._progress.discarded

    @property
    def clip_norm(self) -> float:
        """C. It may be changed between two steps, alike on all workers: the noise follows, so that ε stays as it is."""
        return self._settings.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float) -> None:
        self._check_between_steps("clip_norm was set")
        if clip_norm != self.clip_norm:
            settings = replace(self._settings, clip_norm=clip_norm)
            self._bookkeeping.note(settings.describe())  # if that fails, nothing has changed
            self._settings = settings
            self._start_step()

    @property
    def clip_fraction(self) -> float:
        """The share of this worker's units that were clipped in this epoch; NaN if there were none.

        Per layer, one clipped layer is enough. Empty micro-batches and discarded ones do not count. Only reading it
        waits for the device. It is a diagnostic that no noise covers: it is for the trainer's eyes only, and once it
        was read, a change of ``clip_norm`` is a condition of ε. So it cannot be read once the ledger is closed.
        """
        self._bookkeeping.note_once("clip_fraction_read")
        return self._clips.share()

    def epsilon(self, delta: float) -> Bound:
        """The tightest sound ε of everything in the ledger, with its conditions; cheap to ask after every epoch."""
        return self.ledger.epsilon(delta)

    def note_checked_losses(self) -> None:
        """Says that ``edpsgd.check_losses`` accepted the losses; it calls this by itself."""
        self._are_losses_checked = True

    # ---------------------------------------------------------------- the micro-batches of a step

    def set_epoch(self, epoch: int) -> None:
        """Says that a new pass over the data begins: the noise decays by epochs, and the ledger counts them.

        The sampler begins a pass too or, if a checkpoint of the middle of this epoch was loaded, goes on where it was.
        """
        check_count("epoch", epoch, least=0)
        self._check_between_steps("set_epoch()")
        noise_multiplier = self._settings.noise_at(epoch)  # asked once, so that noise and ledger agree
        self._bookkeeping.open_epoch(epoch)
        self._progress.epoch = epoch
        self._noise_multiplier = noise_multiplier
        self._clips = ClipCounter()
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
        self._accumulator.add_gradient(self._layers.pop_gradients(), self._loss_scale(scaler))

    @torch.no_grad()
    def _accumulate_update(self, was_clipped: torch.Tensor | None) -> None:
        """For Federated: the same for a user's update, which was made within the ball."""
        self._follow_parameters()
        gradients, loss_scale = self._layers.pop_gradients(), self._loss_scale(None)
        self._accumulator.add_gradient(gradients, loss_scale, was_clipped=was_clipped)

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
            units: the number of each example's micro-batch in this call, (B,), if no sampler knows it.
            count: how many micro-batches there are, with ``units``; the last ones may be empty.
            scaler: the GradScaler that scaled the losses, if there is one.
        """
        grouping.check_one_for_each(losses)
        self._follow_parameters()
        self._bookkeeping.note_once("one_pass")
        loss_scale = self._loss_scale(scaler)
        grouping.claim_losses(losses, self)
        try:
            numbers, count = grouping.group_examples(losses, units, count, self._settings.unit, self.batches)
            self._accumulator.add_losses(self._engine, losses, numbers, count, loss_scale)
        except WrongGradients as wrong:  # step() raises it, on all workers
            self.abandon()
            self._wrong = wrong
            if self._settings.verify == "spot" and self._progress.steps > 0:
                # Batches that nobody compared with autograd were released before.
                self._bookkeeping.note_once("wrong_gradients")
        except BaseException:  # some units may be counted, and not in the sum
            grouping.release_losses(losses)
            self.abandon()
            raise
        if self._engine.has_shared_rows and not self._are_losses_checked:
            self._bookkeeping.note_once("shared_rows")
        if self._engine.has_uncompared and self._settings.verify == "always":
            self._bookkeeping.note_once("uncompared")

    def _loss_scale(self, scaler: GradScaler | None) -> torch.Tensor | None:
        """What the losses were multiplied by, None if they were not."""
        scale = self._scaling.scale(scaler, self, self._layers.sum.first_device)
        if scale is not None:
            self._bookkeeping.note_once("loss_scaling")
        return scale

    def abandon(self) -> None:
        """Forgets the micro-batches of the step so far; nothing of them was released."""
        self.zero_grad()
        self._start_step()

    def _start_step(self) -> None:
        """Begins a step without micro-batches."""
        accumulator = StepAccumulator(self._layers, self._settings, self._clips, self._collective.size)
        self._accumulator = accumulator.start()
        self._scaling = amp.LossScaling()
        self._wrong = None

    def _check_between_steps(self, what: str) -> None:
        if self._accumulator.closed:
            raise RuntimeError(f"{what} between accumulate() and step(): finish the step first")

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Closes the last micro-batch, adds noise, sums over the workers, and steps the wrapped optimizer."""
        if closure is not None:
            raise ValueError("step(closure) would evaluate the model inside the step: call backward() before step()")
        if horovod_broadcast_root() is not None:
            self._is_inner_state_made = True
            return self._make_inner_state(list(self._layers.parameters.values()))
        with amp.forgotten_on_failure(self):
            self._take_step()
        return None

    def _take_step(self) -> None:
        """The algorithm: clip, pay, add noise, sum over the workers, update."""
        self._check_scaling()
        self._follow_parameters()
        refusal = self._wrong or self._displaced_step() or self._refusal_of_open_unit()
        self._close_last_unit()
        self._has_begun_step = True
        number = self._progress.steps
        self._progress.steps += 1  # even if the step fails, its noise is not used again
        message = StepMessage(
            self._collective, self._bookkeeping, self._accumulator, number, self.epoch, self._noise_multiplier
        )
        try:
            if self._layers.scales is None:
                self._measure_scales(message, number, refusal)
            else:
                with record_function("edpsgd.ledger"):
                    refusal = self._charge(refusal)
                self._add_noise(number)
                with record_function("edpsgd.allreduce"):
                    discarded = message.sum_gradients(refusal)
                self._count_discarded(discarded, number)
                with record_function("edpsgd.inner_step"):
                    self._update()
        finally:
            self._scaling.report(self, self._accumulator.discarded)
            self._start_step()

    def _check_scaling(self) -> None:
        try:
            self._scaling.check(self)
        except RuntimeError:
            self.abandon()
            raise
        if getattr(self, "found_inf", None) is not None:  # set by GradScaler, also where unscale_() came before
            self._bookkeeping.note_once("loss_scaling")

    def _displaced_step(self) -> Exception | None:
        """Why the step is refused, if this worker has become another one.

        It drops what it has, and sends an empty message of the size that the others expect.
        """
        refusal = self._bookkeeping.displaced()
        if refusal is not None:
            self.zero_grad()
            self._lay_out()
            self._start_step()
        return refusal

    def _refusal_of_open_unit(self) -> Exception | None:
        has_gradients = self._layers.have_gradients()
        return grouping.refusal_of_open_unit(self._settings.unit, self.batches) if has_gradients else None

    def _close_last_unit(self) -> None:
        """Clips what backward left in .grad; without gradients, the units that are missing are empty."""
        if self._layers.have_gradients():
            loss_scale = getattr(self, "grad_scale", None)  # set by GradScaler
            self._accumulator.add_gradient(self._layers.pop_gradients(), loss_scale, is_last=True)
        else:
            self._accumulator.close_empty(grouping.empty_units(self.batches, self._accumulator.closed))

    def _charge(self, refusal: Exception | None) -> Exception | None:
        """Pays, before the sum: no worker has a sum without worker 0's part, which comes after the entry is on disk.

        If the step must not be taken, says why. The worker then sends noise only, and all of them raise an error.
        """
        workers, closed = self._collective.size, self._accumulator.closed
        z = self._settings.effective_noise(self._noise_multiplier, workers, closed, self._layers.scales or [])
        refusal = refusal or self._bookkeeping.pay_step(z, closed, self.epoch)
        if refusal is not None:
            self._layers.sum.clear()
        return refusal

    def _add_noise(self, number: int) -> None:
        """Adds this worker's share of the noise to its sum."""
        self._accumulator.add_noise_(self._source.stream(number), self._noise_multiplier, self._collective.rank)

    def _update(self) -> None:
        """Steps the wrapped optimizer on the noised mean, and on nothing else."""
        self.zero_grad()  # also what a parameter got before it was frozen
        self._layers.hand_over_sum()
        self._step_inner(self._layers.sum.buffers)

    def _measure_scales(self, message: StepMessage, number: int, refusal: Exception | None) -> None:
        """The first step with FirstStepNorms: one small message, no update, no gradient released (section 5)."""
        workers, device = self._collective.size, self._layers.sum.first_device
        trailer_size = consensus.trailer_size(workers)
        measurement = ScaleMeasurement(self._settings.first_step_norms, len(self._layers), trailer_size, device)
        z, closed = measurement.noise_multiplier, self._accumulator.closed
        refusal = refusal or self._bookkeeping.pay_layer_norms(z, closed)
        if refusal is None:
            measurement.add_norms(self._accumulator.norms)
        measurement.add_noise_(self._source.stream(number, "layer norms"), workers)
        self._count_discarded(message.sum_norms(measurement, refusal), number)
        self._progress.scales = measurement.scales(list(self._layers.parameters))
        self._lay_out()

    def _count_discarded(self, discarded: int, number: int) -> None:
        if discarded and not self.discarded:
            step_message.warn_of_discards(discarded, number)
        self._progress.discarded += discarded

    # ---------------------------------------------------------------- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; its parameters must be among the named ones."""
        group, tensors = named_group(param_group)
        optimizers.check_all_named(tensors, self._named)
        self._check_between_steps("add_param_group()")
        added = {id(tensor) for tensor in tensors if tensor.requires_grad}
        names = [name for name, parameter in self._named.items() if id(parameter) in added]
        # A layer without a scale fails before anything changes.
        find_scales(names, self._named, self._settings.layer_scaling, self._progress.scales)
        self._inner.add_param_group(group)
        self._lay_out()
        self._start_step()

    def _lay_out(self) -> None:
        """Finds the layers that are trained now, and makes room for their sum."""
        self._layers = Layers(
            self.param_groups,
            self._named,
            self._settings.layer_scaling,
            self._progress.scales,
            consensus.trailer_size(self._collective.size),
        )
        is_always = self._settings.verify == "always"
        self._engine = UnitGradients(self._layers.parameters, self._collective.size, is_always)

    def _follow_parameters(self) -> None:
        """Notices parameters that were added, frozen, moved or given to DDP since they were laid out."""
        if not self._is_ddp_checked:
            optimizers.check_no_ddp(list(self._layers.parameters.values()))
            self._is_ddp_checked = True
        if not self._layers.fit(self.param_groups):
            if self._accumulator.closed:
                raise RuntimeError("parameters were added, frozen or moved between accumulate() and step()")
            self._lay_out()
            self._start_step()

    # ---------------------------------------------------------------- checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under "edpsgd", ledger, epoch, step counter and measured scales.

        Never the state of a random generator; the seed only if one was given.
        """
        root = horovod_broadcast_root()
        if root is not None and not self._is_inner_state_made:  # broadcast_optimizer_state() asks first, on all workers
            own_state = self._own_state()
            checkpoints.load_from_root(root, self._collective, self._bookkeeping, own_state, self._load_own_state)
        self._is_inner_state_made = False
        return super().state_dict()

    def _own_state(self) -> dict[str, Any]:
        return checkpoints.make_state(self._progress, self._settings, self._bookkeeping)

    def _load_own_state(self, state: dict[str, Any]) -> None:
        checkpoints.check_format(state)
        self._check_between_steps("load_state_dict()")
        self._settings, self._progress = checkpoints.restore(
            state, self._settings, self._bookkeeping, self._collective, self._has_begun_step
        )
        self._source = GaussianSource(self._settings.seed, self._collective.rank)  # without a seed, fresh entropy
        self._noise_multiplier = self._settings.noise_at(self.epoch or 0)
        self._lay_out()
        self._start_step()
