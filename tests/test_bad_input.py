"""Bad input ends in an error that names where it is and what to do, or in a stated outcome; never in a number."""

import errno
import gzip
import json
import re
import resource

import pandas as pd
import pytest
import safetensors.torch
import torch
import zstandard
from conftest import Child, english_like, write_lines

from psd_utils import files, score
from psd_utils.corpus import load_corpus, read_documents
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.pairs import Pair
from psd_utils.score import prepare, score_member

CPU = choose_device("cpu", "float32")
pytestmark = pytest.mark.usefixtures("single_thread")


def lines(n=5):
    return [json.dumps({"text": f"document {i}"}).encode() for i in range(n)]


def error_of(path):
    with pytest.raises(PsdError) as caught:
        list(read_documents(path))
    return str(caught.value)


# ---- the text


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd"])
def test_empty_file_is_named(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(b"")
    assert error_of(path) == f"{path} is empty: expected one JSON object with a `text` field a line"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_nothing_is_empty_too(tmp_path, suffix):
    assert "is empty: expected one JSON object" in error_of(write_lines(tmp_path / f"text{suffix}", []))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_file_cut_in_mid_line_names_the_line(tmp_path, suffix):
    path = write_lines(tmp_path / f"text{suffix}", [*lines(3), lines(4)[3][:-5]])
    message = error_of(path)
    assert message.startswith(f"{path}, line 4: not a JSON object (")
    assert "is the file cut off" in message


def test_file_cut_inside_a_character_names_the_line(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe2\x82')
    assert f"{path}, line 2: not a JSON object (" in error_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [1, 4, 100])
def test_file_cut_in_mid_frame_is_an_error_and_not_an_end(tmp_path, suffix, cut):
    """zstandard's own reader ends silently there."""
    texts = english_like(3000, seed=21)
    path = write_lines(tmp_path / f"text{suffix}", (json.dumps({"text": text}).encode() for text in texts))
    path.write_bytes(path.read_bytes()[:-cut])
    assert re.search(r"is cut off or not what its suffix says, after line \d+: ", error_of(path))


def test_file_cut_in_the_header_of_a_later_frame_is_an_error(tmp_path):
    frame = zstandard.ZstdCompressor().compress(lines(1)[0] + b"\n")
    path = tmp_path / "text.zst"
    path.write_bytes(frame + frame[:3])
    message = error_of(path)
    assert message == f"{path} is cut off or not what its suffix says, after line 1: the last zstd frame is incomplete"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_or_mislabelled_compression_is_named(tmp_path, suffix):
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    whole = compress(b"\n".join(json.dumps({"text": text}).encode() for text in english_like(2000, seed=22)))
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 0xFF
    for name, content in (("damaged", damaged), ("trailing", whole + b"more"), ("plain", lines(1)[0] + b"\n")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        message = error_of(path)
        assert message.startswith(str(path))
        # a flipped byte may come out as another text, which is then no JSON
        assert "is cut off or not what its suffix says" in message or "not a JSON object" in message


def test_compressed_file_without_its_suffix_is_an_error(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(gzip.compress(lines(1)[0]))
    assert "line 1: not a JSON object" in error_of(path)
    assert "compressed without the suffix that says so?" in error_of(path)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"Text": "a", "id": 3}', "found the keys ['Text', 'id']"),
        (b'{"text": null}', "found `text` of type NoneType"),
        (b'{"text": ["a"]}', "found `text` of type list"),
        (b'["text"]', "found a list"),
        (b'"text"', "found a str"),
        (b"7", "found a int"),
    ],
)
def test_line_without_text_is_named_with_what_was_found(tmp_path, line, found):
    path = write_lines(tmp_path / "text.jsonl", [*lines(2), line])
    assert error_of(path) == f"{path}, line 3: expected an object with a `text` string, {found}"


@pytest.mark.parametrize("content", [b"plain words\n", b"text,id\na,1\n", b"\x00\x01\x02", b"{'text': 'a'}\n", b"[\n"])
def test_file_that_is_not_json_lines_is_refused(tmp_path, content):
    path = tmp_path / "text.jsonl"
    path.write_bytes(content)
    assert error_of(path).startswith(f"{path}, line 1: not a JSON object (")


def test_missing_file_and_folder_are_named(tmp_path):
    assert error_of(tmp_path / "none.jsonl") == f"no text at {tmp_path / 'none.jsonl'}"
    assert error_of(tmp_path) == f"{tmp_path} is a folder; give a JSON-lines file"


def test_address_that_cannot_be_read_is_named():
    assert error_of("nowhere://host/text.jsonl").startswith(
        "nowhere://host/text.jsonl could not be read, after line 0: "
    )


