"""TODO-DOC tuner/quantization."""
