"""What tests read of a training, and how to end one as a kill does."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TrainerCallback

from axolotl_supertune.tuner import read_adapter

PROMPTS = torch.randint(3, 400, (2, 17), generator=torch.Generator().manual_seed(1))


def logits(model):
    """(2, 17, vocabulary) of `PROMPTS`."""
    with torch.no_grad():
        return model.eval()(PROMPTS).logits


def adapter_of(mapping):
    return read_adapter(mapping["output_dir"])


def losses(trainer):
    return _logged(trainer.state.log_history, "loss")


def eval_losses(trainer):
    return _logged(trainer.state.log_history, "eval_loss")


def _logged(history, key):
    return [entry[key] for entry in history if key in entry]


@dataclass
class Finished:
    """A training that has ended.

    Attributes:
        mapping: its YAML.
        log_history: the Trainer's.
        logits: the trained model's, see `logits`.
    """

    mapping: dict
    log_history: list[dict]
    logits: Tensor

    @property
    def losses(self):
        return _logged(self.log_history, "loss")

    @property
    def eval_losses(self):
        return _logged(self.log_history, "eval_loss")


class StopAt(TrainerCallback):
    """Ends the process's training as a kill does: no final save."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt
