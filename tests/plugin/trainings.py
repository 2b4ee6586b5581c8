"""What the tests of trainings share: what a run left, and how to end one as a kill does."""

from transformers import TrainerCallback

from axolotl_supertune.tuner import read_adapter


def adapter_of(mapping):
    return read_adapter(mapping["output_dir"])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def eval_losses(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


class StopAt(TrainerCallback):
    """Ends the process's training as a kill does: no final save."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt
