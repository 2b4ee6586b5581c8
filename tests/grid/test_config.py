"""GRID files: the runs that they stand for, and what is refused in them."""

import pytest
import yaml
from grid_cases import MAGNITUDE

from axolotl_supertune.grid.config import RECORD, SUPERTUNE, GridError
from axolotl_supertune.grid.read_config import check_keys, read_grid
from axolotl_supertune.grid.run_files import RunKey


def test_a_grid_is_methods_by_rates_by_epochs_by_seeds(write_grid):
    methods = {
        "full": {"adapter": None},
        "mine": {"settings": MAGNITUDE, "learning_rates": [0.5]},
        "lora": {"adapter": "lora"},
    }
    grid = read_grid(write_grid(methods=methods, learning_rates=["5e-5", 1e-3], epochs=[1, 3], seeds=[0, 7]))
    assert [(key.epochs, key.seed, key.method, key.learning_rate) for key in grid.keys] == [
        (epochs, seed, method, rate)
        for epochs in (1, 3)
        for seed in (0, 7)
        for method, rate in (("full", 5e-5), ("full", 1e-3), ("mine", 0.5), ("lora", 5e-5), ("lora", 1e-3))
    ]


def test_a_run_is_the_base_with_the_methods_keys_over_it(write_grid):
    base = {"adapter": "lora", "learning_rate": 9.0, "seed": 42, "lora_r": 4}
    methods = {"full": {"adapter": None}, "mine": {**MAGNITUDE, "lora_r": 2, "plugins": ["other.Plugin", SUPERTUNE]}}
    grid = read_grid(write_grid(base, methods=methods, epochs=[0.5, 2]))
    key = RunKey(method="mine", learning_rate=1e-3, epochs=2, seed=3)
    assert grid.settings(key) == {
        "base_model": "base",
        "calibration_dataset": "text.txt",
        "datasets": [{"path": "train.jsonl", "type": "alpaca"}],
        "test_datasets": [{"path": "valid.jsonl", "type": "alpaca", "split": "train"}],
        "micro_batch_size": 4,
        **MAGNITUDE,
        "lora_r": 2,
        "plugins": ["other.Plugin", SUPERTUNE, RECORD],
        "dataset_prepared_path": "runs/prepared",
        "auto_resume_from_checkpoints": True,
        "learning_rate": 1e-3,
        "num_epochs": 2,
        "seed": 3,
        "output_dir": "runs/mine/lr0.001-ep2-seed3/adapter",
    }
    full = grid.settings(RunKey(method="full", learning_rate=1e-3, epochs=0.5, seed=3))
    assert "adapter" not in full
    assert "calibration_dataset" not in full, "a key of super and supra alone"
    assert full["lora_r"] == 4
    assert full["num_epochs"] == 0.5
    assert full["plugins"] == [SUPERTUNE, RECORD]


