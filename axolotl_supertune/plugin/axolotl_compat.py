"""Uses of Axolotl's internals: names that are not part of its plugin interface, and differences between its versions.

No other file of the package imports Axolotl but for its public interface: `BasePlugin`, `AdapterCapabilities`,
`load_cfg`, `load_datasets`, `load_tokenizer`, `ModelLoader`, `DictDefault` and `get_logger`
(tests/plugin/test_axolotl_compat.py). To support another Axolotl version, run that test and the trainings in
tests/plugin/test_train.py with it; what has moved is changed here.

Supported: 0.19 (Python 3.11, peft 0.20) and 0.21 (Python 3.12, peft 0.21). The comment at each function says what it
reaches into, what would break, and which test fails then.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

from axolotl.common.const import DEFAULT_DATASET_PREPARED_PATH as PREPARED_FOLDER
from axolotl.integrations.base import PluginManager
from axolotl.loaders import adapter as _adapter
from axolotl.loaders import model as _model
from axolotl.loaders.utils import load_model_config
from axolotl.utils.chat_templates import get_chat_template
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.distributed import init_distributed_state
from axolotl.utils.schemas.config import AxolotlInputConfig
from axolotl.utils.train import determine_last_checkpoint
from packaging.version import Version

__all__ = [
    "PREPARED_FOLDER",
    "TIMEOUT_VARIABLE",
    "argument_class_of",
    "axolotl_version",
    "chat_template_text",
    "config_keys",
    "draws_lora_by_name",
    "init_distributed_state",
    "is_evaluating",
    "is_merging",
    "last_checkpoint",
    "linear_layer_names",
    "load_model_config",
    "prepare_quantized_model",
    "process_timeout",
    "register_plugins",
    "registered_argument_classes",
    "registered_plugins",
    "saves_sharded_adapters",
    "task_type",
    "unquantized_modules",
    "validated",
]

TIMEOUT_VARIABLE = "AXOLOTL_NCCL_TIMEOUT"
"""Environment variable: how many seconds processes wait for each other, for Axolotl as for the plugin."""
_DEFAULT_TIMEOUT = 1800.0  # Axolotl's default for the same variable

# As a training machine would report them; `plan` may run where there is no GPU.
_CAPABILITIES = {"bf16": True, "fp8": True, "tf32": True, "compute_capability": "sm_90"}
_ENVIRONMENT = {"torch_version": "2.11.0"}


def axolotl_version() -> str:
    """The version of the installed Axolotl."""
    return version("axolotl")


# --- Plugins and the keys of a YAML ---------------------------------------------------------------------------------
# PluginManager is a singleton without a documented interface. Its `plugins` (dotted name -> plugin) and
# `get_input_args` are read, and `register` is called, as Axolotl's own `prepare_plugins` does.
# Tests: test_axolotl_compat.py::test_known_keys…, test_plan.py, test_validation.py.


def registered_plugins() -> Iterator[Any]:
    """The plugins of this process, in the order in which they were registered."""
    yield from PluginManager.get_instance().plugins.values()


def register_plugins(names: Iterable[str]) -> None:
    """Create the named plugins that are not registered yet; their `register` hook does not run."""
    manager = PluginManager.get_instance()
    for name in names:
        if name not in manager.plugins:
            manager.register(name)


def registered_argument_classes() -> list[str]:
    """Dotted paths of the pydantic classes with the registered plugins' keys."""
    return list(PluginManager.get_instance().get_input_args())


def argument_class_of(plugin: str) -> str | None:
    """Dotted path of the pydantic class with a plugin's keys, if it has any; the plugin is not registered.

    Args:
        plugin: dotted path of the plugin's class.

    Raises:
        ImportError, AttributeError, ValueError: there is no such class.
    """
    return _imported(plugin)().get_input_args()


def config_keys(argument_classes: Iterable[str]) -> set[str]:
    """The keys, with their aliases, that a YAML may have: Axolotl's and those of these argument classes.

    Axolotl drops a key that nobody declares without a message, so that the plugin itself has to find misspelt ones.

    Args:
        argument_classes: dotted paths, as `get_input_args` of a plugin returns them.
    """
    keys: set[str] = set()
    for model in (AxolotlInputConfig, *map(_imported, argument_classes)):
        keys |= set(model.model_fields)
        keys |= {field.alias for field in model.model_fields.values() if field.alias}
    return keys


