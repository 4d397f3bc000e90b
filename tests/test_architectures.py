"""Architectures: each one's loss is transformers' own, tied and untied, padded, from shards; others are refused."""

import math
import re

import pytest
import torch
import transformers
from conftest import TOKENIZER_LENGTH, make_adapter, perturb, train_a_little
from transformers import AutoModelForCausalLM

import psd_utils as psd
from psd_utils import devices
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.models import load_model
from psd_utils.pairs import Member, Pair
from psd_utils.score import prepare, score_member
from psd_utils.sources import locate

CPU = choose_device("cpu", "float32")
HALF = choose_device("cpu", "bfloat16")
ROWS = TOKENIZER_LENGTH + 8
IDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = IDS | {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GPT = IDS | {"vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
GEMMA = SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8}
WITHOUT_GROUPS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
# (configuration, model, settings), then what lies between product and logits: scale, cap, and whether there is a bias
ARCHITECTURES = {
    "OLMo-2": ("Olmo2Config", "Olmo2ForCausalLM", SIZES, 1.0, None, False),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES, 1.0, None, False),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SIZES, 1.0, None, False),
    "Gemma-2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA | {"final_logit_softcapping": 3.0}, 1.0, 3.0, False),
    "Gemma-3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA, 1.0, None, False),
    "Gemma-3 capped": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"final_logit_softcapping": 3.0},
        1.0,
        3.0,
        False,
    ),
    "Granite": ("GraniteConfig", "GraniteForCausalLM", SIZES | {"logits_scaling": 4.0}, 0.25, None, False),
    "Cohere": ("CohereConfig", "CohereForCausalLM", SIZES | {"logit_scale": 0.25}, 0.25, None, False),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT, 1.0, None, False),
    "Pythia": ("GPTNeoXConfig", "GPTNeoXForCausalLM", WITHOUT_GROUPS, 1.0, None, False),
    "GPT-J": ("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, 1.0, None, True),
    "Phi": ("PhiConfig", "PhiForCausalLM", SIZES, 1.0, None, True),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
        1.0,
        None,
        False,
    ),
    "OLMoE": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2},
        1.0,
        None,
        False,
    ),
}
pytestmark = pytest.mark.usefixtures("single_thread")


def make(folder, name, tokenizer, *, tied, seed=0, change=None):
    """Save a tiny random-weight model of an architecture, in shards of at most 20 kB; norms are random too."""
    config, model_class, settings = ARCHITECTURES[name][:3]
    return save(folder, config, model_class, settings, tokenizer, tied=tied, seed=seed, change=change)


def save(folder, config, model_class, settings, tokenizer, *, tied=True, seed=0, change=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        configuration = getattr(transformers, config)(**settings | {"tie_word_embeddings": tied})
        model = getattr(transformers, model_class)(configuration).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += torch.randn_like(parameter) * 0.2
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    return model


def losses_by_transformers(folder, corpus):
    """Every document's loss sum as transformers itself computes it, one document at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = []
    for start, stop in zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True):
        ids = torch.cat([torch.tensor([corpus.prefix_id]), corpus.tokens[start:stop]])[None]
        with torch.inference_mode():
            sums.append(float(model(input_ids=ids, labels=ids).loss) * (stop - start))
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_of_every_document_is_transformers_own(tmp_path, tokenizer, text_file, name):
    make(tmp_path / "tied", name, tokenizer, tied=True)
    make(tmp_path / "untied", name, tokenizer, tied=False, seed=1)
    assert len(list((tmp_path / "tied").glob("model-*.safetensors"))) > 2
    task = prepare(Pair(str(tmp_path / "tied"), str(tmp_path / "untied")), str(text_file), 500)
    _, _, _, scale, cap, biased = ARCHITECTURES[name]
    for role, folder in (("base", "tied"), ("derived", "untied")):
        capture = score_member(task, role, CPU, tmp_path / "captures")
        sums = torch.stack([part.sum() for part in capture.nll().double().split(task.corpus.lengths.tolist())])
        torch.testing.assert_close(sums, losses_by_transformers(tmp_path / folder, task.corpus), rtol=1e-4, atol=0)
        weight, readout = capture.head()
        assert weight.shape == (ROWS, 32)
        assert (readout.scale, readout.softcap, readout.bias is not None) == (scale, cap, biased)
        assert capture.manifest["tied"] is (folder == "tied")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_is_accepted_too(tmp_path, tokenizer, name):
    make(tmp_path, name, tokenizer, tied=False)
    loaded = load_model(locate(Member(str(tmp_path))), HALF)
    assert loaded.head.dtype == torch.bfloat16


REFUSED = {
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "logits_soft_cap": 30.0,
        },
        "this output layer cannot be reproduced, so it is not scored",
    ),
    "MPT": (
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "logit_scale": 0.3},
        "this output layer cannot be reproduced, so it is not scored",
    ),
    "BERT": (
        "BertConfig",
        "BertLMHeadModel",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
        "this output layer cannot be reproduced, so it is not scored",
    ),
    "XLNet": (
        "XLNetConfig",
        "XLNetLMHeadModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
        "a prediction changes with the tokens that follow it; only causal models are scored",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_that_is_not_known_is_refused_by_name(tmp_path, tokenizer, name):
    """In half precision as well, where a mild soft-capping is smaller than the model's own rounding."""
    config, model_class, settings, reason = REFUSED[name]
    save(tmp_path, config, model_class, IDS | {"vocab_size": ROWS} | settings, tokenizer)
    with pytest.raises(PsdError, match=rf"{tmp_path} \({model_class}\): .*{re.escape(reason)}"):
        load_model(locate(Member(str(tmp_path))), CPU)
    with pytest.raises(PsdError, match=rf"{tmp_path} \({model_class}\).* so it is not scored|only causal models"):
        load_model(locate(Member(str(tmp_path))), HALF)


def test_model_that_calls_only_a_part_of_its_backbone_is_accepted(tmp_path, tokenizer):
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    settings = IDS | sizes | {"vocab_size": ROWS, "max_position_embeddings": 256, "word_embed_proj_dim": 16}
    model = save(tmp_path, "OPTConfig", "OPTForCausalLM", settings, tokenizer)
    loaded = load_model(locate(Member(str(tmp_path))), CPU)
    ids = torch.tensor([[1, 50, 60, 399, 5]])
    with torch.inference_mode():
        own = model(input_ids=ids).logits[0]
    ours = loaded.readout.logits(loaded.states(ids, torch.ones_like(ids))[0] @ loaded.head.T)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "tied"), [("Qwen2", True), ("OLMo-2", False)])
