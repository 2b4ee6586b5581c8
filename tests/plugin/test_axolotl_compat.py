"""Axolotl's internals are used in one file, and are what that file says."""

import ast
from pathlib import Path

import pytest
import torch
from axolotl.utils.dict import DictDefault

from axolotl_supertune.plugin import axolotl_compat

PACKAGE = Path(axolotl_compat.__file__).parents[1]
PUBLIC = {
    "axolotl.cli.config": {"load_cfg"},
    "axolotl.common.datasets": {"load_datasets"},
    "axolotl.integrations.base": {"AdapterCapabilities", "BasePlugin"},
    "axolotl.loaders": {"ModelLoader", "load_tokenizer"},
    "axolotl.utils.dict": {"DictDefault"},
    "axolotl.utils.logging": {"get_logger"},
}


def imported_from_axolotl(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.partition(".")[0] == "axolotl")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] == "axolotl":
            yield from ((node.module, alias.name) for alias in node.names)


def test_no_other_file_reaches_into_axolotl():
    reaches = {
        f"{path.relative_to(PACKAGE)}: {module}.{name}"
        for path in PACKAGE.rglob("*.py")
        if path != Path(axolotl_compat.__file__)
        for module, name in imported_from_axolotl(path)
        if name not in PUBLIC.get(module, ())
    }
    assert not reaches


def test_known_keys_are_axolotls_and_those_of_the_named_classes():
    assert {"base_model", "micro_batch_size", "adapter"} <= axolotl_compat.config_keys([])
    assert "supra_lambda" not in axolotl_compat.config_keys([])
    assert "supra_lambda" in axolotl_compat.config_keys(["axolotl_supertune.plugin.args.SupertuneArgs"])


def test_the_argument_class_of_a_plugin_that_is_not_registered():
    found = axolotl_compat.argument_class_of("axolotl_supertune.SupertunePlugin")
    assert found == "axolotl_supertune.plugin.args.SupertuneArgs"
    ours = [
        plugin for plugin in axolotl_compat.registered_plugins() if type(plugin).__module__.startswith("axolotl_sup")
    ]
    assert not ours  # Axolotl 0.21 registers plugins of its own
    with pytest.raises(ImportError):
        axolotl_compat.argument_class_of("nowhere.Plugin")


def test_a_chat_template_is_found_by_its_name():
    assert "<|im_start|>" in axolotl_compat.chat_template_text("chatml")
    assert "### Response:" in axolotl_compat.chat_template_text("alpaca")
    with pytest.raises(ValueError, match="none_of_them"):
        axolotl_compat.chat_template_text("none_of_them")


def test_no_command_is_running():
    assert not axolotl_compat.is_evaluating()
    assert not axolotl_compat.is_merging()


def test_a_model_is_described_as_for_lora(llama):
    assert str(axolotl_compat.task_type(llama).value) == "CAUSAL_LM"
    names = {name.rpartition(".")[2] for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear)}
    assert axolotl_compat.linear_layer_names(llama) == sorted(names - {"lm_head"})


def test_the_newest_checkpoint_is_resumed_if_asked(tmp_path):
    for step in (8, 16):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert axolotl_compat.last_checkpoint(DictDefault(output_dir=str(tmp_path))) is None
    asked = DictDefault(output_dir=str(tmp_path), auto_resume_from_checkpoints=True)
    newest = str(tmp_path / "checkpoint-16")
    assert axolotl_compat.last_checkpoint(asked) == newest
    assert asked.resume_from_checkpoint == newest  # as the trainer reads it later


def test_the_timeout_of_processes_is_axolotls(monkeypatch):
    monkeypatch.delenv(axolotl_compat.TIMEOUT_VARIABLE, raising=False)
    assert axolotl_compat.process_timeout() == 1800
    monkeypatch.setenv("AXOLOTL_NCCL_TIMEOUT", "7")
    assert axolotl_compat.process_timeout() == 7
