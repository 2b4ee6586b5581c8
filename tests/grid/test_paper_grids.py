"""The grids in examples/paper: the paper's settings, and the data that they train on."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from benchmark_files import GSM8K

from axolotl_supertune.grid import config
from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.read_config import read_grid
from axolotl_supertune.grid.run_files import RunKey
from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.state import SweepState
from axolotl_supertune.grid.sweep.sweep import Sweep

PAPER = Path(__file__).parents[2] / "examples" / "paper"
GRIDS = ["smollm2-135m", "llama3.2-1b", "llama3-8b"]
RATES = [5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1]
RECORDS = [
    {"question": f" How many are {n} and 1?", "answer": f"{n}+1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
    for n in range(9)
]


def test_every_grid_is_here():
    assert sorted(path.stem for path in PAPER.glob("*.base.yml")) == sorted(f"{name}.base" for name in GRIDS)


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_can_be_run_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calibration = Path("outputs/paper/smollm2-135m/calibration.txt")
    (calibration.parent / "base").mkdir(parents=True)
    calibration.write_text("text")
    sweep = Sweep(PAPER / f"{name}.yml", Devices(()), None)
    assert sweep.listing().count("training") > 40
    present = SweepState(PAPER / f"{name}.yml")
    keys = present.grid.keys
    on_training_set = {key for key in keys if key.method.endswith("-on-training-set")}
    assert {key.method for key in on_training_set} == (
        {"super-top-on-training-set", "super-bottom-on-training-set"} if name == "smollm2-135m" else set()
    )
    wanda = {key for key in keys if present.settings.norms(key)} - on_training_set
    two_rates = {key for key in wanda if key.method.endswith("-two-rates")}
    assert bool(two_rates) == (name == "smollm2-135m")
    expected = {"super-top", "super-bottom", "super-hybrid", "supra"} | ({"supra-top"} if not two_rates else set())
    assert {key.method.rstrip("0123456789.-") for key in wanda - two_rates} == expected
    assert len({present.settings.norms(key) for key in wanda}) == 1, "one calibration for all"
    assert not {present.settings.norms(key) for key in wanda} & {present.settings.norms(key) for key in on_training_set}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_has_the_papers_settings(name):
    grid = read_grid(PAPER / f"{name}.yml")
    base = grid.base_settings
    assert base["micro_batch_size"] * base["gradient_accumulation_steps"] == 16
    expected = {"sequence_len": 256, "warmup_steps": 100, "weight_decay": 0.0, "train_on_inputs": False}
    assert {key: base[key] for key in expected} == expected
    assert base["optimizer"].startswith("adamw")
    assert grid.seeds == [0]
    assert grid.chosen.seeds == [1, 2]
    assert grid.chosen.methods == ["lora", "full"]
    assert grid.chosen.leading == 5
    missing = set(yaml.safe_load((PAPER / "methods.yml").read_text())) - set(grid.methods)
    if name == "smollm2-135m":
        top = {f"supra-top-{share}" for share in (0.3, 0.5, 0.8)}
        assert missing == {"sift-rand", "super-hybrid-0.5", "super-hybrid-0.8"} | top
        rates = {name: len(each.learning_rates or grid.learning_rates) for name, each in grid.methods.items()}
        assert set(rates.values()) == {2, 3, 4}
        assert {name for name, count in rates.items() if count == 2} == {
            f"supra-{share}-two-rates" for share in (0.3, 0.5, 0.8)
        }
        assert {key.learning_rate for key in grid.keys} <= set(RATES)
        assert grid.epochs == [1]
    else:
        assert missing == {"sift-rand", "rosa-squared"}, (
            "the one draws what super-random draws, the other is not the paper's"
        )
        assert grid.learning_rates == RATES
        assert grid.epochs == [1, 3]
        assert len(grid.keys) == 2 * 8 * len(grid.methods)
    full = grid.settings(RunKey(method="full", learning_rate=5e-5, epochs=1, seed=0))
    assert not [
        key for key in full if key.startswith(("lora_", "supra_", "sparse_", "calibration_")) or key == "adapter"
    ]
    lora = grid.settings(RunKey(method="lora", learning_rate=5e-4, epochs=1, seed=0))
    assert (lora["lora_r"], lora["lora_alpha"], lora["lora_dropout"]) == (8, 16, 0.05)


@pytest.fixture
def prepare(tmp_path):
    """A function (lines, *options) → the finished process of prepare_gsm8k.py."""

    def run(lines, *options):
        (tmp_path / "gsm8k.jsonl").write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        command = [sys.executable, str(PAPER / "prepare_gsm8k.py"), str(tmp_path / "gsm8k.jsonl")]
        return subprocess.run([*command, "--output", str(tmp_path / "out"), *options], capture_output=True, text=True)

    return run


def test_marks_are_removed_and_validation_data_is_set_apart(prepare, tmp_path):
    done = prepare(RECORDS, "--validation", "3")
    assert done.returncode == 0, done.stderr
    files = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").open()] for name in ("train", "valid")
    }
    assert [len(records) for records in files.values()] == [6, 3]
    expected = [
        {"instruction": f"How many are {n} and 1?", "output": f"{n}+1 = {n + 1}\n#### {n + 1}"} for n in range(9)
    ]
    assert sorted(files["train"] + files["valid"], key=str) == expected
    assert files["train"] == sorted(files["train"], key=str), "the source's order"
    before = (tmp_path / "out" / "valid.jsonl").read_bytes()
    prepare(RECORDS, "--validation", "3")
    assert (tmp_path / "out" / "valid.jsonl").read_bytes() == before
    prepare(RECORDS, "--validation", "3", "--seed", "1")
    assert (tmp_path / "out" / "valid.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*RECORDS[:2], "{"], "gsm8k.jsonl, line 3: no JSON"),
        ([{"instruction": "a", "output": "b"}], "line 1: instruction, output instead of question and answer"),
        (["[1]"], "line 1: list instead of question and answer"),
        (
            [{"question": "a", "answer": "It is 3."}],
            "line 1: the answer does not end with '#### ' and a number: 'It is 3.'",
        ),
        ([{"question": "a", "answer": "<<1+1=2\n#### 2"}], "line 1: what is left of a calculator mark"),
        ([*RECORDS, RECORDS[0]], "a question is there twice"),
        (RECORDS, "--validation 473 of 9 records leaves one of the two files empty"),
    ],
)
def test_other_input_is_refused(prepare, tmp_path, lines, message):
    done = prepare(lines)
    assert done.returncode == 1
    assert done.stderr.startswith("prepare_gsm8k: ")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_whole_file_is_read():
    read = runpy.run_path(str(PAPER / "prepare_gsm8k.py"))["read"]
    records = read(GSM8K)
    assert len(records) == 7473
    assert not [record for record in records if "<<" in record["output"] or ">>" in record["output"]]


def yamls_of_the_page(heading):
    """The YAMLs below a heading of the room's page."""
    page = Path(config.__file__).with_name("README.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def test_the_grid_for_ones_own_data_can_be_read(tmp_path):
    data, example = yamls_of_the_page("Compare rates for your own data")
    base = tmp_path / "run.base.yml"
    (tmp_path / "rates.yml").write_text(example)
    base.write_text(f"base_model: base\nadapter: supra\n{data}")
    grid = read_grid(tmp_path / "rates.yml")
    assert [(key.method, key.learning_rate, key.epochs) for key in grid.keys] == [
        ("run", rate, 3) for rate in (3e-4, 1e-3, 3e-3)
    ]
    assert grid.score.runs == "none"
    settings = grid.settings(grid.keys[0])
    assert {key: settings[key] for key in ("datasets", "test_datasets")} == yaml.safe_load(data)
    base.write_text(base.read_text() + "val_set_size: 0.05\n")
    with pytest.raises(GridError, match=r"val_set_size: 0.05 cannot be used in a grid"):
        read_grid(tmp_path / "rates.yml")


def test_the_grid_on_the_rooms_page_can_be_read(tmp_path):
    (example,) = yamls_of_the_page("The GRID file")
    for file in PAPER.glob("*.yml"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mine.yml").write_text(example)
    grid = read_grid(tmp_path / "mine.yml")
    assert [(name, len(method.learning_rates or grid.learning_rates)) for name, method in grid.methods.items()] == [
        ("lora", 3),
        ("super-top", 2),
        ("rosa", 3),
        ("mine", 3),
        ("slow", 1),
    ]
    rosa = grid.settings(RunKey(method="rosa", learning_rate=1e-3, epochs=1, seed=0))
    assert (rosa["mask_score"], rosa["low_rank_warmup_steps"]) == ("gradient", 50)
