"""Documents -> token ids and splits: what is read, what is cut, where the splits fall, how a document is called."""

import gzip
import hashlib
import json
import random

import pytest
import torch
import zstandard
from conftest import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from psd_utils.corpus import (
    SPLITS,
    check_same_ids,
    encode,
    load_corpus,
    prefix_token,
    read_documents,
    special_ids,
    split_ends,
    tokenizer_sha256,
)
from psd_utils.errors import PsdError


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def lengths_in_tokens(corpus):
    return corpus.lengths.tolist()


def piece(corpus, d):
    return corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]].tolist()


# ---- reading


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd"])
def test_every_compression_gives_the_same_documents(tmp_path, write_documents, suffix):
    texts = ["first", "zweites Stück", "第三\u2028one line", ""]
    path = write_documents(tmp_path / f"text{suffix}", texts)
    found = list(read_documents(path))
    assert [document.text for document in found] == texts
    assert [document.key.split(":")[:2] for document in found] == [[path.name, str(n)] for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_every_frame_of_a_compressed_file_is_read(tmp_path, suffix):
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    # a frame may be empty, end in mid-line, or be far longer than one read
    parts = [
        line("one"),
        line("two")[:7],
        line("two")[7:],
        b"",
        *(line(f"{i} " * 3000) for i in range(200)),
        line("end"),
    ]
    path = tmp_path / f"text.jsonl{suffix}"
    path.write_bytes(b"".join(compress(part) for part in parts))
    texts = [document.text for document in read_documents(path)]
    assert len(texts) == 203
    assert texts[:2] == ["one", "two"]
    assert texts[-1] == "end"


def test_skippable_zstd_frames_are_skipped(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    frames = [zstandard.ZstdCompressor().compress(line(text)) for text in ("one", "two")]
    (tmp_path / "text.zst").write_bytes(skippable + frames[0] + skippable + frames[1])
    assert [document.text for document in read_documents(tmp_path / "text.zst")] == ["one", "two"]


def test_document_key_is_file_line_and_sha256_of_the_text(tmp_path):
    path = tmp_path / "a b.jsonl"
    path.write_bytes(line("same") + b"\n" + b'{"id": 7, "text": "same"}\n')
    digest = hashlib.sha256(b"same").hexdigest()[:12]
    # the blank line is no document but counts as a line
    assert [document.key for document in read_documents(path)] == [f"a b.jsonl:1:{digest}", f"a b.jsonl:3:{digest}"]


def test_local_names_with_marks_of_remote_ones_are_read(tmp_path, write_documents):
    path = write_documents(tmp_path / "a::b*[c].jsonl", ["text"])
    assert [document.text for document in read_documents(path)] == ["text"]


def test_half_a_surrogate_pair_is_read_as_replacement_character(tmp_path, tokenizer):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    texts = [document.text for document in read_documents(path)]
    assert texts == ["cut \ufffd", "whole \U0001f600"]
    assert all(encode(tokenizer, text) for text in texts)


def test_reading_stops_at_the_budget(tmp_path, tokenizer):
    """What lies beyond the tokens asked for is not looked at, so a budget can be taken from a huge file."""
    path = tmp_path / "text.jsonl"
    path.write_bytes(b"".join(line("7" * 10) for _ in range(30)) + b"not JSON")
    assert load_corpus(path, tokenizer, n_tokens=300).manifest["n_tokens"] == 300
    with pytest.raises(PsdError, match="line 31"):
        load_corpus(path, tokenizer, n_tokens=301)


# ---- tokens


def test_documents_are_cut_to_2047_tokens_and_counted(tmp_path, tokenizer, write_documents):
    sizes = [1, 2, 2047, 2048, 5000, *[1] * 1400, 300, 600, 3000, 3000, 3000]
    # digits are in no merge of the tokenizer: one token each
    path = write_documents(tmp_path / "text.jsonl", ["7" * n for n in sizes])
    corpus = load_corpus(path, tokenizer, n_tokens=10**6)
    assert lengths_in_tokens(corpus) == [min(n, 2047) for n in sizes]
    assert corpus.n_cut == 5
    assert corpus.cut == 2047
    short = load_corpus(path, tokenizer, n_tokens=10**6, cut=100)
    assert lengths_in_tokens(short) == [min(n, 100) for n in sizes]
    assert short.n_cut == 8


def test_empty_documents_are_counted_and_left_out(tmp_path, tokenizer, write_documents):
    path = write_documents(tmp_path / "text.jsonl", ["", "7" * 20, "", "7" * 2, *["7"] * 30, ""])
    corpus = load_corpus(path, tokenizer, n_tokens=10**6)
    assert corpus.n_empty == 3
    assert lengths_in_tokens(corpus) == [20, 2, *[1] * 30]
    assert [int(key.split(":")[1]) for key in corpus.keys[:2]] == [2, 4]


def test_every_token_is_the_text_and_no_other(text_file, documents, tokenizer):
    corpus = load_corpus(text_file, tokenizer, n_tokens=10**6)
    assert [tokenizer.decode(piece(corpus, d)) for d in range(len(corpus.keys))] == documents


def test_tokenizer_does_not_add_its_own_special_tokens(tmp_path, tokenizer, write_documents):
    greedy = make_tokenizer(["some text"])
    greedy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert greedy("a")["input_ids"][-1] == 2
    assert encode(greedy, "a") == greedy("a")["input_ids"][1:-1]


def test_saved_truncation_and_padding_do_not_shorten_documents(tmp_path):
    limited = make_tokenizer(["some text"])
    plain_hash = tokenizer_sha256(limited)
    limited.backend_tokenizer.enable_truncation(3)
    limited.backend_tokenizer.enable_padding(length=50)
    limited.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(encode(loaded, "7" * 20)) == 20
    assert tokenizer_sha256(loaded) == plain_hash


def test_text_of_a_special_token_becomes_that_token_and_is_scored(tmp_path, tokenizer, write_documents):
    """Special ids are left out of a correction's set, never out of the loss (DESIGN §2)."""
    path = write_documents(tmp_path / "text.jsonl", ["7<eos>7", *["77"] * 20])
    corpus = load_corpus(path, tokenizer, n_tokens=10**6)
    seven = encode(tokenizer, "7")[0]
    assert piece(corpus, 0) == [seven, 2, seven]


def test_special_ids_are_all_special_and_flagged_added_tokens(tokenizer):
    from tokenizers import AddedToken

    more = make_tokenizer(["some text"])
    length = len(more)
    more.add_tokens([AddedToken("<user>", special=True), AddedToken("plainword", special=False)])
    assert special_ids(tokenizer).tolist() == [0, 1, 2]
    assert special_ids(more).tolist() == [0, 1, 2, length]


def test_prefix_is_bos_else_eos_else_an_error(tokenizer):
    assert prefix_token(tokenizer) == 1
    lacking = make_tokenizer(["some text"])
    lacking.bos_token = None
    assert prefix_token(lacking) == 2
    lacking.eos_token = None
    with pytest.raises(PsdError, match=r"neither a BOS nor an EOS token.*set bos_token in its tokenizer_config.json"):
        prefix_token(lacking)


# ---- splits


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 5000))
def test_splits_partition_the_documents_in_file_order(lengths, n_tokens):
    fit, select, end = split_ends(lengths, n_tokens)
    assert 0 <= fit <= select <= end <= len(lengths)
    budget = min(n_tokens, sum(lengths))
    # every split ends with the document that reaches its share: at most one document more than the share
    for stop, share in ((fit, 0.45), (select, 0.5), (end, 1.0)):
        tokens = sum(lengths[:stop])
        assert tokens >= share * budget - 1e-9
        assert tokens - lengths[stop - 1] < share * budget


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 1000), st.integers(1, 9))
def test_splits_do_not_depend_on_what_follows_the_budget(lengths, n_tokens, more):
    reached = split_ends(lengths, min(n_tokens, sum(lengths)))
    assert split_ends([*lengths, *[7] * more], min(n_tokens, sum(lengths))) == reached


