"""Scoring: every document's loss is transformers' own, in one dtype, whatever batch the document is in."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from conftest import TOKENIZER_LENGTH, english_like, make_adapter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from psd_utils import score
from psd_utils.capture import open_capture, plan_shards, verify
from psd_utils.corpus import SPLITS
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.kernels import corrected_losses
from psd_utils.models import load_model
from psd_utils.pairs import Member, ModelFacts, Pair
from psd_utils.score import batch_states, batches, prepare, score_member

CPU = choose_device("cpu", "float32")
pytestmark = pytest.mark.usefixtures("single_thread")


def pair_of(base, derived, text):
    return Pair(str(base), str(derived), text=str(text))


def losses_by_transformers(folder, corpus):
    """Every document's loss sum from transformers' own logits, one document at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = []
    for start, stop in zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True):
        ids = torch.cat([torch.tensor([corpus.prefix_id]), corpus.tokens[start:stop]])[None]
        with torch.inference_mode():
            output = model(input_ids=ids, labels=ids)
        loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="sum")
        assert math.isclose(float(loss), float(output.loss) * (stop - start), rel_tol=1e-5)
        sums.append(float(loss))
    return torch.tensor(sums, dtype=torch.float64)


def document_sums(capture):
    nll, lengths = capture.nll().double(), capture.corpus.lengths.tolist()
    return torch.stack([part.sum() for part in nll.split(lengths)])


@pytest.fixture(scope="module")
def long_text(tmp_path_factory, write_documents):
    """Documents of very different lengths, among them 1, 2, 2,047, 2,048 and 5,000 tokens."""
    texts = ["7", "77", "7" * 2047, *english_like(80, seed=11), "7" * 2048, "7" * 5000]
    return write_documents(tmp_path_factory.mktemp("long") / "long.jsonl.gz", texts)


# ---- the loss is the model's own


@pytest.mark.parametrize(
    ("architecture", "tied", "rows"),
    [("qwen2", True, 408), ("olmo2", False, 410), ("llama", False, 400), ("gemma2", True, 404)],
)
def test_loss_of_every_document_is_transformers_own(tmp_path, make_model, text_file, architecture, tied, rows):
    """Padded rows stay in the softmax, since that is the model's loss; soft-capping is part of it too."""
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, architecture, tied=tied, rows=rows, seed=seed)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 2000)
    for role in ("base", "derived"):
        capture = score_member(task, role, CPU, tmp_path / "captures")
        expected = losses_by_transformers(tmp_path / role, task.corpus)
        torch.testing.assert_close(document_sums(capture), expected, rtol=1e-4, atol=0)
        assert capture.manifest["tied"] is tied
        assert capture.head()[0].shape == (rows, 32)


def test_long_and_short_documents_are_scored_to_the_last_token(tmp_path, make_model, long_text):
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, seed=seed)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", long_text), None, 10**6)
    lengths = task.corpus.lengths.tolist()
    assert {1, 2, 2047} <= set(lengths)
    assert max(lengths) == 2047
    capture = score_member(task, "base", CPU, tmp_path / "captures")
    expected = losses_by_transformers(tmp_path / "base", task.corpus)
    torch.testing.assert_close(document_sums(capture), expected, rtol=1e-4, atol=0)


def test_states_of_the_capture_give_its_losses(pair, tmp_path):
    task = prepare(pair, None, 3000)
    capture = score_member(task, "derived", CPU, tmp_path)
    weight, readout = capture.head()
    sums = []
    for split in SPLITS:
        states = capture.states(split)
        assert states.keys == tuple(task.corpus.keys[d] for d in task.corpus.documents(split))
        logits = states.hidden.double() @ weight.double().T
        nll = torch.nn.functional.cross_entropy(logits, states.targets, reduction="none")
        sums.append(states.document_sums(nll))
    assert readout.softcap is None
    torch.testing.assert_close(torch.cat(sums), document_sums(capture), rtol=1e-6, atol=0)


def test_uniform_model_of_vocabulary_8_scores_ln_8(tmp_path, make_model, write_documents):
    words = ["<pad>", "<bos>", "<eos>", "a", "b", "c", "d", "e"]
    backend = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    small = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    for seed, name in enumerate(("base", "derived")):
        settings = {"rows": 8, "seed": seed, "tied": False, "with_tokenizer": False}
        make_model(tmp_path / name, change=lambda model: model.lm_head.weight.zero_(), **settings)
        small.save_pretrained(tmp_path / name)
    text = write_documents(tmp_path / "text.jsonl", ["a b c d e"] * 30)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text), None, 10**6)
    assert task.corpus.tokens.tolist() == [3, 4, 5, 6, 7] * 30
    nll = score_member(task, "base", CPU, tmp_path / "captures").nll()
    assert float((nll.double() - math.log(8)).abs().max()) < 1e-6


# ---- batches


def sums_in_batches(model, corpus, groups):
    """Loss sums by document, each group of documents in one batch."""
    sums = torch.zeros(len(corpus.keys), dtype=torch.float64)
    for group in groups:
        states = batch_states(model, corpus, group, torch.device("cpu"))
        for row, d in enumerate(group):
            tokens = corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]]
            losses = corrected_losses(states[row, : len(tokens)], model.head, tokens, [None], readout=model.readout)
            sums[d] = losses[0].double().sum()
    return sums


@pytest.mark.parametrize("architecture", ["qwen2", "olmo2", "llama", "gemma2"])
def test_loss_of_a_document_does_not_depend_on_its_batch(tmp_path, make_model, write_documents, architecture):
    text = write_documents(tmp_path / "text.jsonl", ["7", *english_like(80, seed=11), "7" * 300, "77"])
    make_model(tmp_path / "base", architecture, tied=False)
    make_model(tmp_path / "derived", architecture, tied=False, seed=1)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text), None, 10**6)
    corpus, model = task.corpus, load_model(task.base, CPU)
    documents = list(range(len(corpus.keys)))
    alone = sums_in_batches(model, corpus, [[d] for d in documents])
    random.Random(1).shuffle(documents)
    together = sums_in_batches(model, corpus, [documents[i : i + 32] for i in range(0, len(documents), 32)])
    assert len(documents) > 64
    assert (min(corpus.lengths.tolist()), max(corpus.lengths.tolist())) == (1, 300)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)


def test_batches_hold_every_document_once_longest_first_within_the_budget():
    lengths = [random.Random(3).randint(1, 2047) for _ in range(10)] + [
        random.Random(d).randint(1, 90) for d in range(300)
    ]
    groups = batches(range(310), lengths, 4096)
    assert sorted(d for group in groups for d in group) == list(range(310))
    for group in groups:
        assert lengths[group[0]] == max(lengths[d] for d in group)
        assert len(group) * lengths[group[0]] <= 4096 or len(group) == 1
    firsts = [lengths[group[0]] for group in groups]
    assert firsts == sorted(firsts, reverse=True)
    assert len(groups) < 30


def test_document_longer_than_the_batch_budget_is_scored_alone():
    assert batches(range(3), [10, 5000, 12], 4096) == [[1], [2, 0]]


def test_shards_hold_whole_documents_of_one_split(pair):
    corpus = prepare(pair, None, 4000).corpus
    shards = plan_shards(corpus, 300)
    assert [d for shard in shards for d in shard.documents] == list(range(len(corpus.keys)))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(len({corpus.split_of(d) for d in shard.documents}) == 1 for shard in shards)
    assert len(shards) > 10


# ---- dtypes


def test_both_members_are_scored_in_one_dtype_whatever_was_stored(tmp_path, make_model, text_file):
    make_model(tmp_path / "base", dtype=torch.float32)
    make_model(tmp_path / "derived", seed=1, dtype=torch.bfloat16)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)
    stored = {"base": "float32", "derived": "bfloat16"}
    for dtype in ("float32", "bfloat16"):
        for role in ("base", "derived"):
            capture = score_member(task, role, choose_device("cpu", dtype), tmp_path / "captures")
            states = capture.states("eval")
            assert states.hidden.dtype == capture.head()[0].dtype == getattr(torch, dtype)
            assert capture.manifest["identity"]["dtype"] == dtype
            assert capture.manifest["stored_dtype"] == stored[role]
            assert capture.nll().dtype == torch.float32
    capture = score_member(task, "derived", CPU, tmp_path / "captures")
    expected = losses_by_transformers(tmp_path / "derived", task.corpus)
    torch.testing.assert_close(document_sums(capture), expected, rtol=1e-4, atol=0)


def test_losses_of_bfloat16_states_are_not_rounded_to_bfloat16(tmp_path, make_model, text_file):
    """The states are half precision; logits and sums of a document's loss are not."""
    make_model(tmp_path / "base")
    make_model(tmp_path / "derived", seed=1)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)
    capture = score_member(task, "base", choose_device("cpu", "bfloat16"), tmp_path / "captures")
    weight, _ = capture.head()
    hidden = torch.cat([capture.states(split).hidden for split in SPLITS])
    logits = hidden.double() @ weight.double().T
    nll = torch.nn.functional.cross_entropy(logits, task.corpus.tokens, reduction="none")
    torch.testing.assert_close(capture.nll().double(), nll, rtol=1e-5, atol=1e-5)


# ---- heads


def test_heads_of_different_rows_are_accepted_each_with_its_own_softmax_and_a_note(tmp_path, make_model, text_file):
    make_model(tmp_path / "base", rows=408)
    make_model(tmp_path / "derived", rows=464, seed=1)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)
    assert task.notes == ("the base's head has 408 rows, the derived model's 464: each keeps its own softmax",)
    for role, rows in (("base", 408), ("derived", 464)):
        capture = score_member(task, role, CPU, tmp_path / "captures")
        assert capture.head()[0].shape[0] == rows
        expected = losses_by_transformers(tmp_path / role, task.corpus)
        torch.testing.assert_close(document_sums(capture), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("short", ["base", "derived"])
def test_head_shorter_than_the_tokenizer_is_refused_with_both_values(tmp_path, make_model, text_file, short):
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, rows=TOKENIZER_LENGTH - 10 if name == short else TOKENIZER_LENGTH, seed=seed)
    message = f"{tmp_path / short}: the head has 390 rows, too few for the 400 ids of the base's tokenizer"
    with pytest.raises(PsdError, match=re.escape(message)):
        prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)


def test_heads_of_the_same_rows_need_no_note(pair):
    assert prepare(pair, None, 1000).notes == ()


def test_derived_model_without_tokenizer_reads_the_bases_ids_and_a_note_says_so(tmp_path, make_model, text_file):
    make_model(tmp_path / "base")
    make_model(tmp_path / "derived", seed=1, with_tokenizer=False)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)
    assert task.notes == (f"{tmp_path / 'derived'} has no tokenizer of its own: the base's was used",)
    with pytest.raises(PsdError, match=r"the base .*derived has no tokenizer files \(tokenizer.json\)"):
        prepare(pair_of(tmp_path / "derived", tmp_path / "base", text_file), None, 1000)


def test_facts_of_the_registry_stop_a_run_that_does_not_find_them(pair, tmp_path):
    for name, value in (("tokenizer_length", 401), ("prefix_id", 2)):
        wrong = replace(pair, facts=ModelFacts(**{name: value}))
        with pytest.raises(PsdError, match=f"tokenizer of .*base: the registry expects {name} {value}, found"):
            prepare(wrong, None, 1000)
    with pytest.raises(PsdError, match=r"configuration of .*base: the registry expects layers 3, found 2"):
        prepare(replace(pair, facts=ModelFacts(layers=3)), None, 1000)
    task = prepare(pair, None, 1000)
    for facts, message in (
        (ModelFacts(head_rows=400), "head_rows 400, found 408"),
        (ModelFacts(tied=False), "tied False"),
    ):
        with pytest.raises(PsdError, match=f"the registry expects {message}"):
            score_member(task, "base", CPU, tmp_path, facts)


# ---- contexts


