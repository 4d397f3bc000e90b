"""The planner against other counts: published sizes, transformers' own models, torch's flop counter, files on disk."""

import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen2Config

from psd_utils import plan
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.pairs import Member, ModelFacts, Pair, load_pair, load_registry
from psd_utils.paths import registry_file
from psd_utils.plan import MACHINES, Shape, Size, plan_table, resources, shape_of, step_cost
from psd_utils.score import prepare, score_member
from psd_utils.study import run_study

A100, CORE = MACHINES["A100"], MACHINES["cpu core"]
# a pair, its family's configuration in transformers, and the parameters that the model cards state, in billions
MODELS = [
    ("olmo_sft_1b", Olmo2Config, 1.48),
    ("olmo_sft_7b", Olmo2Config, 7.30),
    ("math_1_5b", Qwen2Config, 1.54),
    ("math_7b", Qwen2Config, 7.61),
    ("smollm_instruct_1_7b", LlamaConfig, 1.71),
]


def shape(name):
    pair = load_pair(name)
    return shape_of(pair.base, pair.facts)


@pytest.mark.parametrize(("name", "config_class", "billions"), MODELS)
def test_parameters_are_those_published_and_those_of_transformers_own_model(name, config_class, billions):
    s = shape(name)
    assert s.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    config = config_class(
        vocab_size=s.rows,
        hidden_size=s.width,
        num_hidden_layers=s.layers,
        intermediate_size=s.mlp_width,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        tie_word_embeddings=s.tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert s.parameters == matrices
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(matrices, rel=1e-3)


@pytest.mark.parametrize("tokens", [7, 64])
def test_operations_of_a_forward_pass_are_those_that_torch_counts(tokens):
    base = load_pair("tiny_math").base
    s = shape_of(base, ModelFacts())
    folder = REPOSITORY / base.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    rotary = counter.get_total_flops() - s.forward_operations(tokens, attended=tokens) - s.head_operations(tokens)
    # the table of rotary angles is a product as well: half a head's width of positions
    assert 0 <= rotary <= 2 * tokens * s.width // s.heads


def test_disk_of_a_capture_is_what_its_files_take(tmp_path):
    pair = load_pair("tiny_math")
    task = prepare(pair, None, 5000)
    capture = score_member(task, "base", choose_device("cpu", "float32"), tmp_path)
    found = sum(path.stat().st_size for path in capture.folder.iterdir())
    assert step_cost("score", shape_of(pair.base, pair.facts), Size(5000, 512, itemsize=4)).disk == pytest.approx(
        found, rel=0.05
    )


def test_costs_grow_with_what_they_should_grow_with():
    s, size = shape("olmo_sft_7b"), Size(1_000_000, 4096)
    for step in ("score", "fit", "controls"):
        once, twice = step_cost(step, s, size), step_cost(step, s, replace(size, n_tokens=2_000_000))
        # the ladder's tokens are the same, however long the text
        assert twice.operations == pytest.approx(2 * once.operations, rel=0.03 if step == "controls" else 1e-9)
        assert twice.seconds(A100) > once.seconds(A100)
    fewer = step_cost("fit", s, replace(size, n_damage_seeds=0))
    assert fewer.operations < step_cost("fit", s, size).operations
    # the states of a million tokens of width 3,584 in bfloat16 are 7.2 GB, the head is 1.1 GB
    qwen = step_cost("score", shape("math_7b"), size)
    assert qwen.disk == pytest.approx(1e6 * 3584 * 2 + 152_064 * 3584 * 2, rel=0.01)
    assert qwen.device_memory > shape("math_7b").parameters * 2


def test_bias_on_all_tokens_costs_passes_only_where_its_statistics_exceed_the_budget(monkeypatch):
    s, size = shape_of(load_pair("tiny_math").base, ModelFacts()), Size(20_000, 512)
    stored = step_cost("fit", s, size).operations
    monkeypatch.setattr(plan, "STATISTICS_BUDGET", 4 * 513 * 20_000)
    assert step_cost("fit", s, size).operations > 5 * stored


def test_more_gpus_are_asked_for_only_where_a_model_exceeds_one():
    size, s = Size(1_000_000, 4096), shape("math_7b")
    huge = replace(s, layers=400)
    assert resources("score", s, size, A100, on_gpu=True).gpu == 1
    assert resources("score", huge, size, A100, on_gpu=True).gpu == 3
    assert huge.parameters * 2 / 80e9 == pytest.approx(2.5, abs=0.3)
    on_cpu = resources("fit", s, size, CORE, on_gpu=False)
    assert on_cpu.gpu == 0
    assert on_cpu.mem_mb > resources("fit", s, size, A100, on_gpu=True).mem_mb
    assert resources("figures", s, size, A100, on_gpu=True).gpu == 0
    assert resources("score", s, size, A100, on_gpu=True).runtime >= 15


def test_the_last_row_counts_a_shared_model_once():
    pairs = {name: load_pair(name) for name in ("olmo_sft_7b", "olmo_dpo_7b")}
    table = plan_table({name: (pair, Size.of(pair)) for name, pair in pairs.items()}, A100).set_index("pair")
    one = step_cost("score", shape("olmo_sft_7b"), Size.of(pairs["olmo_sft_7b"]))
    assert table.loc["all", "score_tflop"] == pytest.approx(3 * one.operations / 1e12)
    assert table.loc["olmo_sft_7b", "score_tflop"] == pytest.approx(2 * one.operations / 1e12)
    repeated = table.loc[["olmo_sft_7b", "olmo_dpo_7b"], "hours"].sum() - table.loc["all", "hours"]
    assert repeated == pytest.approx(one.seconds(A100) / 3600)
    assert table.loc["all", "tokens"] == 2_000_000


def test_a_model_of_unknown_size_is_named_and_leaves_a_gap_in_the_table():
    unknown = Pair(base="org/model", derived="org/other", name="mine", text="t")
    with pytest.raises(PsdError, match="org/model: its width, layers, mlp_width, heads, kv_heads, rows not known"):
        shape_of(unknown.base, unknown.facts)
    known = load_pair("math_7b")
    table = plan_table({"mine": (unknown, Size.of(unknown)), "math_7b": (known, Size.of(known))}, A100)
    assert table["hours"].isna().tolist() == [True, False, False]
    with pytest.raises(PsdError, match="no step 'scores'; did you mean 'score'"):
        step_cost("scores", shape("math_7b"), Size.of(known))


def test_a_notebooks_parameters_stand_over_the_registry():
    pair = load_pair("math_7b")
    assert Size.of(pair) == Size(1_000_000, 4096, 5, 2)
    given = {"n_tokens": 5000, "top_k": "", "n_damage_seeds": 2, "dtype": "float32"}
    assert Size.of(pair, given) == Size(5000, 4096, 2, 4)
    assert shape_of(Member("data/demo/base"), ModelFacts(layers=99)) == Shape(128, 3, 384, 4, 2, 4096, True)


def test_the_readmes_table_is_what_the_planner_says():
    registered = load_registry(registry_file())
    public = {name: (pair, Size.of(pair)) for name, pair in registered.items() if not name.startswith("tiny_")}
    table = plan_table(public, A100).set_index("pair")
    lines = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in (REPOSITORY / "README.md").read_text().splitlines()]
    stated = {cells[0]: cells[1:] for cells in lines if cells[0] in table.index or cells[0] == "**all**"}
    stated["all"] = [cell.strip("*") for cell in stated.pop("**all**")]
    assert set(stated) == set(table.index)
    for name, cells in stated.items():
        row = table.loc[name]
        wanted = [
            row["score_tflop"] / 1e3,
            row["fit_tflop"] / 1e3,
            row["controls_tflop"] / 1e3,
            row["traffic_gb"] / 1e3,
        ]
        wanted += [row["disk_gb"], row["memory_gb"], row["hours"]]
        found = [float(cell.replace(",", "")) for cell in cells]
        assert found == pytest.approx(wanted, rel=0.02, abs=0.06), name


@pytest.mark.slow
def test_operations_of_a_real_run_are_within_a_third_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import plan as benchmark

    pair = load_pair("tiny_math")
    with benchmark.counted() as found:
        run_study(pair, n_tokens=5000, device="cpu", n_damage_seeds=0, n_resamples=100, out_dir=tmp_path)
    s, size = shape_of(pair.base, pair.facts), Size(5000, 512, 0, 4)
    planned = 2 * step_cost("score", s, size, 250).operations + step_cost("fit", s, size).operations
    assert found["operations"] == pytest.approx(planned, rel=0.33)
    assert isinstance(plan_table({"tiny_math": (pair, size)}, CORE), pd.DataFrame)
