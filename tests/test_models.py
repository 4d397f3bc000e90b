"""Loading: what is accepted and reproduced, and what is refused rather than scored with random or wrong weights."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import TOKENIZER_LENGTH, make_adapter
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.models import load_model
from psd_utils.pairs import Member, ModelFacts
from psd_utils.sources import check_facts, load_config, load_tokenizer, locate, longest_context

CPU = choose_device("cpu", "float32")
pytestmark = pytest.mark.usefixtures("single_thread")
IDS = torch.tensor([[1, 50, 60, 70, 300, 5, 8, 9, 11, 390]])


def source(folder, **settings):
    return locate(Member(str(folder), **settings))


def load(folder, device=CPU, **settings):
    return load_model(source(folder, **settings), device)


def logits(loaded, ids=IDS):
    states = loaded.states(ids, torch.ones_like(ids))[0]
    return loaded.readout.logits((states @ loaded.head.T).float())


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- what is accepted


@pytest.mark.parametrize(
    ("architecture", "tied", "rows"),
    [("qwen2", True, 408), ("olmo2", False, 410), ("llama", False, 400), ("llama", True, 400), ("gemma2", True, 400)],
)
def test_split_model_gives_the_models_own_logits(tmp_path, make_model, architecture, tied, rows):
    model = make_model(tmp_path, architecture, tied=tied, rows=rows)
    loaded = load(tmp_path)
    assert loaded.tied is tied
    assert loaded.head.shape == (rows, 32)
    assert loaded.readout.softcap == (3.0 if architecture == "gemma2" else None)
    with torch.inference_mode():
        own = model(input_ids=IDS).logits[0]
    torch.testing.assert_close(logits(loaded), own, rtol=1e-5, atol=1e-5)


def test_models_are_loaded_in_the_dtype_asked_for_whatever_was_stored(tmp_path, make_model):
    make_model(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path)
    assert loaded.stored_dtype == "bfloat16"
    assert {p.dtype for p in loaded.backbone.parameters()} == {loaded.head.dtype} == {torch.float32}
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded.head, stored.float())
    half = load(tmp_path, choose_device("cpu", "bfloat16"))
    assert {p.dtype for p in half.backbone.parameters()} == {half.head.dtype} == {torch.bfloat16}


def test_default_dtype_is_float32_on_the_cpu_and_says_why():
    chosen = choose_device("cpu")
    assert (chosen.device.type, chosen.dtype_name) == ("cpu", "float32")
    assert chosen.reason == "cpu: asked for; float32: the default on cpu"
    assert choose_device("cpu", "bfloat16").reason == "cpu: asked for; bfloat16: asked for"
    assert choose_device("auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cpu:x"])
def test_device_that_is_not_there_is_named(device):
    with pytest.raises(PsdError, match=f"device {device!r} cannot be used here: "):
        choose_device(device)


def test_unknown_dtype_lists_the_nearest():
    with pytest.raises(PsdError, match=r"dtype 'float23': did you mean 'float32'"):
        choose_device("cpu", "float23")


def test_context_of_a_model_is_read_from_its_configuration(tmp_path, make_model):
    make_model(tmp_path, max_position_embeddings=77)
    assert longest_context(load_config(source(tmp_path))) == 77
    assert longest_context(object()) is None


def test_identity_of_a_folder_follows_its_content_and_not_its_place(tmp_path, make_model):
    for name in ("a", "b"):
        make_model(tmp_path / name)
    first, second = source(tmp_path / "a").identity, source(tmp_path / "b").identity
    assert first == second
    edit_weights(tmp_path / "b", lambda weights: weights["model.norm.weight"].add_(1e-3))
    assert source(tmp_path / "b").identity != first


# ---- tokenizers


def spelled_tokenizer():
    """A tokenizer whose rule for splitting a text is no known class's."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\s\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["12345 678 don't stop  it's "] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize("architecture", ["qwen2", "olmo2", "llama", "gemma2"])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(tmp_path, make_model, architecture, kind):
    """transformers' own choice of a class may replace the rule that splits a text, without a word."""
    make_model(tmp_path, architecture, with_tokenizer=False)
    spelled_tokenizer().save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    text = "I don't 1234567 <eos>  it's\n\n x"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    tokenizer = load_tokenizer(source(tmp_path))
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_special_tokens_that_only_a_class_names_are_found(tmp_path):
    """The repository of gpt2 says nowhere that <|endoftext|> is its BOS and EOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["some text"], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    tokenizer = load_tokenizer(source(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
    assert len(tokenizer) == backend.get_vocab_size()


def test_folder_without_a_vocabulary_has_no_tokenizer(tmp_path, make_model):
    make_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert (tmp_path / "tokenizer_config.json").is_file()
    assert load_tokenizer(source(tmp_path)) is None


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_damaged_tokenizer_is_named(tmp_path, make_model, content):
    make_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(PsdError, match=f"the tokenizer of {re.escape(str(tmp_path))} cannot be loaded: "):
        load_tokenizer(source(tmp_path))


# ---- what is refused


def test_missing_tied_weight_is_an_error_and_never_random_numbers(tmp_path, make_model):
    make_model(tmp_path, tied=True)
    edit_weights(tmp_path, lambda weights: weights.pop("model.embed_tokens.weight"))
    with pytest.raises(
        PsdError, match=r"the weights have no .*model.embed_tokens.weight; they would be random numbers"
    ):
        load(tmp_path)


def test_missing_head_weight_is_an_error_and_never_random_numbers(tmp_path, make_model):
    make_model(tmp_path, "olmo2", tied=False)
    edit_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(PsdError, match=r"the weights have no lm_head.weight; they would be random numbers, so nothing"):
        load(tmp_path)


def test_missing_inner_weight_is_an_error(tmp_path, make_model):
    make_model(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(PsdError, match=r"the weights have no model.layers.1.mlp.up_proj.weight; they would be random"):
        load(tmp_path)


def test_head_that_was_stored_apart_is_the_one_that_is_used(tmp_path, make_model):
    """A configuration that says tied, with a head of its own in the file."""
    make_model(tmp_path, tied=True)

    def untie(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2

    edit_weights(tmp_path, untie)
    loaded = load(tmp_path)
    assert loaded.tied is False
    assert torch.equal(loaded.head, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_weight_of_another_shape_is_named_with_both_shapes(tmp_path, make_model, name):
    make_model(tmp_path)
    shape = tuple(load_file(tmp_path / "model.safetensors")[name].shape)
    edit_weights(tmp_path, lambda weights: weights.update({name: weights[name][:-1].clone()}))
    found = (shape[0] - 1, *shape[1:])
    with pytest.raises(PsdError, match=re.escape(f"{name} is {found}, expected {shape}")):
        load(tmp_path)


def test_weights_that_are_left_over_are_only_mentioned(tmp_path, make_model, caplog):
    make_model(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"model.extra.weight": torch.ones(3)}))
    with caplog.at_level("WARNING", logger="psd_utils"):
        load(tmp_path)
    assert "weights that the architecture does not use: model.extra.weight" in caplog.text


def test_folder_with_pickled_weights_only_is_refused(tmp_path, make_model):
    model = make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(PsdError) as caught:
        source(tmp_path)
    assert f"model folder {tmp_path} has no safetensors weights" in str(caught.value)
    assert "it holds pickled weights (pytorch_model.bin), which are not loaded unless asked for by name" in str(
        caught.value
    )
    assert f"as {tmp_path / 'pytorch_model.bin'}" in str(caught.value)
    assert "save it with save_pretrained" in str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_weights_asked_for_by_name_are_the_safetensors_ones(tmp_path, make_model, sharded):
    model = make_model(tmp_path)
    expected = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    asked = tmp_path / "pytorch_model.bin"
    if sharded:
        asked = tmp_path / "pytorch_model.bin.index.json"
        names = sorted(state)
        parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for part, own in parts.items():
            torch.save({name: state[name] for name in own}, tmp_path / part)
        index = {"metadata": {}, "weight_map": {name: part for part, own in parts.items() for name in own}}
        asked.write_text(json.dumps(index))
    else:
        torch.save(state, asked)
    found = load(asked)
    ids = torch.arange(6)[None]
    assert torch.equal(found.states(ids, torch.ones_like(ids)), expected.states(ids, torch.ones_like(ids)))
    assert torch.equal(found.head, expected.head)
    member = Member(str(asked))
    assert member.leaf == tmp_path.name
    files = locate(member).identity["content"]
    assert any(name.endswith(".bin") for name in files)
    assert not any(name.endswith(".safetensors") for name in files)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, make_model):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (Path.touch, (marker,))

    torch.save({"model.embed_tokens.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PsdError, match="cannot be loaded"):
        load(tmp_path / "pytorch_model.bin")
    assert not marker.exists()


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(PsdError, match=r"has no safetensors weights: save it with save_pretrained"):
        source(tmp_path)


def test_integer_weights_are_refused_by_name(tmp_path, make_model):
    make_model(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(tmp_path, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(PsdError, match=rf"{re.escape(name)} in model.safetensors holds integers \(I8\)"):
        load(tmp_path)


def test_truncated_weights_are_refused(tmp_path, make_model):
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PsdError, match=f"{re.escape(str(tmp_path))}: model.safetensors is damaged "):
        load(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"model_type": "not_known"}, {"model_type": None}, {"hidden_size": "wide"}],
    ids=["type", "none", "value"],
)
def test_configuration_that_cannot_be_used_is_refused_by_name(tmp_path, make_model, values):
    make_model(tmp_path)
    edit_json(tmp_path / "config.json", **values)
    with pytest.raises(PsdError, match=f"the configuration of {re.escape(str(tmp_path))} cannot be loaded: "):
        load_config(source(tmp_path))
    with pytest.raises(PsdError, match=f"{re.escape(str(tmp_path))} cannot be loaded: "):
        load(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path, make_model):
    make_model(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit_json(tmp_path / "config.json", model_type="own", auto_map=auto_map)
    with pytest.raises(PsdError, match="custom code"):
        load_config(source(tmp_path))
    with pytest.raises(PsdError, match="custom code"):
        load(tmp_path)


def test_model_without_an_output_head_is_refused(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=TOKENIZER_LENGTH, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(PsdError, match=r"the weights have no cls\.predictions.*they would be random numbers"):
        load(tmp_path)


def test_output_layer_that_cannot_be_reproduced_is_refused(tmp_path, make_model, monkeypatch):
    """An architecture that does more between the last state and the logits than is known here."""
    from transformers import Qwen2ForCausalLM

    make_model(tmp_path)
    forward = Qwen2ForCausalLM.forward

    def shifted(self, *args, **settings):
        output = forward(self, *args, **settings)
        output.logits = output.logits + torch.arange(output.logits.shape[-1]) / 100
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", shifted)
    with pytest.raises(PsdError, match=r"its logits are not head · final state \(relative difference .*not scored"):
        load(tmp_path)


def test_revision_of_a_local_folder_is_refused(tmp_path, make_model):
    make_model(tmp_path)
    with pytest.raises(PsdError, match=r"is a local folder and has no revisions; leave out 'main'"):
        source(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["./models/none", "/models/none", "models/none/at all", "a b"])
def test_name_that_is_no_folder_and_no_repository_is_refused(name):
    with pytest.raises(PsdError, match=f"model {name!r} is neither a local folder nor a hub name such as Qwen/"):
        locate(Member(name))


def test_hub_name_that_cannot_be_reached_says_what_was_tried(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def unreachable(name, **settings):
        asked.append((name, settings["revision"]))
        raise LocalEntryNotFoundError("cannot reach the hub\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    message = "model 'org/none' at revision 'abc' is not a local folder and could not be fetched from the hub: "
    with pytest.raises(PsdError, match=f"^{re.escape(message)}cannot reach the hub$"):
        locate(Member("org/none", revision="abc"))
    assert asked == [("org/none", "abc")]


def test_only_weights_configurations_and_tokenizers_are_fetched(tmp_path, make_model, monkeypatch):
    import huggingface_hub

    make_model(tmp_path / "snapshots" / "abc123")

    def fetch(name, revision, allow_patterns):
        assert "*.safetensors" in allow_patterns
        assert not any(p.endswith((".bin", ".py", ".pt", "*")) for p in allow_patterns)
        return str(tmp_path / "snapshots" / "abc123")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert locate(Member("org/model", revision="main")).identity == {"repository": "org/model", "commit": "abc123"}


# ---- what the registry expects


def test_facts_that_differ_are_named_with_both_values():
    found = ModelFacts(head_rows=408, tokenizer_length=400, tied=True, prefix_id=1)
    check_facts("base", ModelFacts(), found)
    check_facts("base", found, found)
    check_facts("base", found, ModelFacts(head_rows=408))
    for name, value in (("head_rows", 410), ("tokenizer_length", 3), ("tied", False), ("prefix_id", 2)):
        with pytest.raises(PsdError, match=f"base: the registry expects {name} {value}, found {getattr(found, name)}"):
            check_facts("base", ModelFacts(**{name: value}), found)


# ---- adapters


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 300]},
    ],
    ids=["inner", "head", "embedding", "whole", "tokens"],
)
def test_merged_adapter_gives_the_loss_of_the_applied_one(tmp_path, make_model, tied, settings):
    """Also where the adapter changes only one side of a tied embedding, which merging alone would get wrong."""
    base = make_model(tmp_path / "base", tied=tied)
    adapted = make_adapter(base, tmp_path / "adapter", **settings)
    loaded = load(tmp_path / "base", adapter=str(tmp_path / "adapter"))
    with torch.inference_mode():
        own = torch.nn.functional.cross_entropy(adapted(input_ids=IDS[:, :-1]).logits[0], IDS[0, 1:])
        plain = torch.nn.functional.cross_entropy(base(input_ids=IDS[:, :-1]).logits[0], IDS[0, 1:])
        ours = torch.nn.functional.cross_entropy(logits(loaded, IDS[:, :-1]), IDS[0, 1:])
    assert abs(float(own - plain)) > 0.05
    assert math.isclose(float(ours), float(own), rel_tol=1e-5)
    one_side = "lm_head" in settings["target_modules"] or "embed_tokens" in settings["target_modules"]
    assert loaded.tied is (tied and not one_side and "modules_to_save" not in settings)


def test_adapter_is_merged_in_float32_before_the_model_is_rounded(tmp_path, make_model):
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    adapted = make_adapter(base.float(), tmp_path / "adapter", spread=0.02, target_modules=["q_proj"])
    loaded = load(tmp_path / "base", choose_device("cpu", "bfloat16"), adapter=str(tmp_path / "adapter"))
    expected = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight.bfloat16()
    assert torch.equal(loaded.backbone.layers[0].self_attn.q_proj.weight, expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("layers", [1, 3])
def test_adapter_of_another_base_is_refused_and_never_half_applied(tmp_path, make_model, layers):
    make_adapter(make_model(tmp_path / "trained_on"), tmp_path / "adapter", target_modules=["q_proj"])
    make_model(tmp_path / "base", num_hidden_layers=layers)
    with pytest.raises(PsdError) as caught:
        load(tmp_path / "base", adapter=str(tmp_path / "adapter"))
    assert f"adapter {tmp_path / 'adapter'} does not fit {tmp_path / 'base'}: only one of the two has" in str(
        caught.value
    )
    assert f"layers.{1 if layers == 1 else 2}.self_attn.q_proj.lora_A" in str(caught.value)
    assert "is this the base that the adapter was trained on?" in str(caught.value)


def test_folder_that_is_no_adapter_is_refused(tmp_path, make_model):
    for name in ("base", "other"):
        make_model(tmp_path / name)
    with pytest.raises(PsdError, match=r"adapter .*other does not fit .*base: Can't find 'adapter_config.json'"):
        load(tmp_path / "base", adapter=str(tmp_path / "other"))


def test_adapter_is_part_of_the_identity(tmp_path, make_model):
    base = make_model(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    with_adapter = source(tmp_path / "base", adapter=str(tmp_path / "adapter")).identity
    assert with_adapter["content"] == source(tmp_path / "base").identity["content"]
    assert "adapter_model.safetensors" in with_adapter["adapter"]["content"]
