"""Names of the files of an adapter's folder, as PEFT writes them."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