@pytest.mark.parametrize("methods", [["a", "b"], {"a": None, "b": {"learning_rates": [0.5]}}])
def test_names_without_keys_are_taken_from_another_file(write_grid, tmp_path, methods):
    library = {"a": {"adapter": None}, "b": MAGNITUDE, "c": {"adapter": "lora"}}
    (tmp_path / "library.yml").write_text(yaml.safe_dump(library))
    grid = read_grid(write_grid(methods_from="library.yml", methods=methods))
    assert {name: method.settings for name, method in grid.methods.items()} == {"a": {"adapter": None}, "b": MAGNITUDE}
    assert grid.methods["b"].learning_rates == (None if isinstance(methods, list) else [0.5])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rate": [1]}, "learning_rate: [1] is not a key; did you mean learning_rates?"),
        ({"chosen": {"seed": [1]}}, "chosen.seed: [1] is not a key; did you mean seeds?"),
        ({"score": {"beams": 4}}, "score.beams: 4 is not a key; the keys here are runs, task"),
        ({"learning_rates": None}, "learning_rates: the key is missing"),
        ({"learning_rates": []}, "learning_rates: []: "),
        ({"learning_rates": [0]}, "learning_rates.0: 0: Input should be greater than 0"),
        ({"learning_rates": [1e-3, "1.0000001e-3"]}, "learning_rates: 0.001 is given twice"),
        ({"seeds": [-1]}, "seeds.0: -1: "),
        ({"epochs": [1, 1.0]}, "epochs: 1 is given twice"),
        ({"seeds": [10**6, 10**6]}, "seeds: 1000000 is given twice"),
        ({"learning_rates": [True]}, "learning_rates.0: True: is not a number"),
        ({"epochs": [True]}, "epochs.0: True: is not a number"),
        ({"score": {"batch_size": True}}, "score.batch_size: True: is not a number"),
        ({"score": {"limit": True}}, "score.limit: True: is not a number"),
        (
            {"score": {"limit": 1.5}},
            "score.limit: 1.5: is not a number of items; give a whole number, or a share below 1",
        ),
        ({"chosen": {"leading": True}}, "chosen.leading: True: is not a number"),
        ({"methods": {"report": MAGNITUDE}}, "'report' cannot be the name of a folder"),
        ({"methods": {"grid.json": MAGNITUDE}}, "'grid.json' cannot be the name of a folder"),
        ({"methods": {"contamination.json": MAGNITUDE}}, "'contamination.json' cannot be the name of a folder"),
        (
            {"methods": {"lora": {"adapter": "lora", "lora_r": 4, "learning_rates": [0.5]}}},
            "methods.lora: learning_rates: [0.5] stands among keys of a YAML; a method with rates of its own is "
            "written as lora: {settings: {'adapter': 'lora', 'lora_r': 4}, learning_rates: [0.5]}.",
        ),
        (
            {"learning_rates": None, "methods": {"a": {"settings": MAGNITUDE, "learning_rates": [1]}, "b": MAGNITUDE}},
            "learning_rates: the key is missing, and methods.b has none of its own",
        ),
        ({"methods": {}}, "methods: "),
        ({"methods": ["lora", "lora"]}, "methods: lora is given twice"),
        ({"methods": 3}, "methods: a list of names"),
        ({"methods": {"m": {}}}, "methods.m: adapter: the key is missing; name one, or write adapter: null"),
        ({"methods": {"m": {"lora_r": 4}}}, "methods.m: adapter: the key is missing"),
        ({"chosen": {"seeds": [1, 1]}}, "chosen.seeds: 1 is given twice"),
        ({"seeds": [True]}, "seeds.0: True: "),
        ({"methods": {"../up": MAGNITUDE}}, "'../up' cannot be the name of a folder"),
        ({"methods": {"prepared": MAGNITUDE}}, "'prepared' cannot be the name of a folder"),
        ({"methods": {"m": {"settings": MAGNITUDE, "rates": [1]}}}, "methods.m.rates: [1] is not a key"),
        ({"methods": {"m": {**MAGNITUDE, "seed": 3}}}, "methods.m: seed: 3 is set by the grid"),
        ({"methods": {"m": {**MAGNITUDE, "max_steps": 3}}}, "methods.m: max_steps: 3 cannot be used in a grid"),
        ({"chosen": {"methods": ["full"]}}, "chosen.methods: full is not one of methods (lora, magnitude)"),
        ({"keep": "none"}, "keep: 'none': Input should be 'all' or 'chosen'"),
        ({"score": {"runs": True}}, "score.runs: True: "),
        ({"base": {"val_set_size": 0.1}}, "base.yml: val_set_size: 0.1 cannot be used in a grid"),
        ({"base": {"test_datasets": None}}, "base.yml: test_datasets: the key is missing"),
        ({"base": {"base_model": None}}, "base.yml: base_model: the key is missing"),
        ({"base": {"load_in_4bit": True}}, "load_in_4bit: True cannot be scored"),
        ({"methods": {"m": {**MAGNITUDE, "load_in_8bit": True}}}, "load_in_8bit: True cannot be scored"),
    ],
)
def test_what_is_refused_names_the_key_the_value_and_the_remedy(write_grid, keys, message):
    with pytest.raises(GridError) as error:
        read_grid(write_grid(**keys))
    assert message in str(error.value)
    assert "grid.yml" in str(error.value) or "base.yml" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, MAGNITUDE),
        ({"lora_r": 16}, {**MAGNITUDE, "lora_r": 16}),
        ({"settings": {"lora_r": 16}}, {**MAGNITUDE, "lora_r": 16}),
        ({"settings": {}, "learning_rates": [0.5]}, MAGNITUDE),
    ],
)
def test_keys_of_a_name_from_a_file_are_laid_over_the_files(write_grid, tmp_path, keys, expected):
    """Otherwise the method would differ from the library's method of that name."""
    (tmp_path / "library.yml").write_text(yaml.safe_dump({"a": MAGNITUDE}))
    grid = read_grid(write_grid(methods_from="library.yml", methods={"a": keys, "own": {"adapter": "lora"}}))
    assert grid.methods["a"].settings == expected
    assert grid.methods["a"].learning_rates == keys.get("learning_rates")
    assert grid.methods["own"].settings == {"adapter": "lora"}