def test_text_without_any_token_counts_its_empty_documents(tmp_path, tokenizer, write_documents):
    path = write_documents(tmp_path / "text.jsonl", ["", "", ""])
    with pytest.raises(PsdError, match=r"text.jsonl holds no document with any token \(3 empty ones\)"):
        load_corpus(path, tokenizer, n_tokens=100)
    path.write_bytes(b"\n \n\n")
    with pytest.raises(PsdError, match=r"holds no document with any token \(0 empty ones\)"):
        load_corpus(path, tokenizer, n_tokens=100)


@pytest.mark.parametrize(
    ("sizes", "n_tokens", "found"),
    [
        ([50], 10**6, "1 documents with 50 tokens do not make three splits (documents: fit 1, select 0, eval 0)"),
        ([50, 50], 10**6, "2 documents with 100 tokens do not make three splits (documents: fit 1, select 0, eval 1)"),
        ([900, *[1] * 50], 10**6, "documents: fit 1, select 0, eval 50"),
        ([20] * 30, 20, "1 documents with 20 tokens do not make three splits (documents: fit 1, select 0, eval 0)"),
        ([20] * 30, 1, "documents: fit 1, select 0, eval 0"),
    ],
)
def test_fewer_documents_than_the_splits_need_are_counted(tmp_path, tokenizer, write_documents, sizes, n_tokens, found):
    path = write_documents(tmp_path / "text.jsonl", ["7" * n for n in sizes])
    with pytest.raises(PsdError) as caught:
        load_corpus(path, tokenizer, n_tokens=n_tokens)
    assert str(caught.value).startswith(f"{path}: ")
    assert found in str(caught.value)
    assert str(caught.value).endswith("give a text with more documents, or raise n_tokens")


def test_a_corpus_of_one_document_a_split_is_accepted(tmp_path, tokenizer, write_documents):
    path = write_documents(tmp_path / "text.jsonl", ["7" * 46, "7" * 5, "7" * 49])
    assert load_corpus(path, tokenizer, n_tokens=100).split_ends == (1, 2, 3)


# ---- tokenizers and heads


def test_members_with_other_ids_are_refused_before_anything_is_scored(tmp_path, make_model, write_documents):
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, seed=seed)
    # the derived tokenizer knows one word more
    path = tmp_path / "derived" / "tokenizer.json"
    rules = json.loads(path.read_text())
    kinds = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    rules["added_tokens"].append({"id": 400, "content": "document", **kinds, "special": False})
    path.write_text(json.dumps(rules))
    text = write_documents(
        tmp_path / "text.jsonl", [*english_like(20, seed=1), "a document", *english_like(20, seed=2)]
    )
    with pytest.raises(PsdError) as caught:
        prepare(Pair(str(tmp_path / "base"), str(tmp_path / "derived")), str(text), 10**6)
    assert re.search(r"split text\.jsonl:21:[0-9a-f]{12} differently from token 2: the base gives", str(caught.value))
    assert "the derived model [400]; both must read identical ids" in str(caught.value)


def test_token_ids_beyond_the_head_are_named_with_their_place(tmp_path, make_model, write_documents):
    """A tokenizer may have gaps, so that an id is larger than its length and than the head."""
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, seed=seed)
        path = tmp_path / name / "tokenizer.json"
        rules = json.loads(path.read_text())
        rules["model"]["vocab"]["7"] = 900
        path.write_text(json.dumps(rules))
    text = write_documents(tmp_path / "text.jsonl", [*english_like(20, seed=1), "88 7", *english_like(20, seed=2)])
    task = prepare(Pair(str(tmp_path / "base"), str(tmp_path / "derived")), str(text), 10**6)
    message = f"token id 900 at token 3 of document {task.corpus.keys[20]} is beyond the head of {tmp_path / 'base'}"
    with pytest.raises(PsdError, match=re.escape(f"{message}, 400 rows")):
        score_member(task, "base", CPU, tmp_path / "captures")


# ---- states that are not finite