def test_splits_of_many_tokens_are_exact():
    """40 million tokens are more than float32 can count one by one."""
    lengths = [18_000_000, *[1] * 20, 21_999_995, 5]
    # fit ends at 18,000,009 tokens (after 9 of the single ones), select at 20,000,010
    assert sum(lengths) == 40_000_020
    assert split_ends(lengths, 10**9) == (10, 22, 23)


def test_corpus_splits_are_whole_documents_of_the_file(text_file, tokenizer):
    corpus = load_corpus(text_file, tokenizer, n_tokens=3000)
    documents = [d for split in SPLITS for d in corpus.documents(split)]
    assert documents == list(range(len(corpus.keys)))
    assert [int(key.split(":")[1]) for key in corpus.keys] == [d + 1 for d in documents]
    assert [corpus.split_of(d) for d in documents] == [split for split in SPLITS for _ in corpus.documents(split)]
    tokens = {split: int(corpus.lengths[list(corpus.documents(split))].sum()) for split in SPLITS}
    longest = int(corpus.lengths.max())
    assert 0 <= tokens["fit"] + tokens["select"] - 1500 < longest
    assert 0 <= tokens["fit"] - 1350 < longest
    assert sum(tokens.values()) == corpus.tokens.numel() < 3000 + longest
    with pytest.raises(PsdError, match="no split 'test': fit, select, eval"):
        corpus.documents("test")


