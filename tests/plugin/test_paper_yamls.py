"""Every method of the paper's grids is a YAML that this Axolotl takes whole, as on a GPU with bf16."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from axolotl_supertune.grid.read_config import read_grid

PAPER = Path(__file__).parents[2] / "examples" / "paper"


@pytest.mark.parametrize(
    "name", ["llama3-8b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("smollm2-135m", "llama3.2-1b"))]
)
def test_nothing_of_a_method_is_dropped(name, tmp_path, monkeypatch, fresh_plugins):
    from axolotl.cli.config import prepare_plugins
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    monkeypatch.chdir(tmp_path)
    calibration = Path("outputs/paper/smollm2-135m/calibration.txt")
    calibration.parent.mkdir(parents=True)
    calibration.write_text("text")
    LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3).save_pretrained("config")
    gpu = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}
    grid = read_grid(PAPER / f"{name}.yml")
    for key in {key.method: key for key in grid.keys}.values():
        raw = {**grid.settings(key), "base_model": "config"}
        cfg = DictDefault(raw)
        PluginManager.get_instance().plugins.clear()
        prepare_plugins(cfg)
        checked = validate_config(cfg, capabilities=gpu, env_capabilities={"torch_version": "2.11.0"})
        assert checked.adapter == raw.get("adapter"), key.method
        lost = [each for each in raw if checked.get(each) is None]
        assert not lost, f"{key.method}: Axolotl dropped {lost}"
