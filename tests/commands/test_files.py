"""The files that commands read and write: a YAML argument, and JSON."""

import json

import pytest

from axolotl_supertune.commands.files import read_yaml, write_json


@pytest.mark.parametrize(("text", "message"), [("- a\n", "not a YAML of keys"), ("a: [", "not a YAML file")])
def test_a_file_without_keys_is_refused(tmp_path, text, message):
    (tmp_path / "some.yml").write_text(text)
    with pytest.raises(ValueError, match=rf"some\.yml: {message}"):
        read_yaml(tmp_path / "some.yml")


def test_what_is_not_finite_is_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.5, float("nan")], "b": (float("inf"), "λ"), "c": tmp_path})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1.5, None], "b": [None, "λ"], "c": str(tmp_path)}
    assert "λ" in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