def test_budget_is_what_the_text_holds_when_that_is_less(text_file, tokenizer):
    everything = load_corpus(text_file, tokenizer, n_tokens=10**9)
    exactly = load_corpus(text_file, tokenizer, n_tokens=everything.tokens.numel())
    assert everything.manifest == exactly.manifest
    assert len(everything.keys) == 120


def test_manifest_hash_follows_tokens_keys_and_splits(text_file, tmp_path, tokenizer, documents, write_documents):
    first = load_corpus(text_file, tokenizer, n_tokens=2000).manifest["sha256"]
    assert load_corpus(text_file, tokenizer, n_tokens=2000).manifest["sha256"] == first
    copy = write_documents(tmp_path / text_file.name, documents)
    assert load_corpus(copy, tokenizer, n_tokens=2000).manifest["sha256"] == first
    other_name = write_documents(tmp_path / "other.jsonl", documents)
    other_order = write_documents(tmp_path / "text2.jsonl", documents[::-1])
    found = {load_corpus(p, tokenizer, n_tokens=2000).manifest["sha256"] for p in (other_name, other_order)}
    assert len(found | {first}) == 3
    assert load_corpus(text_file, tokenizer, n_tokens=2500).manifest["sha256"] != first


# ---- two tokenizers


def test_tokenizers_that_differ_only_in_what_no_text_shows_are_accepted(text_file, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other.add_tokens(["<|tool_call|>"], special_tokens=True)
    assert tokenizer_sha256(other) != tokenizer_sha256(tokenizer)
    corpus = load_corpus(text_file, tokenizer, n_tokens=2000)
    check_same_ids(corpus, text_file, tokenizer, other)


def test_tokenizers_that_give_other_ids_are_refused_with_document_and_position(tmp_path, tokenizer, write_documents):
    from transformers import AutoTokenizer

    texts = [*["77"] * 20, "77 777 <user> 7", *["77"] * 35]
    path = write_documents(tmp_path / "text.jsonl", texts)
    corpus = load_corpus(path, tokenizer, n_tokens=10**6)
    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other.add_tokens(["<user>"], special_tokens=True)
    key = corpus.keys[20]
    assert key.startswith("text.jsonl:21:")
    at = len(encode(tokenizer, "77 777 "))
    with pytest.raises(PsdError) as caught:
        check_same_ids(corpus, path, tokenizer, other)
    message = str(caught.value)
    assert f"split {key} differently from token {at}" in message
    assert str(piece(corpus, 20)[at : at + 5]) in message
    assert "both must read identical ids" in message
    # beyond the cut nothing is read, so nothing differs
    cut = load_corpus(path, tokenizer, n_tokens=10**6, cut=at)
    check_same_ids(cut, path, tokenizer, other)


def test_a_tokenizer_that_reads_more_tokens_is_refused(tmp_path, tokenizer, write_documents):
    """One sequence may be the beginning of the other."""
    path = write_documents(tmp_path / "text.jsonl", ["77 "] * 20)
    corpus = load_corpus(path, tokenizer, n_tokens=10**6)

    class Longer:
        def __init__(self):
            self.backend_tokenizer, self.bos_token_id, self.eos_token_id = None, 1, 2
            self.all_special_ids = []

        def get_vocab(self):
            return {"7": 0}

        def __call__(self, text, **_):
            return {"input_ids": [*encode(tokenizer, text), 5]}

    with pytest.raises(
        PsdError, match=r"text.jsonl:1:\w+ differently from token 3: the base gives \[\], the derived model \[5\]"
    ):
        check_same_ids(corpus, path, tokenizer, Longer())


def test_loading_does_not_touch_random_state(text_file, tokenizer):
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    load_corpus(text_file, tokenizer, n_tokens=500)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
