"""Write axolotl_supertune/method/selected_rates.csv from the paper's tables and the records in examples/paper/results.

    python tests/method/make_selected_rates.py PAPER.tex

tests/method/test_selected_rates.py reads both with these functions and compares them with the file.
"""

import csv
import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAPER = ROOT.parent / "shared/paper/super-tuning.tex"
RESULTS = ROOT / "examples/paper/results/smollm2-135m"
TARGET = ROOT / "axolotl_supertune/method/selected_rates.csv"

COLUMNS = (
    "model",
    "parameters",
    "dataset",
    "epochs",
    "method",
    "supra_lambda",
    "direction",
    "hybrid_beta",
    "score",
    "calibration",
    "learning_rate",
    "sparse_lr",
    "accuracy",
    "accuracy_before",
    "validation_nll",
    "validation_nll_before",
    "seeds",
    "source",
)
PARAMETERS = {"Llama-3.2-1B": "1235814400", "Meta-Llama-3-8B": "8030261248", "SmolLM2-135M": "134515008"}
EPOCHS = {"one": "1", "three": "3"}
DIRECTIONS = {"TopK": "top", "BottomK": "bottom", "RandK": "random", "Hybrid": "hybrid"}
SCORES = {
    "Super": "wanda",
    "Supra": "wanda",
    "Magnitude": "magnitude",
    "Supra-Mag": "magnitude",
    "SIFT": "gradient",
    "RoSA": "gradient",
}


def paper_rows(tex: str) -> list[dict[str, str]]:
    """The rows with a selected rate in the accuracy tables of the paper's appendix."""
    rows = []
    appendix = tex.partition("\\appendix")[2]
    for table in re.findall(r"\\begin\{table\}.*?\\end\{table\}", appendix, re.DOTALL):
        caption = table.partition(r"\caption{")[2].partition("\n")[0]
        header = next((line for line in table.splitlines() if r"\textbf{Selected LR}" in line), None)
        if header is None or "exact-answer accuracy" not in caption:  # the perplexity tables repeat these rates
            continue
        names = [re.sub(r"[^A-Za-z.]", "", re.sub(r"textbf|boldsymbol", "", cell)) for cell in _cells(header)]
        before = ""
        for line in table.splitlines():
            if not line.startswith((r"\algname", r"\textsc{Base}", "Full")):
                continue
            cells = dict(zip(names, _cells(line), strict=True))
            if line.startswith(r"\textsc"):
                before = cells["Average"]
                continue
            rows.append(_paper_row(cells, caption, before, re.search(r"\\label\{(.*?)\}", table)[1]))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removesuffix(r"\\").rstrip(" \\").split("&")]


def _paper_row(cells: dict[str, str], caption: str, before: str, label: str) -> dict[str, str]:
    name, _, setting = re.sub(r"\\algname\{(.*?)\}", r"\1", cells["Method"]).partition(" (")
    if cells["Method"] == "Full fine-tuning":
        name, setting = cells["Method"], ""
    direction = next((value for key, value in DIRECTIONS.items() if key in setting), "top" if name == "RoSA" else "")
    share = re.search(r"lambda=([\d.]+)", setting)
    model = re.search(r"Model: \\texttt\{(.*?)\}", caption)[1]
    calibration = cells.get("Calib.", "C4")  # the tables of hybrid supports say C4 in their caption
    mantissa, exponent = re.fullmatch(r"\$(?:(\d)\\cdot)?10\^\{(-\d)\}\$", cells["SelectedLR"]).groups()
    return dict.fromkeys(COLUMNS, "") | {
        "model": model,
        "parameters": PARAMETERS[model],
        "dataset": re.search(r"dataset: (\w+)", caption)[1],
        "epochs": cells.get("Epochs") or EPOCHS[re.search(r"budget: (one|three) epoch", caption)[1]],
        "method": name,
        "supra_lambda": share[1] if share else "",
        "direction": direction,
        "hybrid_beta": cells["beta"] if direction == "hybrid" else "",
        "score": "" if direction == "random" else SCORES.get(name, ""),
        "calibration": calibration.replace("--", ""),
        "learning_rate": f"{mantissa or 1}e{exponent}",
        "accuracy": re.sub(r"\\textbf\{(.*)\}", r"\1", cells["Average"]),
        "accuracy_before": before,
        "source": label,
    }


