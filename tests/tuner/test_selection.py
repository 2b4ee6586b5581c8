"""The choice of the supports of many layers: in threads on a CPU, with a progress bar, and the same in any case."""

import pytest
import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.method import progress
from axolotl_supertune.tuner import SupraLayer


@pytest.fixture
def threads():
    """A function that sets the number of PyTorch's threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def supports(model):
    return {
        layer.layer_name: layer.supra_indices["default"] for layer in model.modules() if isinstance(layer, SupraLayer)
    }


@pytest.mark.parametrize("direction", ["bottom", "random"])
def test_threads_choose_what_one_thread_chooses(tiny_llama, threads, direction):
    chosen = []
    for count in (1, 3):
        threads(count)
        config = SupraConfig(mask_score="magnitude", supra_lambda=0, sparse_direction=direction)
        chosen.append(supports(get_peft_model(tiny_llama(), config)))
        assert torch.get_num_threads() == count
    assert chosen[0].keys() == chosen[1].keys()
    assert all(torch.equal(support, chosen[1][name]) for name, support in chosen[0].items())


def test_an_error_in_a_thread_is_that_of_the_first_layer(tiny_llama, threads):
    threads(3)
    model = tiny_llama()
    for block in model.model.layers:
        block.mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.up_proj: its weight hold"):
        get_peft_model(model, SupraConfig(mask_score="magnitude"))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("scope", "shown"), [("layer", ("Choosing supports", "14/14")), ("global", ("Comparing the scores of all layers",))]
)
def test_a_slow_choice_shows_how_far_it_is(tiny_llama, capsys, monkeypatch, scope, shown):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    get_peft_model(tiny_llama(), SupraConfig(mask_score="magnitude", budget_scope=scope))
    error = capsys.readouterr().err
    assert all(text in error for text in shown)