def test_a_name_that_is_in_no_file_is_refused(write_grid, tmp_path):
    (tmp_path / "library.yml").write_text("super-top: {adapter: super}\n")
    with pytest.raises(
        GridError, match=r"methods: supertop has no keys and is not in library.yml; did you mean super-top"
    ):
        read_grid(write_grid(methods_from="library.yml", methods=["supertop"]))


@pytest.mark.parametrize(("key", "name"), [("base", "gone.yml"), ("methods_from", "gone.yml")])
def test_a_file_that_is_not_there_is_named(write_grid, key, name):
    path = write_grid()
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), key: name}))
    with pytest.raises(
        FileNotFoundError, match=rf"{key}: there is no file .*gone\.yml; it is looked for beside the grid"
    ):
        read_grid(path)


def test_numbers_that_are_what_they_should_be_are_taken(write_grid):
    methods = {"a": {"settings": MAGNITUDE, "learning_rates": [1, "5e-5"]}}
    for limit in (1, 3.0, 0.5, None):
        grid = read_grid(
            write_grid(methods=methods, learning_rates=None, seeds=[10**6, 10**6 + 1], score={"limit": limit})
        )
        assert grid.score.limit == limit
    assert {key.learning_rate for key in grid.keys} == {1, 5e-5}
    assert {key.seed for key in grid.keys} == {10**6, 10**6 + 1}


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("grid.yml", "base: base.yml\nmethods: {lora: , lora: {lora_r: 4}}", "lora"),
        ("grid.yml", "base: base.yml\nlearning_rates: [1]\nlearning_rates: [2]", "learning_rates"),
        ("base.yml", "base_model: a\ndatasets:\n- {path: a, path: b}", "path"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(write_grid, file, text, key):
    """YAML would silently take the last value."""
    path = write_grid()
    path.with_name(file).write_text(text)
    with pytest.raises(
        GridError, match=rf"{file} is not valid YAML: the key {key} is given twice; drop one(.|\n)*line \d"
    ):
        read_grid(path)


def test_a_key_over_a_merged_one_is_no_second_one(write_grid):
    path = write_grid()
    base = path.with_name("base.yml")
    base.write_text(base.read_text() + "more: &more {a: 1, b: 2}\nother: {<<: *more, a: 3}\n")
    assert read_grid(path).base_settings["other"] == {"a": 3, "b": 2}


@pytest.mark.parametrize(("text", "message"), [("- a", "holds list, not a mapping"), ("a: [", "is not valid YAML")])
def test_what_is_no_mapping_is_refused(write_grid, text, message):
    path = write_grid()
    path.write_text(text)
    with pytest.raises(GridError, match=message):
        read_grid(path)


def test_a_key_that_axolotl_would_drop_is_refused(write_grid):
    path = write_grid(methods={"lora": {"adapter": "lora", "lora_drop_out": 0.1}})
    grid = read_grid(path)
    known = {*grid.base_settings, "adapter", "lora_dropout"}
    with pytest.raises(
        GridError, match=r"methods.lora: lora_drop_out: 0.1 is not a key of .*; did you mean lora_dropout\?"
    ):
        check_keys(grid, path, known)
    check_keys(grid, path, {*known, "lora_drop_out"})
