"""When and on what a training chooses its support by gradient (SIFT, RoSA): in Axolotl's Trainer, before the first step
that trains the sparse part.

The batches come out of the Trainer's own data loader, so they are the training's records with its template, masking,
packing and collator. Everything is drawn from the config's seed, and every generator is put back: what follows is what
would have followed.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from accelerate.data_loader import DataLoaderDispatcher
from axolotl.utils.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from ..engines.processes import Processes
from ..method.gradient_scores import passes
from ..method.scores import SCORES
from ..tuner.gradient import await_no_more, choose_supports, hold_values, sparse_layers
from .callbacks import LogCost
from .verify import check_same_everywhere

LOG = get_logger(__name__)

IGNORED = -100  # a label that no loss counts


class ChooseByGradient(TrainerCallback):
    """Chooses the support in the first step that trains the sparse part; until then U is kept at 0.

    A support that a checkpoint brought is left as it is. In a checkpoint that was written before there is none yet, and
    a run that goes on from there chooses it when its step comes.

    Args:
        trainer: an Axolotl trainer.
        processes: of the run; each takes the gradient of its own part of every batch, and all choose from the sums.
        seed: of the batches.
        cost: is told how long it took.
    """

    def __init__(self, trainer: Any, processes: Processes, seed: int, cost: LogCost | None = None) -> None:
        self._trainer, self._processes, self._seed, self._cost = trainer, processes, seed, cost
        self._release: Any = None

    @property
    def _config(self) -> Any:
        return self._trainer.model.peft_config["default"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        config = self._config
        if not config.awaits_gradient or not sparse_layers(self._trainer.model):
            return
        warmup = config.low_rank_warmup_steps
        if state.max_steps <= warmup:
            raise ValueError(
                f"low_rank_warmup_steps: {warmup} leaves none of this run's {state.max_steps} steps to the sparse "
                "part; lower it."
            )
        await_no_more(self._trainer.model)
        if state.global_step < warmup:
            self._release = hold_values(self._trainer.model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        config = self._config
        if not config.awaits_gradient or state.global_step < config.low_rank_warmup_steps:
            return
        layers = {layer.supra_layer: layer for layer in sparse_layers(self._trainer.model)}
        if not layers:
            return
        start = time.perf_counter()
        with self._processes.synchronized("choosing the supports by gradient"), _seeded(self._seed):
            batches = self._batches(config.gradient_batches)
            choose_supports(
                self._trainer.model,
                batches,
                self._loss,
                sum_processes=self._processes.sum if self._processes.world > 1 else None,
                step=state.global_step,
            )
            check_same_everywhere(self._trainer.model, self._processes)
            rows = self._processes.gather(sum(len(inputs["input_ids"]) for batch in batches for inputs, _ in batch))
        if self._release is not None:
            self._release()
            self._forget_zeros(kwargs["optimizer"])
        seconds = time.perf_counter() - start
        if self._cost is not None:
            self._cost.leave_out(seconds)
        config.gradient |= {"rows": sum(rows), "seed": self._seed}
        LOG.info(
            "Supports of %d layers chosen by the %s of %d batches (%d rows) before step %d: %.1f s, %d passes.",
            len(layers),
            config.mask_score,
            len(batches),
            sum(rows),
            state.global_step + 1,
            seconds,
            passes(layers, squared=SCORES[config.mask_score].squares_gradients),
        )

    def _batches(self, count: int) -> list[list[tuple[dict[str, Any], float]]]:
        """Micro-batches of this process, each with the share of its loss in that of the whole batch."""
        trainer = self._trainer
        loaders = trainer.accelerator._dataloaders
        known = len(loaders)
        loader = trainer.get_train_dataloader()
        del loaders[known:]
        if isinstance(loader, DataLoaderDispatcher):
            raise ValueError(
                f"mask_score: {self._config.mask_score} does not work with dispatch_batches: process 0 would read all "
                "batches. Remove it."
            )
        size = trainer.args.gradient_accumulation_steps
        # What Accelerate puts around the loader also tells the Trainer where its own one is: not here.
        found = list(islice(iter(getattr(loader, "base_dataloader", loader)), count * size))
        have = min(self._processes.gather(len(found)))
        if have <= (count - 1) * size:
            raise ValueError(
                f"gradient_batches: {count} batches of {size} micro batches in each process were asked for, and the "
                f"training set has {have} micro batches; lower it to {max(1, have // size)}, or use more records."
            )
        weights = [_counted(inputs["labels"]) for inputs in found[:have]]
        everywhere = self._processes.gather(weights)
        batches = []
        for start in range(0, have, size):
            total = sum(sum(each[start : start + size]) for each in everywhere)
            if not total:
                raise ValueError(
                    f"gradient_batches: batch {start // size + 1} of {count} has no token with a label to take a "
                    "gradient from; check train_on_inputs, the template and sequence_len."
                )
            here = zip(found[start : start + size], weights[start : start + size], strict=False)
            # The mean over no label would be NaN.
            batches.append([(inputs, weight / total) for inputs, weight in here if weight])
        return batches

    def _loss(self, micro_batch: tuple[dict[str, Any], float]) -> Tensor:
        """The training's own loss, a mean over its labels, times the share."""
        inputs, share = micro_batch
        trainer = self._trainer
        tokens, trainer.args.include_tkps = trainer.args.include_tkps, False  # these are not trained on
        device = trainer.args.device.type
        try:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bool(trainer.args.bf16)):
                loss = trainer.compute_loss(trainer.model.train(), trainer._prepare_inputs(dict(inputs)))
        finally:
            trainer.args.include_tkps = tokens
        return loss * share

    def _forget_zeros(self, optimizer: Any) -> None:
        """What the optimizer took from gradients of 0: U shall start as it would have in the first step."""
        inner = getattr(optimizer, "optimizer", optimizer)
        for layer in sparse_layers(self._trainer.model):
            inner.state.pop(layer.supra_values["default"], None)


def _counted(labels: Tensor) -> int:
    """Labels that the loss counts: the first token of a row is predicted by none."""
    return int((labels[..., 1:] != IGNORED).sum())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Every generator starts from the seed inside, and goes on afterwards as if nothing had been drawn."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(of_numpy)