def _imported(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def validated(cfg: Any, gpus: int) -> Any:
    """The config after the plugins' `register` hooks and Axolotl's validation, as for a training on such a machine.

    Args:
        cfg: a DictDefault of the YAML; changed by the hooks.
        gpus: how many GPUs the machine would have.

    Raises:
        ValueError: Axolotl or a plugin refuses the config.
    """
    # `load_cfg` does the same two calls, with the capabilities of the machine that it runs on, and writes files.
    # Test: test_plan.py.
    prepare_plugins(cfg)
    return validate_config(cfg, capabilities={**_CAPABILITIES, "n_gpu": gpus}, env_capabilities=_ENVIRONMENT)


def chat_template_text(name: str) -> str:
    """The Jinja text of one of Axolotl's chat templates, as `chat_template` in a YAML names it.

    Raises:
        ValueError: there is none of this name.
    """
    # If it moves, `init` cannot count the tokens of chats. Test: test_axolotl_compat.py::test_a_chat_template….
    return get_chat_template(name)


# --- Commands ---------------------------------------------------------------------------------------------------------


def is_evaluating() -> bool:
    """Whether `axolotl evaluate` is running."""
    return _is_called_by("axolotl.evaluate", "evaluate")


def is_merging() -> bool:
    """Whether `axolotl merge-lora` is running; its config says so only the second time that it is loaded."""
    return _is_called_by("axolotl.cli.merge_lora", "do_cli")


def _is_called_by(module: str, function: str) -> bool:
    # Looks at the call stack, as nothing that Axolotl passes on differs: `evaluate` and the first `load_cfg` of
    # merge-lora call the hooks of a training with the config of a training. sys.argv says it for commands only, and
    # both functions are called from Python, too. If they are renamed, a new adapter is calibrated before evaluating it
    # is refused, and merge-lora starts DeepSpeed.
    # Tests: test_train.py::test_evaluate…, test_validation.py::test_the_first_look_of_merge_lora….
    frame: Any = sys._getframe()
    while frame is not None:
        # A module that runs as a command is named __main__; its spec has the real name.
        spec = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == function and getattr(spec, "name", None) == module:
            return True
        frame = frame.f_back
    return False


def last_checkpoint(cfg: Any) -> str | None:
    """The checkpoint that the config resumes, if any."""
    # With auto_resume_from_checkpoints this sets cfg.resume_from_checkpoint, as the trainer expects later.
    # Test: test_axolotl_compat.py::test_the_newest_checkpoint_is_resumed_if_asked.
    return determine_last_checkpoint(cfg)


def process_timeout() -> float:
    """Seconds that processes wait for each other."""
    return float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT))


def saves_sharded_adapters() -> bool:
    """Whether this Axolotl saves an adapter whole whose tensors are sharded over the processes (0.21)."""
    # 0.19 writes one process's part, without an error, and its way of sharding refuses integer tensors.
    # Tests: test_validation.py::test_fsdp2_is_taken_from_axolotl_0_21_on, test_several_processes.py.
    return Version(axolotl_version()) >= Version("0.21")


# --- Models and adapters ----------------------------------------------------------------------------------------------


def task_type(model: Any) -> Any:
    """PEFT's task type of a model, as Axolotl writes it into a LoRA's config."""
    # A private function; the task type decides the class of PeftModel.
    # Test: test_axolotl_compat.py::test_a_model_is_described_as_for_lora.
    return _adapter._get_peft_task_type(model)


def linear_layer_names(model: Any) -> list[str]:
    """Last names of the layers that `lora_target_linear` adapts: all linear ones but the output layer."""
    # If its rule changes, lora_target_linear adapts other layers than it does for LoRA.
    # Test: test_axolotl_compat.py::test_a_model_is_described_as_for_lora.
    return sorted(_adapter.find_all_linear_names(model))


def draws_lora_by_name() -> bool:
    """Whether this Axolotl draws LoRA's A from the seed and each layer's name (0.21), or unseeded (0.19)."""
    # If the function is renamed, λ = 1 starts from other numbers than LoRA.
    # Test: test_train.py::test_lambda_1_trains_as_lora_does_step_by_step.
    return hasattr(_adapter, "reinit_lora_from_seed")


def prepare_quantized_model(model: Any, *, gradient_checkpointing: Any) -> None:
    """Prepare a quantized base model for training, in place, as Axolotl does for qlora."""
    # PEFT's `prepare_model_for_kbit_training`, which Axolotl replaces in its loader's module by one that leaves the
    # embeddings' dtype alone. Test: test_quantized_base.py::test_the_base_is_left_as_axolotl_leaves_it_for_lora.
    _model.prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)


def unquantized_modules(model_type: str | None, bits: int) -> list[str] | None:
    """Modules that Axolotl leaves unquantized in models of this type, or None for transformers' own choice.

    Args:
        model_type: of the model's config.
        bits: 4 or 8.
    """
    # Axolotl 0.19 has these in ModelLoader._set_quantization_config; 0.21 has those of 4 bits in axolotl.utils.nf4.
    # Test: test_quantized_base.py::test_the_settings_are_those_of_axolotls_loader.
    if bits == 4:
        try:
            from axolotl.utils.nf4 import bnb_4bit_skip_modules
        except ImportError:
            pass
        else:
            return bnb_4bit_skip_modules(model_type)
    if bits == 8 and model_type == "jamba":
        return ["mamba"]
    return ["out_proj"] if model_type == "falcon_h1" else None
