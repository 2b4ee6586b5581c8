"""Chooses the support by gradient (SIFT, RoSA) in a training, before the first step that trains the sparse part.

The batches come from the Trainer's own data loader, so they are training records with the run's template, masking,
packing and collator. They are drawn with the config's seed, and every random generator is restored afterwards, so that
training goes on as if none had been drawn.

Internals that this file reaches into: `_dataloaders` of Accelerate, `_prepare_inputs` of transformers' Trainer and
`include_tkps` of Axolotl's arguments. If one were renamed, the choice of supports would raise AttributeError before the
first step: tests/plugin/test_gradient_callback.py.
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
from ..tuner.gradient import allow_placeholders, choose_supports, freeze_values, sparse_layers
from .callbacks import LogCost
from .verify import check_same_everywhere

LOG = get_logger(__name__)

IGNORED = -100  # the label of tokens that the loss leaves out


class ChooseByGradient(TrainerCallback):
    """Chooses the support before the first step that trains the sparse part; until then U stays 0.

    A resumed run keeps the support in its checkpoint. If the checkpoint was written before the choice, the run makes it
    when its step comes.

    Args:
        trainer: an Axolotl trainer.
        processes: of the run. Each computes the gradient of its part of every batch, and all choose from the sums.
        seed: of the batches.
        cost: the callback that measures the training's speed; the seconds of the choice are left out of it.
    """

    def __init__(self, trainer: Any, processes: Processes, seed: int, cost: LogCost | None = None) -> None:
        self._trainer, self._processes, self._seed, self._cost = trainer, processes, seed, cost
        self._release: Any = None  # lets U be trained, while it is kept at 0

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
        allow_placeholders(self._trainer.model)
        if state.global_step < warmup:
            self._release = freeze_values(self._trainer.model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        config = self._config
        if not config.awaits_gradient or state.global_step < config.low_rank_warmup_steps:
            return
        layers = {layer.layer_name: layer for layer in sparse_layers(self._trainer.model)}
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
            self._reset_optimizer_state(kwargs["optimizer"])
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
        """Draw micro-batches of this process.

        Returns:
            `count` batches, each a list of (model inputs, weight of the micro-batch's mean loss in the batch's).

        Raises:
            ValueError: too few records, or a batch without a label.
        """
        trainer = self._trainer
        loaders = trainer.accelerator._dataloaders
        count_before = len(loaders)
        loader = trainer.get_train_dataloader()
        del loaders[count_before:]  # Accelerate would checkpoint it along with the training's
        if isinstance(loader, DataLoaderDispatcher):
            raise ValueError(
                f"mask_score: {self._config.mask_score} does not work with dispatch_batches: process 0 would read all "
                "batches. Remove it."
            )
        size = trainer.args.gradient_accumulation_steps
        # Iterating Accelerate's wrapper would change the Trainer's own record of how far it has read.
        micro_batches = list(islice(iter(getattr(loader, "base_dataloader", loader)), count * size))
        available = min(self._processes.gather(len(micro_batches)))
        if available <= (count - 1) * size:
            raise ValueError(
                f"gradient_batches: {count} batches of {size} micro batches in each process were asked for, and the "
                f"training set has {available} micro batches; lower it to {max(1, available // size)}, or use more "
                "records."
            )
        weights = [_counted(inputs["labels"]) for inputs in micro_batches[:available]]
        by_rank = self._processes.gather(weights)
        batches = []
        for start in range(0, available, size):
            total = sum(sum(labels[start : start + size]) for labels in by_rank)
            if not total:
                raise ValueError(
                    f"gradient_batches: batch {start // size + 1} of {count} has no token with a label to take a "
                    "gradient from; check train_on_inputs, the template and sequence_len."
                )
            own = zip(micro_batches[start : start + size], weights[start : start + size], strict=False)
            # Without a label, the mean loss would be NaN.
            batches.append([(inputs, weight / total) for inputs, weight in own if weight])
        return batches

    def _loss(self, micro_batch: tuple[dict[str, Any], float]) -> Tensor:
        """The training's own loss (a mean over the micro-batch's labels) times its weight in the batch."""
        inputs, share = micro_batch
        trainer = self._trainer
        tokens, trainer.args.include_tkps = trainer.args.include_tkps, False  # do not count them as trained tokens
        device = trainer.args.device.type
        try:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bool(trainer.args.bf16)):
                loss = trainer.compute_loss(trainer.model.train(), trainer._prepare_inputs(dict(inputs)))
        finally:
            trainer.args.include_tkps = tokens
        return loss * share

    def _reset_optimizer_state(self, optimizer: Any) -> None:
        """Drop the optimizer's state of U, made of gradients of 0, so that U starts as in a first step."""
        inner = getattr(optimizer, "optimizer", optimizer)
        for layer in sparse_layers(self._trainer.model):
            inner.state.pop(layer.supra_values["default"], None)


def _counted(labels: Tensor) -> int:
    """The number of labels that the loss counts; the first token of a row is not predicted."""
    return int((labels[..., 1:] != IGNORED).sum())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every random generator inside the block, and restore their states after it."""
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
