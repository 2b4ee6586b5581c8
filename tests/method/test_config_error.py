"""Errors that carry the key of the YAML at fault."""

import pickle

import pytest

from axolotl_supertune.method.config_error import ConfigError, MissingFileError


@pytest.mark.parametrize(
    ("path", "key"),
    [("supra_lambda", "supra_lambda"), ("datasets[0].path", "datasets"), ("fsdp_config.offload_params", "fsdp_config")],
)
@pytest.mark.parametrize(("kind", "base"), [(ConfigError, ValueError), (MissingFileError, FileNotFoundError)])
def test_an_error_has_the_top_level_key_and_a_message_that_begins_with_the_path(path, key, kind, base):
    error = kind(path, "x is wrong; drop it.")
    assert isinstance(error, base)
    assert (error.key, str(error)) == (key, f"{path}: x is wrong; drop it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.key, str(copy)) == (kind, key, str(error))
