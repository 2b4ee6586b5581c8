"""YAML keys that have other values while the base is loaded."""

from types import SimpleNamespace

import torch
from axolotl.utils.dict import DictDefault

from axolotl_supertune import SupertunePlugin
from axolotl_supertune.plugin import plugin as plugin_module


def test_the_deepspeed_config_is_what_it_was_after_loading(monkeypatch):
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    cfg = DictDefault({"adapter": "supra", "deepspeed": config, "torch_dtype": torch.bfloat16, "output_dir": "out"})
    monkeypatch.setattr(plugin_module.axolotl_compat, "load_model_config", lambda cfg: SimpleNamespace())
    monkeypatch.setattr(plugin_module.quantized_base, "complete", lambda *args: None)
    monkeypatch.setattr(plugin_module.quantized_base, "prepare", lambda *args: None)
    monkeypatch.setattr(plugin_module, "is_new", lambda cfg: False)
    plugin = SupertunePlugin()
    plugin.pre_model_load(cfg)
    assert cfg.deepspeed["bf16"]["enabled"] is True  # `zero.Init` takes the dtype from here
    plugin.post_model_build(cfg, torch.nn.Linear(1, 1))
    assert cfg.deepspeed == config
