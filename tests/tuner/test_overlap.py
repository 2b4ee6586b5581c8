"""`axolotl supertune overlap`: what adapters' supports share, and what is refused."""

import csv
import io
import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from axolotl_supertune import SupraConfig, calibrate
from axolotl_supertune.commands.overlap import overlap
from axolotl_supertune.tuner.overlap import POOLED, Overlap, Support, overlaps, short_names


@pytest.fixture
def make(tiny_llama, tmp_path):
    """Save an adapter of the tiny Llama, untrained: its support is chosen all the same."""

    def make(name, base=None, norms=None, **knobs):
        config = SupraConfig(**{"r0": 4, "mask_score": "magnitude", "supra_lambda": 0, **knobs}, activation_norms=norms)
        model = get_peft_model(base if base is not None else tiny_llama(), config)
        model.save_pretrained(tmp_path / name / "adapter")
        return tmp_path / name / "adapter"

    return make


def run(*arguments):
    return CliRunner().invoke(overlap, [str(argument) for argument in arguments])


@pytest.fixture
def as_json(tmp_path):
    """A function (*adapters) → the command's result and the records that --json wrote."""

    def as_json(*adapters):
        result = run(*adapters, "--json", tmp_path / "overlap.json")
        assert result.exit_code == 0, result.output
        return result, json.loads((tmp_path / "overlap.json").read_text(encoding="utf-8"))

    return as_json


def support(indices, rows=4, columns=5):
    return Support(rows, columns, torch.tensor(sorted(indices), dtype=torch.int64))


sets = st.sets(st.integers(0, 19))


@given(st.lists(st.tuples(sets, sets), min_size=1, max_size=4))
def test_as_sets_have_it(layers):
    first, second = ({f"layers.{at}.q": support(pair[side]) for at, pair in enumerate(layers)} for side in (0, 1))
    found = {each.layer: each for each in overlaps({"a": first, "b": second})}
    for at, (a, b) in enumerate(layers):
        each = found[f"layers.{at}.q"]
        assert (each.size, each.in_a, each.in_b, each.shared) == (20, len(a), len(b), len(a & b))
        assert each.jaccard == (len(a & b) / len(a | b) if a | b else None)
    union = sum(len(a | b) for a, b in layers)
    assert found[POOLED].jaccard == (sum(len(a & b) for a, b in layers) / union if union else None)
    assert ("*.q" in found) == (len(layers) > 1)


def test_what_chance_gives():
    """All pairs of supports with 6 and 4 of 12 entries: the mean Jaccard index, exact to a part in their number."""
    mine = set(range(6))
    all_pairs = [mine & set(other) for other in itertools.combinations(range(12), 4)]
    mean = sum(len(shared) / (10 - len(shared)) for shared in all_pairs) / len(all_pairs)
    each = Overlap("a", "b", "q", 12, 6, 4, 0, 6 * 4 / 12)
    assert each.chance == sum(map(len, all_pairs)) / len(all_pairs)
    assert each.expected == pytest.approx(mean, rel=1 / 10)
    torch.manual_seed(0)
    drawn = {name: {"q": support(torch.randperm(40_000)[:8000].tolist(), 200, 200)} for name in "ab"}
    (total,) = (each for each in overlaps(drawn) if each.layer == POOLED)
    assert total.jaccard == pytest.approx(total.expected, rel=0.05)
    assert total.expected == pytest.approx(1 / 9)


def test_ends_of_the_scores_and_one_support_twice(make, as_json):
    bottom, top = make("bottom"), make("top", sparse_direction="top")
    again = make("again", lora_alpha=32)
    hybrid = make("hybrid", sparse_direction="hybrid", hybrid_beta=0.25)
    _, records = as_json(bottom, top, again, hybrid)
    pooled = {(each["a"], each["b"]): each for each in records if each["layer"] == POOLED}
    assert len(pooled) == 6
    assert pooled["bottom", "top"]["shared"] == 0
    assert pooled["bottom", "again"]["jaccard"] == 1
    # 3/4 of the entries are bottom's: 3 / (4 + 4 − 3).
    assert pooled["bottom", "hybrid"]["jaccard"] == pytest.approx(0.6, rel=0.01)
    assert pooled["top", "hybrid"]["jaccard"] == pytest.approx(1 / 7, rel=0.02)


