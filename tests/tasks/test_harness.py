"""The harness finds the tasks, loads the adapter, and gives the numbers it should."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_supertune.tasks import TASK_FOLDER
from axolotl_supertune.tasks.benchmarks import BENCHMARKS
from axolotl_supertune.tasks.perplexity import gold_records
from axolotl_supertune.tasks.prompt import alpaca_prompt
from axolotl_supertune.tasks.scoring import extract, load, prompt, score

NAMES = [f"supertune_{benchmark.suffix}" for benchmark in BENCHMARKS.values()]
FIND = """
import sys
from lm_eval.tasks import TaskManager
manager = TaskManager({arguments})
print(sorted(name for name in manager.all_tasks if name.startswith("supertune_")))
print("arc_easy" in manager.all_tasks)
"""


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "environment", "found"),
    [
        ("", {}, True),
        ("", {"AXOLOTL_SUPERTUNE_AUTOLOAD": "0"}, False),
        (f"include_path={str(TASK_FOLDER)!r}", {"AXOLOTL_SUPERTUNE_AUTOLOAD": "0"}, True),
        (f"include_path={str(TASK_FOLDER)!r}", {}, True),
    ],
    ids=["by name", "opted out", "include_path", "both"],
)
@pytest.mark.slow
def test_the_tasks_are_found(arguments, environment, found):
    *_, tasks, others = python(FIND.format(arguments=arguments), **environment)
    assert others == "True"
    assert [name for name in NAMES if name in tasks] == (NAMES if found else [])
    assert ("'supertune_math'" in tasks) is found


@pytest.mark.slow
def test_a_users_own_include_path_still_counts(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: supertune_mine\ndataset_path: json\noutput_type: generate_until\n")
    *_, tasks, _ = python(FIND.format(arguments=f"include_path={str(tmp_path)!r}"))
    assert "supertune_mine" in tasks
    assert "supertune_math" in tasks


def test_start_up_loads_nothing_heavy():
    loaded = python("import sys; print([m for m in ('torch', 'peft', 'lm_eval', 'typing') if m in sys.modules])")
    assert loaded == ["[]"]


@pytest.mark.parametrize(("value", "loads"), [("1", True), ("0", False)])
@pytest.mark.slow
def test_plain_peft_loads_an_adapter_unless_opted_out(tiny_base, tiny_adapter, value, loads):
    code = (
        "from transformers import AutoModelForCausalLM\nfrom peft import PeftModel\n"
        f"base = AutoModelForCausalLM.from_pretrained({str(tiny_base)!r})\n"
        f"try: print(PeftModel.from_pretrained(base, {str(tiny_adapter)!r}).peft_config['default'].peft_type)\n"
        "except KeyError as error: print('KeyError', error)"
    )
    assert ("SUPRA" in python(code, AXOLOTL_SUPERTUNE_AUTOLOAD=value)[-1].split(".")[-1]) is loads or not loads
    assert ("KeyError" in python(code, AXOLOTL_SUPERTUNE_AUTOLOAD=value)[-1]) is not loads


@pytest.mark.slow
def test_an_error_in_a_hook_does_not_stop_python(tmp_path):
    (tmp_path / "axolotl_supertune").mkdir()
    (tmp_path / "axolotl_supertune/__init__.py").write_text("raise RuntimeError('broken')")
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import peft; print('alive')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "alive"
    assert "axolotl-supertune: not registered with peft: RuntimeError('broken')" in result.stderr


@pytest.mark.parametrize("name", BENCHMARKS)
def test_documents_are_whole_and_prompted_with_the_alpaca_template(name):
    documents = load(name)["test"]
    assert len(documents) == BENCHMARKS[name].records
    assert prompt(documents[0]) == alpaca_prompt(documents[0]["instruction"])
    assert set(documents["clean"]) == {-1}


def test_a_response_is_read_by_both_rules_and_scored():
    document = {"answer": "5.0", "kind": "number", "clean": -1}
    [[read]] = extract([["The answer is 5. ### Instruction: 7"]], [document])
    assert read == {"published": 7.0, "strict": 5.0}
    assert score(document, [read]) == {"acc": 0.0, "acc_strict": 1.0}
    letter = {"answer": "B", "kind": "letter", "clean": 1}
    [[read]] = extract([["Answer: (b)"]], [letter])
    assert score(letter, [read])["acc_strict_clean"] == 1.0


@pytest.mark.parametrize(
    ("clean", "expected"),
    [
        (-1, {"acc": 1.0, "acc_strict": 1.0}),
        (0, {"acc": 1.0, "acc_strict": 1.0, "n_clean": 0.0}),
        (1, {"acc": 1.0, "acc_strict": 1.0, "n_clean": 1.0, "acc_clean": 1.0, "acc_strict_clean": 1.0}),
    ],
)
def test_clean_metrics_count_clean_items_alone(clean, expected):
    document = {"answer": "2", "kind": "number", "clean": clean}
    assert score(document, [{"published": 2.0, "strict": 2.0}]) == expected


def evaluate(tasks, base, **more):
    from lm_eval import simple_evaluate

    return simple_evaluate(
        model="hf", model_args={"pretrained": str(base)}, tasks=tasks, device="cpu", bootstrap_iters=0, **more
    )


@pytest.mark.slow
def test_the_group_is_the_unweighted_mean_of_six(tiny_base, tmp_path):
    report = tmp_path / "report.json"
    from axolotl_supertune.tasks.contamination import contamination_report, write_report

    training = tmp_path / "train.jsonl"
    first = load("AddSub")["test"][0]["instruction"]
    training.write_text(json.dumps({"instruction": first, "output": "x"}) + "\n")
    write_report(contamination_report([str(training)]), report)
    results = evaluate(
        ["supertune_math"],
        tiny_base,
        limit=2,
        batch_size=12,
        gen_kwargs="max_gen_toks=4",
        metadata={"supertune_contamination": str(report)},
    )
    for metric in ("acc,none", "acc_strict,none", "acc_clean,none"):
        parts = [results["results"][name][metric] for name in NAMES]
        assert math.isclose(results["groups"]["supertune_math"][metric], sum(parts) / 6)
    assert results["results"]["supertune_addsub"]["n_clean,none"] == 1
    assert results["results"]["supertune_svamp"]["n_clean,none"] == 2
    untils = {json.dumps(results["configs"][name]["generation_kwargs"]["until"]) for name in NAMES}
    assert len(untils) == 1
    assert all(results["configs"][name]["generation_kwargs"]["do_sample"] is False for name in NAMES)


@pytest.mark.slow
def test_perplexity_equals_a_direct_computation(tiny_base):
    results = evaluate(["supertune_math_ppl"], tiny_base, limit=5, metadata={"pretrained": str(tiny_base)})
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    total = tokens = 0
    for record in gold_records("AddSub")[:5]:
        context = tokenizer(alpaca_prompt(record["instruction"]), add_special_tokens=False)["input_ids"]
        target = tokenizer(record["target"] + "</s>", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([context + target])
        with torch.no_grad():
            logits = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        total -= logits.gather(1, torch.tensor(target)[:, None]).sum().item()
        tokens += len(target)
    expected = math.exp(total / tokens)
    assert math.isclose(results["results"]["supertune_math_ppl"]["ppl,none"], expected, rel_tol=1e-4)
    assert math.isclose(results["results"]["supertune_math_ppl"]["ppl_addsub,none"], expected, rel_tol=1e-4)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_perplexity_takes_right_records_only_and_120_at_most(name):
    records = gold_records(name)
    assert 100 <= len(records) <= 120
    assert all(record["target"] for record in records)


@pytest.mark.slow
def test_the_eval_command_scores_an_adapter(tiny_base, tiny_adapter, tmp_path):
    from axolotl_supertune.commands.cli import supertune

    config = tmp_path / "run.yml"
    config.write_text(f"base_model: {tiny_base}\noutput_dir: {tmp_path}/none\n")
    arguments = ["eval", str(config), "--tasks", "supertune_math_ppl", "--limit", "2", "--device", "cpu"]
    refused = CliRunner().invoke(supertune, arguments)
    assert refused.exit_code == 1
    assert "holds no trained adapter" in refused.output
    output = tmp_path / "scores.json"
    scores = []
    for more in (["--adapter", str(tiny_adapter)], ["--base"]):
        result = CliRunner().invoke(supertune, [*arguments, *more, "--output", str(output)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        scores.append(json.loads(output.read_text())["results"]["supertune_math_ppl"]["ppl,none"])
    assert scores[0] != scores[1], "the adapter changed nothing"


def test_axolotls_own_lm_eval_command_can_name_base_and_adapter():
    from axolotl.integrations.lm_eval.cli import build_lm_eval_command, get_model_path
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"lm_eval_model": "BASE,peft=OUT", "lm_eval_tasks": ["supertune_math"], "output_dir": "OUT"})
    [command] = build_lm_eval_command(cfg.lm_eval_tasks, output_dir="OUT", model=get_model_path(cfg), batch_size=8)
    assert command[command.index("--model_args") + 1].startswith("pretrained=BASE,peft=OUT,")
    assert command[command.index("--tasks") + 1] == "supertune_math"
