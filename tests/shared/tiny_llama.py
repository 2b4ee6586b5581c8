"""The tiny random Llamas of the tests: one seed, one set of weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# Half as wide, where the width of a layer does not matter.
NARROW = {"hidden_size": 32, "intermediate_size": 48}


def make_llama(seed=0, dtype=torch.float32, **changes):
    """A Llama in evaluation mode with random weights.

    Args:
        seed: of the weights.
        dtype: of the weights.
        changes: entries of the config that differ from `TINY`.
    """
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).to(dtype).eval()


def save_llama(folder, texts, vocab_size, **changes):
    """Save into `folder` a tiny Llama and a byte-level BPE tokenizer that is trained on `texts`."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=["<pad>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    make_llama(vocab_size=vocab_size, **special, **changes).save_pretrained(folder)