def test_two_calibrations(make, as_json, llama, ids):
    """What the calibration ablation asks: the same score, on norms of one text and of another."""
    supports = []
    for name, tokens in (("one", ids), ("other", ids.flip(0) * 3 % 97)):
        supports.append(make(name, norms=calibrate(llama, [tokens], progress=False), mask_score="wanda", r0=2))
    _, [*_, total] = as_json(*supports)
    assert (total["a"], total["b"], total["layer"]) == ("one", "other", POOLED)
    assert total["expected_jaccard"] < total["jaccard"] < 1


def test_table_matrix_and_csv(make, tmp_path):
    paths = [make("bottom"), make("top", sparse_direction="top"), make("random", sparse_direction="random")]
    pair = run(*paths[:2])
    assert pair.exit_code == 0, pair.output
    for expected in ("a: bottom, b: top", "model.layers.1.mlp.down_proj", "*.q_proj", POOLED, "0.0000"):
        assert expected in pair.output
    several = run(*paths, "--output", tmp_path / "overlap.csv")
    assert several.exit_code == 0, several.output
    lines = [line for line in several.output.splitlines() if line.startswith(("│ bottom", "│ top", "│ random"))]
    assert len(lines) == 3
    assert "0.0000" in lines[0]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "overlap.csv").read_text(encoding="utf-8"))))
    assert len(rows) == 3 * (14 + 7 + 1)
    assert {(row["a"], row["b"]) for row in rows} == {("bottom", "top"), ("bottom", "random"), ("top", "random")}
    assert run(*paths, "--output", tmp_path / "overlap.json").exit_code == 0
    records = json.loads((tmp_path / "overlap.json").read_text(encoding="utf-8"))
    assert [{key: str(value) for key, value in record.items()} for record in records] == rows
    for row in rows:
        both = int(row["in_a"]) + int(row["in_b"]) - int(row["shared"])
        assert float(row["jaccard"]) == pytest.approx(int(row["shared"]) / both)


def test_an_adapter_without_a_sparse_part_shares_nothing(make, as_json):
    _, records = as_json(make("super"), make("low_rank", supra_lambda=1))
    assert records[-1]["jaccard"] == 0
    result = run(make("one", supra_lambda=1), make("two", supra_lambda=1))
    assert result.exit_code == 0, result.output
    assert "–" in result.output


def test_other_layers_and_shapes_are_refused(make, tiny_llama):
    first = make("first")
    fewer = make("fewer", target_modules=["q_proj", "k_proj"])
    assert "adapt different layers: only one of them has model.layers.0.mlp.down_proj" in run(first, fewer).output
    wide = make("wide", base=tiny_llama(intermediate_size=128))
    result = run(first, wide)
    assert result.exit_code == 1
    assert "model.layers.0.mlp.down_proj is 64 × 128 in" in result.output


@pytest.fixture
def of(make):
    """A function (adapter, base, **more) → an adapter whose config names that base."""

    def of(name, base, **more):
        folder = make(name)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"base_model_name_or_path": str(base), **more}))
        return folder

    return of


@pytest.fixture
def noted(as_json):
    """A function (*adapters) → what is said of the bases; the supports are compared all the same."""

    def noted(*adapters):
        result, records = as_json(*adapters)
        assert records[-1]["jaccard"] == 1
        notes, _, wrote = result.stderr.rpartition("wrote ")
        assert wrote.endswith("overlap.json\n")
        return notes

    return noted