def record_rows() -> list[dict[str, str]]:
    """The rates that the records of SmolLM2-135M select, as `axolotl supertune report` sums them up."""
    with (RESULTS / "report/summary.csv").open(encoding="utf-8", newline="") as file:
        base, *methods = csv.DictReader(file)
    rows = []
    for summary in methods:
        config = yaml.safe_load(next((RESULTS / "runs" / summary["method"]).glob("*/config.yml")).read_text())
        name, share, direction = _method(config)
        score = config.get("mask_score", "") if direction not in ("", "random") else ""
        on_records = config.get("calibration_dataset") == "training_set"
        rows.append(
            dict.fromkeys(COLUMNS, "")
            | {
                "model": "SmolLM2-135M",
                "parameters": PARAMETERS["SmolLM2-135M"],
                "dataset": "gsm8k",
                "epochs": f"{float(summary['epochs']):g}",
                "method": name,
                "supra_lambda": share,
                "direction": direction,
                "hybrid_beta": f"{config['hybrid_beta']:g}" if direction == "hybrid" else "",
                "score": score,
                "calibration": ("training set" if on_records else "WikiText-2") if score == "wanda" else "",
                "learning_rate": _rate(float(summary["learning_rate"])),
                "sparse_lr": _rate(float(config["sparse_lr"])) if config.get("sparse_lr") else "",
                "accuracy": f"{100 * float(summary['accuracy_published_all']):.2f}",
                "accuracy_before": f"{100 * float(base['accuracy_published_all']):.2f}",
                "validation_nll": f"{float(summary['validation_nll']):.4f}",
                "validation_nll_before": f"{float(base['validation_nll']):.4f}",
                "seeds": summary["seeds"],
                "source": f"records: {summary['method']}",
            }
        )
    return rows


def more_rate_rows() -> list[dict[str, str]]:
    """Of the runs in more-rates, which were not scored, those with a lower validation NLL than the selected rate.

    Compared on the seed that both have; of several rates of a method the best.
    """
    rows = []
    for selected in record_rows():
        method = selected["source"].removeprefix("records: ")
        runs = [json.loads(path.read_text()) for path in (RESULTS / "more-rates" / method).glob("*/run.json")]
        if not runs:
            continue
        best = min(runs, key=_nll)
        rate, seed = float(selected["learning_rate"]), best["key"]["seed"]
        folder = RESULTS / "runs" / method / f"lr{rate:g}-ep{selected['epochs']}-seed{seed}"
        if _nll(best) < _nll(json.loads((folder / "run.json").read_text())):
            rows.append(
                selected
                | {
                    "learning_rate": _rate(best["key"]["learning_rate"]),
                    "accuracy": "",
                    "validation_nll": f"{_nll(best):.4f}",
                    "seeds": "1",
                    "source": f"more-rates: {method}",
                }
            )
    return rows


def _nll(run: dict) -> float:
    return run["eval_losses"][-1][1]


def _method(config: dict) -> tuple[str, str, str]:
    """(name in the paper, λ, direction) of a run."""
    adapter, score = config.get("adapter"), config.get("mask_score")
    if adapter is None:
        return "Full fine-tuning", "", ""
    if adapter == "lora":
        return "LoRA", "", ""
    names = {
        name: scored
        for name, scored in SCORES.items()
        if (name in ("Supra", "Supra-Mag", "RoSA")) == (adapter == "supra")
    }
    name = next(name for name, scored in names.items() if score.endswith(scored))
    return name, f"{config['supra_lambda']:g}" if adapter == "supra" else "", config["sparse_direction"]


def _rate(rate: float) -> str:
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def main() -> None:
    tex = Path(sys.argv[1] if len(sys.argv) > 1 else PAPER).read_text(encoding="utf-8")
    with TARGET.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(paper_rows(tex) + record_rows() + more_rate_rows())


if __name__ == "__main__":
    main()
