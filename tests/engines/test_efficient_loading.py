"""`cpu_ram_efficient_loading`: process 0 holds the model, the other its shapes, and both get process 0's supports."""

import os

import gloo
import pytest
import torch
from tiny_llama import NARROW, make_llama

pytestmark = pytest.mark.slow

WORLD = 2


def load(rank, folder, mask_score, efficient):
    """What the plugin makes of a tiny Llama: its supports, config and calibration, and where the tensors are."""
    from axolotl.utils.dict import DictDefault

    from axolotl_supertune import SupertunePlugin
    from axolotl_supertune.plugin.plugin import _connected_processes
    from axolotl_supertune.plugin.run_summary import kernels
    from axolotl_supertune.plugin.validation import prepare
    from axolotl_supertune.tuner import SupraLayer

    model = make_llama(**NARROW, vocab_size=61).train()
    if efficient and rank != 0:
        model = model.to("meta")
    cfg = DictDefault({"adapter": "supra", "mask_score": mask_score, "output_dir": str(folder / "out"), "seed": 0})
    cfg.calibration_batch_size = 1
    prepare(cfg, cfg.keys())
    cfg.device = "cpu"
    if efficient is not None:
        cfg.fsdp_config = DictDefault({"cpu_ram_efficient_loading": efficient})
    plugin = SupertunePlugin()
    plugin._processes = _connected_processes()
    plugin._windows = torch.randint(0, 61, (5, 16), generator=torch.Generator().manual_seed(3))
    adapted, config = plugin.load_adapter(model, cfg)
    told = kernels(adapted, cfg)
    assert told.startswith("reference, not Triton: the kernels run on CUDA devices, not on cpu")
    assert ("; FSDP gathers the weights in every pass" in told) == bool(cfg.fsdp_config)
    layers = {name: module for name, module in adapted.named_modules() if isinstance(module, SupraLayer)}
    supports = {name: layer.supra_indices["default"] for name, layer in layers.items()}
    unloaded = [name for name, layer in layers.items() if layer.pending_adapters]
    return supports, (config.support, config.calibration), unloaded, {p.is_meta for p in adapted.parameters()}


def _enter(rank, store, folder, mask_score, efficient):
    os.environ["AXOLOTL_NCCL_TIMEOUT"] = "60"
    torch.save(load(rank, folder, mask_score, efficient), folder / f"{rank}.pt")


@pytest.mark.parametrize(("mask_score", "efficient"), [("wanda", True), ("magnitude", True), ("wanda", False)], ids=str)
def test_all_processes_have_the_supports_that_one_alone_chooses(tmp_path, mask_score, efficient):
    alone, about, _, _ = load(0, tmp_path / "alone", mask_score, None)
    assert all(torch.equal(support, support.unique()) and support.numel() for support in alone.values())
    gloo.start(_enter, (tmp_path, mask_score, efficient), WORLD)
    for rank in range(WORLD):
        supports, found, unloaded, meta = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert supports.keys() == alone.keys()
        assert all(torch.equal(support, alone[name]) for name, support in supports.items())
        assert found == about
        assert found[0] == "select"
        assert not unloaded
        assert meta == {bool(efficient) and rank != 0}
    norms = tmp_path / "out/activation_norms.safetensors"
    assert norms.exists() == (mask_score == "wanda")
    if norms.exists():
        assert norms.read_bytes() == (tmp_path / "alone/out/activation_norms.safetensors").read_bytes()