@pytest.mark.parametrize("shards", ["5GB", "60KB"])
def test_bases_of_other_names_are_told_apart_by_their_weights(of, noted, tiny_llama, tmp_path, shards):
    tiny_llama().save_pretrained(tmp_path / "base")
    tiny_llama().save_pretrained(tmp_path / "moved", max_shard_size=shards)
    changed = tiny_llama()
    changed.model.layers[1].self_attn.k_proj.weight.data[0, 0] += 1
    changed.save_pretrained(tmp_path / "changed", max_shard_size=shards)
    first = of("first", tmp_path / "base")
    assert noted(first, of("same", tmp_path / "base" / ".." / "base")) == ""
    moved = noted(first, of("second", tmp_path / "moved"))
    assert f"name different bases, {tmp_path / 'moved'} and {tmp_path / 'base'}: the same weights (21 tensors" in moved
    other = noted(first, of("third", tmp_path / "changed"))
    assert "other weights: 1 of 21 tensors differ (model.layers.1.self_attn.k_proj.weight)." in other
    tiny_llama(seed=1).save_pretrained(tmp_path / "drawn")
    assert "other weights: 16 of 21 tensors differ" in noted(first, of("fourth", tmp_path / "drawn")), "norms are 1"


def test_a_base_in_the_hubs_cache_is_read_there(of, noted, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--nobody--cached"
    tiny_llama().save_pretrained(tmp_path / "base")
    tiny_llama().save_pretrained(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert "the same weights" in noted(of("first", tmp_path / "base"), of("second", "nobody/cached"))


def test_of_a_base_that_is_not_here_nothing_is_claimed(of, noted, tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base", max_shard_size="60KB")
    first = of("first", tmp_path / "base")
    for name in (tmp_path / "gone", "nobody/nothing"):
        assert f"not checked: those of {name} are not here" in noted(first, of("second", name))
    next((tmp_path / "base").glob("model-00002-of-*.safetensors")).unlink()
    tiny_llama().save_pretrained(tmp_path / "whole")
    assert f"not checked: those of {tmp_path / 'base'} are not here" in noted(first, of("third", tmp_path / "whole"))
    (tmp_path / "whole" / "model.safetensors").write_text("hello")
    tiny_llama().save_pretrained(tmp_path / "base")
    result = run(of("fourth", tmp_path / "whole"), of("fifth", "nobody/nothing"))
    assert (result.exit_code, "whole/model.safetensors is not a readable" in result.output) == (1, True)


def test_revisions_quantization_and_many_adapters_of_one_other_base(of, noted):
    first = of("first", "nobody/nothing")
    quantized = of("quantized", "nobody/nothing", base_quantization={"load_in_4bit": True})
    said = noted(first, quantized)
    assert 'base_quantization {"load_in_4bit": true} and none, so that' in said
    assert "not checked" not in said
    second, third = (of(name, "nobody/nothing", revision="v2") for name in ("second", "third"))
    said = noted(first, second, third)
    assert said.count("name different bases") == 1
    assert f"{second}, {third} and {first} name" in said
    assert "nobody/nothing (revision v2) and nobody/nothing: whether they are the same weights was not checked" in said


def test_what_cannot_be_compared_is_named(make, tiny_llama, tmp_path):
    first = make("first")
    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    assert "lora holds a PeftType.LORA adapter" in run(first, tmp_path / "lora").output
    assert "holds no adapter_config.json" in run(first, tmp_path).output
    assert "name two adapters or more" in run(first).output
    assert "named twice" in run(first, first).output


def test_a_support_that_is_still_to_be_chosen_is_none(make):
    first = make("first")
    result = run(first, make("warming", supra_lambda=0.5, mask_score="squared_gradient", low_rank_warmup_steps=4))
    assert result.exit_code == 1
    assert "its support is still to be chosen; take a later checkpoint" in result.output


def test_short_names(tmp_path):
    grid = [tmp_path / "runs" / method / rate / "adapter" for method in ("top", "bottom") for rate in ("lr1", "lr2")]
    assert short_names(grid) == ["top/lr1", "top/lr2", "bottom/lr1", "bottom/lr2"]
    assert short_names(grid[::2]) == ["top", "bottom"]
    assert short_names([tmp_path / "a", tmp_path / "a" / "b"]) == ["a", "a/b"]