def test_whole_study_of_a_pair(tmp_path, tokenizer, text_file, name, tied):
    """A padded, tied Qwen2 and a padded, untied OLMo-2: losses by hand from transformers' logits."""
    base = make(tmp_path / "base", name, tokenizer, tied=tied, change=lambda m: train_a_little(m, tokenizer, 80))

    def forget(model):
        model.load_state_dict(base.state_dict())
        perturb(model)

    make(tmp_path / "derived", name, tokenizer, tied=tied, change=forget)
    pair = psd.Pair(str(tmp_path / "base"), str(tmp_path / "derived"), text=str(text_file), top_k=32)
    options = {"n_tokens": 1500, "device": "cpu", "n_damage_seeds": 1, "n_resamples": 200}
    study = psd.run_study(pair, **options, out_dir=tmp_path / "results")
    assert study.captures["base"].manifest["tied"] is tied
    assert 0 < study.summary["padded_mass"]["derived"] < 0.2
    row = study.recovery.set_index("correction").loc["bias_temperature"]
    assert row["gap"] > 0.05
    assert math.isfinite(row["excess_share"])
    assert row["gain_derived"] > 0
    corpus = study.captures["derived"].corpus
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "derived", dtype=torch.float32).eval()
    correction = study.corrections["derived", "bias_temperature"]
    total = tokens = 0
    for d in corpus.documents("eval"):
        ids = torch.cat([torch.tensor([corpus.prefix_id]), corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]]])
        with torch.inference_mode():
            logits = correction.apply(model(input_ids=ids[None]).logits[0, :-1].double())
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    assert math.isclose(total / tokens, row["loss_derived"], rel_tol=1e-5)


# ---- larger than one device


@pytest.mark.parametrize("memory", ["60KB", "20KB"], ids=["part on disk", "all on disk"])
@pytest.mark.parametrize(("name", "tied"), [("Qwen2", True), ("OLMo-2", False), ("Phi", False)])
def test_model_that_does_not_fit_is_spread_and_scores_the_same(
    tmp_path, tokenizer, text_file, monkeypatch, caplog, name, tied, memory
):
    """accelerate keeps what exceeds the memory on disk and fetches it layer by layer."""
    make(tmp_path / "base", name, tokenizer, tied=tied)
    make(tmp_path / "derived", name, tokenizer, tied=tied, seed=1)
    task = prepare(Pair(str(tmp_path / "base"), str(tmp_path / "derived")), str(text_file), 500)
    plain = score_member(task, "base", CPU, tmp_path / "plain")
    monkeypatch.setattr(devices, "SPREAD_MEMORY", {"cpu": memory})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spread = choose_device("spread", "float32")
    assert spread.reason == "cpu: no CUDA device; float32: asked for; models spread over all devices"
    with caplog.at_level("INFO", logger="psd_utils"):
        capture = score_member(task, "base", spread, tmp_path / "spread")
    assert re.search(r"base lies on (cpu, )?disk", caplog.text)
    assert capture.key == plain.key
    assert capture.manifest["tied"] is tied
    torch.testing.assert_close(capture.nll(), plain.nll(), rtol=1e-6, atol=1e-6)
    assert torch.equal(capture.head()[0], plain.head()[0])


def test_adapter_on_a_spread_model_is_refused(tmp_path, tokenizer):
    base = make(tmp_path / "base", "Llama", tokenizer, tied=True)
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(PsdError, match="an adapter is merged on one device; merge it and save the model"):
        load_model(locate(Member(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))), choose_device("spread"))
