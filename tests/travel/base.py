"""A tiny Llama whose weights follow from integers alone, so that every version of torch makes the same one.

The recorded adapters of tests/fixtures/travel belong to it. It imports nothing else of the tests: tests/travel/stock.py
runs where neither they nor this package are installed.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.arange(3, 27).view(1, -1) * 7 % 397


def make_base():
    """In fp32; each weight matrix is a permuted ramp of mean 0, each norm 1."""
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(model.named_parameters())):
            if weight.dim() == 2:
                ramp = (torch.arange(weight.numel()) * 7919 + 104729 * number) % 16381 - 8190
                weight.copy_(ramp.view(weight.shape) / 16384 / 2)
    return model


def logits(model):
    """Of every token of `IDS`: (24, 400)."""
    with torch.no_grad():
        return model.eval()(IDS).logits[0]