def spoiled_pair(folder, make_model, text, change, dtype=torch.float32):
    make_model(folder / "base", tied=False, change=change, dtype=dtype)
    make_model(folder / "derived", tied=False, seed=1)
    return prepare(Pair(str(folder / "base"), str(folder / "derived")), str(text), 10**6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_state_that_is_not_finite_is_named_by_document_and_position(pair, tmp_path, monkeypatch, value):
    task = prepare(pair, None, 2000)
    corpus, states = task.corpus, score.batch_states

    def spoiled(model, corpus, batch, device):
        found = states(model, corpus, batch, device).clone()
        if 17 in batch:
            found[batch.index(17), 3:, 5] = value
        return found

    monkeypatch.setattr(score, "batch_states", spoiled)
    message = f"the hidden state at token 3 of document {corpus.keys[17]} is NaN or infinite; the stored weights may be"
    with pytest.raises(PsdError, match=re.escape(message)):
        score_member(task, "base", CPU, tmp_path)
    half = choose_device("cpu", "bfloat16")
    with pytest.raises(
        PsdError, match=r"is NaN or infinite; try dtype float32 \(now bfloat16\), unless the stored weights"
    ):
        score_member(task, "base", half, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embedding_that_is_not_finite_is_found_at_the_document_that_uses_it(
    tmp_path, make_model, tokenizer, write_documents, value
):
    nine = tokenizer.convert_tokens_to_ids("9")
    texts = [*english_like(30, seed=31), "88 9 88", *english_like(30, seed=32)]
    text = write_documents(tmp_path / "text.jsonl", texts)

    def spoil(model):
        model.model.embed_tokens.weight[nine] = value

    task = spoiled_pair(tmp_path, make_model, text, spoil)
    with pytest.raises(
        PsdError, match=r"hidden state at token \d of document text\.jsonl:31:[0-9a-f]{12} is NaN or inf"
    ):
        score_member(task, "base", CPU, tmp_path / "captures")
    # the other member is not affected
    score_member(task, "derived", CPU, tmp_path / "captures")


def test_weights_that_spoil_every_state_are_named_at_the_first_document(tmp_path, make_model, text_file):
    def spoil(model):
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")

    task = spoiled_pair(tmp_path, make_model, text_file, spoil)
    message = f"the hidden state at token 0 of document {task.corpus.keys[0]} is NaN or infinite"
    with pytest.raises(PsdError, match=re.escape(message)):
        score_member(task, "base", CPU, tmp_path / "captures")


def test_row_of_the_head_that_is_not_finite_is_named(tmp_path, make_model, text_file):
    """A single one would make every loss NaN."""

    def spoil(model):
        model.lm_head.weight[123, 7] = float("nan")

    task = spoiled_pair(tmp_path, make_model, text_file, spoil)
    with pytest.raises(
        PsdError, match=r"base: row 123 of the output head is NaN or infinite; the stored weights may be"
    ):
        score_member(task, "base", CPU, tmp_path / "captures")


def test_overflow_in_half_precision_advises_float32(tmp_path, make_model, text_file):
    """Large weights that float32 holds and float16 does not."""

    def enlarge(model):
        model.lm_head.weight[5] *= 1e6

    task = spoiled_pair(tmp_path, make_model, text_file, enlarge)
    with pytest.raises(
        PsdError, match=r"row 5 of the output head is NaN or infinite; try dtype float32 \(now float16\)"
    ):
        score_member(task, "base", choose_device("cpu", "float16"), tmp_path / "captures")
    score_member(task, "base", CPU, tmp_path / "captures")


# ---- a full disk


def test_full_disk_leaves_earlier_files_and_a_second_run_goes_on(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "SHARD_TOKENS", 150)
    task = prepare(pair, None, 2000)
    whole = score_member(task, "base", CPU, tmp_path / "whole")
    save, written = files.save_file, []

    def fill_up(tensors, path, metadata=None):
        if len(written) == 6:
            with open(path, "wb") as handle:
                handle.write(safetensors.torch.save(tensors, metadata)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata=metadata)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", fill_up)
        with pytest.raises(PsdError) as caught:
            score_member(task, "base", CPU, tmp_path / "full")
    (folder,) = (path for path in (tmp_path / "full").iterdir() if path.name != ".locks")
    assert f"could not write {folder}/hidden-00004.safetensors: [Errno 28] No space left on device" in str(caught.value)
    assert "what was there before is unchanged: put this right and run again" in str(caught.value)
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["corpus.safetensors", "head.safetensors", *(f"hidden-{i:05d}.safetensors" for i in range(4))]
    score_member(task, "base", CPU, tmp_path / "full")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in whole.folder.iterdir()
    }


@pytest.mark.parametrize("kind", ["tensors", "json", "table"])
def test_writer_that_runs_out_of_space_leaves_the_earlier_file(tmp_path, kind):
    """A real limit of the operating system, in a process of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"earlier")
    big = {"values": torch.rand(100_000)}
    write = {
        "tensors": lambda: files.write_tensors(path, big),
        "json": lambda: files.write_json(path, {"text": "x" * 400_000}),
        "table": lambda: files.write_table(path, pd.DataFrame({"values": big["values"].numpy()})),
    }[kind]

    def work(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(PsdError, match=r"could not write .*file: .*(File too large|errno 27|os error 27)"):
            write()

    assert Child(work).end() == 0
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]
    write()
    assert path.stat().st_size > 100_000


def test_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PsdError, match=f"could not write {re.escape(str(tmp_path))}/file/x.json: "):
        files.write_json(tmp_path / "file" / "x.json", {})


def test_interrupted_write_leaves_nothing_behind(tmp_path):
    def interrupted(path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(tmp_path / "file", interrupted)
    assert list(tmp_path.iterdir()) == []
