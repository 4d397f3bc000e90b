"""The script that made the shipped tiny models, on a few steps, and what it says about the shipped files."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "data" / "demo"
MODELS = ["base", "anneal", "math", "code", "math_light", "instruct", "dpo"]
LIMIT = 19_000_000


def train(out: Path) -> Path:
    """A complete smoke run; leaves the number of threads as it was."""
    threads = torch.get_num_threads()
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import train_demo

        assert train_demo.main(["--smoke", "--out", str(out)]) == 0
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return train(tmp_path_factory.mktemp("first"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_smoke_run_learns(smoke):
    report = json.loads((smoke / "report.json").read_text("utf-8"))
    stages = report["stages"]
    assert stages["base"]["loss_last"] < stages["base"]["loss_first"] - 0.3
    for name in ("math", "code", "instruct", "dpo"):
        assert stages[name]["loss_last"] < stages[name]["loss_first"], name
    losses = report["loss"]
    assert losses["base"]["prose"] < losses["anneal"]["prose"] < math.log(400)
    assert all(math.isfinite(x) for kinds in losses.values() for x in kinds.values())


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_load_again(smoke, name):
    model = AutoModelForCausalLM.from_pretrained(smoke / name)
    tokenizer = AutoTokenizer.from_pretrained(smoke / name)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 400
    ids = tokenizer("def f(x): return x", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "def f(x): return x"
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_same_seed_same_weights(smoke, tmp_path):
    again = train(tmp_path / "again")
    for name in MODELS:
        assert digest(smoke / name / "model.safetensors") == digest(again / name / "model.safetensors"), name


def test_finished_stages_are_not_run_again(smoke):
    before = {name: (smoke / name / "model.safetensors").stat().st_mtime_ns for name in MODELS}
    train(smoke)
    assert before == {name: (smoke / name / "model.safetensors").stat().st_mtime_ns for name in MODELS}


@pytest.fixture(scope="module")
def report():
    return json.loads((DEMO / "report.json").read_text("utf-8"))


def test_shipped_files_match_the_manifest():
    manifest = json.loads((DEMO / "manifest.json").read_text("utf-8"))
    files = {p.relative_to(DEMO).as_posix() for p in DEMO.rglob("*") if p.is_file()}
    assert files - {"manifest.json", "README.md"} == set(manifest["files"])
    for name, entry in manifest["files"].items():
        assert digest(DEMO / name) == entry["sha256"], name
    assert sum((DEMO / name).stat().st_size for name in files) <= LIMIT
    for source in manifest["sources"].values():
        assert source["licence"]
        assert source["version"]
        assert len(source["sha256_of_listing"]) == 64


def test_shipped_models_pass_their_gates(report):
    assert report["unigram_loss_prose"] - report["loss"]["base"]["prose"] >= 2.0
    for name, kind in {"math": "math", "code": "code", "math_light": "math", "instruct": "instruct"}.items():
        gain = report["loss"]["base"][f"heldout_{kind}"] - report["loss"][name][f"heldout_{kind}"]
        assert gain >= 0.2, name
    assert report["preference_accuracy"]["implicit_reward"] >= 0.7
    for name, gap in report["gap_on_prose"].items():
        if name == "anneal":
            assert gap["high"] < 0
        else:
            assert gap["low"] > 0, name
            assert 0.05 <= gap["gap"] <= 0.8, name
    assert report["all_gates_pass"]
    assert report["tokens"]["prose"] >= 220_000
    assert report["tokens"]["reference"] >= 60_000
    assert report["longest_document"] <= 510


@pytest.mark.parametrize("name", MODELS)
def test_shipped_weights_are_what_is_promised(name):
    config = json.loads((DEMO / name / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    weights = load_file(DEMO / name / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights["model.embed_tokens.weight"].shape == (4096, 128)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(DEMO / name)
    assert len(tokenizer) == 4096
    special = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(5)] == special
    assert set(range(5)) <= set(tokenizer.all_special_ids)