@pytest.mark.parametrize("shorter", ["base", "derived"])
def test_documents_are_cut_to_the_shorter_context_of_the_two(tmp_path, make_model, text_file, shorter):
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, seed=seed, max_position_embeddings=33 if name == shorter else 4096)
    task = prepare(pair_of(tmp_path / "base", tmp_path / "derived", text_file), None, 1000)
    # prefix and document fit the context together
    assert task.corpus.cut == int(task.corpus.lengths.max()) == 32
    capture = score_member(task, "base", CPU, tmp_path / "captures")
    assert capture.manifest["corpus"]["cut"] == 32
    assert capture.manifest["corpus"]["n_cut"] > 0


# ---- captures


def test_key_follows_everything_that_can_change_a_number(tmp_path, make_model, text_file, documents, write_documents):
    for seed, name in enumerate(("base", "derived", "other")):
        make_model(tmp_path / name, seed=seed)
    folder = tmp_path / "captures"
    pair = pair_of(tmp_path / "base", tmp_path / "derived", text_file)
    first = score_member(prepare(pair, None, 1000), "base", CPU, folder)
    # a base shared by pairs is scored once
    same = score_member(
        prepare(pair_of(tmp_path / "base", tmp_path / "other", text_file), None, 1000), "base", CPU, folder
    )
    assert same.folder == first.folder
    text = write_documents(tmp_path / "text.jsonl", documents[::-1])
    keys = {
        first.key,
        score_member(prepare(pair, None, 1000), "derived", CPU, folder).key,
        score_member(prepare(pair, None, 1000), "base", choose_device("cpu", "bfloat16"), folder).key,
        score_member(prepare(pair, None, 1200), "base", CPU, folder).key,
        score_member(prepare(pair, str(text), 1000), "base", CPU, folder).key,
    }
    assert len(keys) == 5
    assert {path.name for path in folder.iterdir() if path.name != ".locks"} == keys


def test_complete_capture_is_not_scored_again(pair, tmp_path, monkeypatch):
    task = prepare(pair, None, 1000)
    first = score_member(task, "base", CPU, tmp_path)
    monkeypatch.setattr(score, "load_model", lambda *_: pytest.fail("the model was loaded again"))
    assert score_member(task, "base", CPU, tmp_path).manifest == first.manifest
    assert verify(first) == []


def test_manifest_says_what_was_scored(pair, tmp_path):
    task = prepare(pair, None, 1000)
    capture = score_member(task, "base", CPU, tmp_path)
    manifest = open_capture(capture.folder).manifest
    assert manifest["label"] == pair.base.model
    assert manifest["corpus"] == task.corpus.manifest
    assert (manifest["tokenizer_length"], manifest["device"], manifest["architecture"]) == (400, "cpu", "Qwen2Model")
    assert set(manifest["files"]) == {path.name for path in capture.folder.iterdir()} - {"manifest.json"}
    assert "model.safetensors" in manifest["identity"]["model"]["content"]


def test_the_pair_of_the_fixtures_has_a_gap(pair, tmp_path):
    task = prepare(pair, None, 10**6)
    loss = {role: float(score_member(task, role, CPU, tmp_path).nll().double().mean()) for role in ("base", "derived")}
    assert 0.05 < loss["derived"] - loss["base"] < 0.8
    assert loss["base"] < math.log(TOKENIZER_LENGTH) - 2


def test_member_with_an_adapter_is_scored_as_peft_applies_it(tmp_path, make_model, text_file):
    base = make_model(tmp_path / "base")
    adapted = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    pair = Pair(str(tmp_path / "base"), Member(str(tmp_path / "base"), adapter=str(tmp_path / "adapter")))
    task = prepare(pair, str(text_file), 500)
    sums = document_sums(score_member(task, "derived", CPU, tmp_path / "captures"))
    corpus = task.corpus
    for d in range(len(corpus.keys)):
        tokens = corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]]
        with torch.inference_mode():
            ids = torch.cat([torch.tensor([corpus.prefix_id]), tokens])[None, :-1]
            own = torch.nn.functional.cross_entropy(adapted(input_ids=ids).logits[0], tokens, reduction="sum")
        assert math.isclose(float(sums[d]), float(own), rel_tol=1e-5)
    assert (
        score_member(task, "base", CPU, tmp_path / "captures").key
        != score_member(task, "derived", CPU, tmp_path / "captures").key
    )
