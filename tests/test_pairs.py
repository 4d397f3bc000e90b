"""Which two models: the registry against facts typed in here, the user's own pairs, and errors that name the entry."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

from psd_utils.errors import PsdError, nearest
from psd_utils.pairs import Member, ModelFacts, Pair, load_pair, load_registry, load_texts, resolve_text
from psd_utils.paths import registry_file

TINY = ["tiny_instruct", "tiny_dpo", "tiny_math", "tiny_math_light", "tiny_code", "tiny_anneal"]
COMMITS = {
    "allenai/OLMo-2-0425-1B": "a1847dff35000b4271fa70afc5db10fd29fedbdf",
    "allenai/OLMo-2-0425-1B-SFT": "0d85a3d037876ce6ac7d4311d994400fc66ac27f",
    "allenai/OLMo-2-0425-1B-DPO": "c4b0485961ab24c2433b090f3b922f0913a9290f",
    "allenai/OLMo-2-0425-1B-Instruct": "48d788eca847d4d7548f375ad03d3c9312f6139e",
    "allenai/OLMo-2-1124-7B": "7df9a82518afdecae4e8c026b27adccc8c1f0032",
    "allenai/OLMo-2-1124-7B-SFT": "1de02c0175118a9de5854aec80a1f970e701e928",
    "allenai/OLMo-2-1124-7B-DPO": "e34ea60adff2e575f4fe7569eaffd1b28509b6fd",
    "allenai/OLMo-2-1124-7B-Instruct": "470b1fba1ae01581f270116362ee4aa1b97f4c84",
    "Qwen/Qwen2.5-1.5B": "8faed761d45a263340a0528343f099c05c9a4323",
    "Qwen/Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
    "Qwen/Qwen2.5-Math-1.5B": "4a83ca6e4526a4f2da3aa259ec36c259f66b2ab2",
    "Qwen/Qwen2.5-Coder-1.5B": "df3ce67c0e24480f20468b6ef2894622d69eb73b",
    "Qwen/Qwen2.5-7B": "d149729398750b98c0af14eb82c78cfe92750796",
    "Qwen/Qwen2.5-7B-Instruct": "a09a35458c702b33eeacc393d103063234e8bc28",
    "Qwen/Qwen2.5-Math-7B": "b101308fe89651ea5ce025f25317fea6fc07e96e",
    "Qwen/Qwen2.5-Coder-7B": "0396a76181e127dfc13e5c5ec48a8cee09938b02",
    "HuggingFaceTB/SmolLM2-1.7B": "effd688a12921b4cc83e3312b6feb579f70f9c71",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "31b70e2e869a7173562077fd711b654946d38674",
}
STAGE_1 = "9d3e43659f00c17e6da23cf32333afd1fc39fa1a"
# head rows, tokenizer length, tied, prefix id; width, layers, width of the layers between, heads, their keys' heads
OLMO = ModelFacts(100352, 100278, False, 100257, 2048, 16, 8192, 16, 16)
OLMO_LARGE = ModelFacts(100352, 100278, False, 100257, 4096, 32, 11008, 32, 32)
QWEN_SMALL = ModelFacts(151936, 151665, True, 151643, 1536, 28, 8960, 12, 2)
QWEN_LARGE = ModelFacts(152064, 151665, False, 151643, 3584, 28, 18944, 28, 4)
SMOLLM = ModelFacts(49152, 49152, True, 0, 2048, 24, 8192, 32, 32)
PUBLIC = {
    "olmo_sft_1b": ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B-SFT", "sft", OLMO),
    "olmo_dpo_1b": ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B-DPO", "dpo", OLMO),
    "olmo_instruct_1b": ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B-Instruct", "instruct", OLMO),
    "olmo_anneal_1b": ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B", "anneal", OLMO),
    "olmo_sft_7b": ("allenai/OLMo-2-1124-7B", "allenai/OLMo-2-1124-7B-SFT", "sft", OLMO_LARGE),
    "olmo_dpo_7b": ("allenai/OLMo-2-1124-7B", "allenai/OLMo-2-1124-7B-DPO", "dpo", OLMO_LARGE),
    "olmo_instruct_7b": ("allenai/OLMo-2-1124-7B", "allenai/OLMo-2-1124-7B-Instruct", "instruct", OLMO_LARGE),
    "qwen_instruct_1_5b": ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B-Instruct", "instruct", QWEN_SMALL),
    "math_1_5b": ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-Math-1.5B", "math", QWEN_SMALL),
    "coder_1_5b": ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-Coder-1.5B", "code", QWEN_SMALL),
    "qwen_instruct_7b": ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "instruct", QWEN_LARGE),
    "math_7b": ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Math-7B", "math", QWEN_LARGE),
    "coder_7b": ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B", "code", QWEN_LARGE),
    "smollm_instruct_1_7b": ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "instruct", SMOLLM),
}


# ---- the shipped registry


def test_registry_holds_the_tiny_and_the_public_pairs_and_no_others():
    assert sorted(load_registry(registry_file())) == sorted([*TINY, *PUBLIC])
    assert len(PUBLIC) == 14


@pytest.mark.parametrize("name", PUBLIC)
def test_public_pair_has_its_identities_revisions_and_facts(name):
    base, derived, kind, facts = PUBLIC[name]
    pair = load_pair(name)
    assert (pair.name, pair.base.model, pair.derived.model, pair.kind) == (name, base, derived, kind)
    assert pair.base.revision == (STAGE_1 if name == "olmo_anneal_1b" else COMMITS[base])
    assert pair.derived.revision == COMMITS[derived]
    assert all(re.fullmatch("[0-9a-f]{40}", member.revision) for member in (pair.base, pair.derived))
    assert pair.facts == facts
    assert (pair.text, pair.n_tokens, pair.dtype, pair.licence) == ("olmo_mix", 1_000_000, "bfloat16", "Apache-2.0")


@pytest.mark.parametrize("name", TINY)
def test_tiny_pair_hangs_on_the_shipped_folder(name):
    pair = load_pair(name)
    assert pair.base.model.startswith("data/demo/")
    assert pair.derived.model.startswith("data/demo/")
    assert (pair.text, pair.top_k, pair.dtype, pair.n_tokens) == ("demo_prose", 512, "float32", 100_000)
    assert pair.kind == name.removeprefix("tiny_").removesuffix("_light")


def test_anneal_pair_ends_at_the_other_tiny_pairs_base():
    assert load_pair("tiny_anneal").derived == load_pair("tiny_math").base


def test_texts_are_pinned_and_licensed():
    texts = load_texts(registry_file())
    assert "@99ee6aaace88779d1ef099d36251b91101c1679b/" in texts["olmo_mix"].path
    assert texts["olmo_mix"].path.startswith("hf://datasets/allenai/olmo-mix-1124")
    assert texts["olmo_mix"].path.endswith(".jsonl.zstd")
    assert all(text.licence for text in texts.values())
    assert all(pair.text in texts for pair in load_registry(registry_file()).values())


def test_registry_says_that_the_public_list_is_a_reconstruction():
    assert "RECONSTRUCTION" in (REPOSITORY / "data" / "pairs.yaml").read_text(encoding="utf-8")


# ---- names


def test_unknown_pair_lists_the_nearest_names():
    with pytest.raises(PsdError, match=r"no pair named 'tiny_maths'; did you mean 'tiny_math'"):
        load_pair("tiny_maths")
    with pytest.raises(PsdError, match=r"no pair named 'zzz'; known: tiny_instruct, .*smollm_instruct_1_7b"):
        load_pair("zzz")
    with pytest.raises(PsdError, match=r"no pair named 7; known: "):
        load_pair(7)


def test_nearest_prefers_the_closest_name():
    assert nearest("n_token", ["n_tokens", "seed", "pair"]) == "did you mean 'n_tokens'?"
    assert nearest("x", ["abc", "def"]) == "known: abc, def"


def test_own_pair_is_named_after_both_leaves_and_a_hash():
    pair = Pair("org/base-model", "other/Derived.Model")
    assert re.fullmatch(r"base-model--Derived\.Model-[0-9a-f]{8}", pair.name)
    assert pair.name == Pair(Member("org/base-model"), Member("other/Derived.Model")).name
    others = [
        Pair("org2/base-model", "other/Derived.Model"),
        Pair(Member("org/base-model", revision="abc"), "other/Derived.Model"),
        Pair("org/base-model", Member("other/Derived.Model", adapter="org/adapter")),
        Pair(Member("org/base-model", adapter="abc"), "other/Derived.Model"),
    ]
    assert len({p.name for p in [pair, *others]}) == 5


def test_own_pair_has_one_name_from_every_folder(root, tmp_path, monkeypatch):
    """A path under the root, found from elsewhere, is the same pair as the absolute path."""
    for name in ("base", "derived"):
        (root / "own" / name).mkdir(parents=True, exist_ok=True)
    names = []
    for folder in (root, tmp_path, root / "own"):
        monkeypatch.chdir(folder)
        names.append(Pair("own/base", "own/derived").name)
    names.append(Pair(str(root / "own" / "base"), f"{root}/own/x/../derived/").name)
    assert len(set(names[:3])) == 1
    monkeypatch.chdir(root / "own")
    assert Pair("base", "derived").name == names[0]
    assert Pair("base", "derived", name="given").name == "given"


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a\\b", "../../etc"])
def test_names_that_would_leave_the_results_folder_are_refused(name):
    with pytest.raises(PsdError, match=r"would leave the results folder; use letters, digits, - and _"):
        Pair("a", "b", name=name)


def test_folders_with_odd_leaves_still_make_a_name(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    names = [Pair(base, "org/derived").name for base in ("..", ".", "/", ".cache", "~")]
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert names[0].startswith("model--derived-")
    assert names[3].startswith("cache--derived-")


# ---- values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_tokens": 0}, "n_tokens must be a whole number of at least 1, found 0"),
        ({"n_tokens": 1e6}, "n_tokens must be a whole number of at least 1, found 1000000.0"),
        ({"top_k": True}, "top_k must be a whole number of at least 1, found True"),
        ({"dtype": "bf16"}, "dtype 'bf16': did you mean"),
        ({"text": 5}, "text must be text, found 5"),
        ({"name": 5}, "name must be text, found 5"),
    ],
)
def test_bad_values_of_a_pair_are_named(settings, message):
    with pytest.raises(PsdError, match=re.escape(message)):
        Pair("a", "b", **settings)


def test_members_are_text_and_two_different_models():
    with pytest.raises(PsdError, match=r"base and derived are the same model, org/model at abc"):
        Pair(Member("org/model", "abc"), Member("org/model", "abc"))
    assert Pair(Member("org/model", "abc"), Member("org/model", "def")).base.label == "org/model at abc"
    with pytest.raises(PsdError, match=r"revision must be text, found 7 \(int\); quote it in YAML"):
        Member("org/model", revision=7)
    with pytest.raises(PsdError, match=r"a member needs a model: a local folder or a hub name"):
        Member("")
    with pytest.raises(PsdError, match=r"derived must be a path, a hub name or a Member, found None"):
        Pair("a", None)


# ---- registries that are not as they should be


@pytest.mark.parametrize(
    ("registry", "message"),
    [
        ("pairs: {p: {derived: b}}", "pair p has no `base`"),
        ("pairs: {p: {base: a, derived: b, txt: c}}", "pair p: unknown key 'txt'; did you mean 'text'?"),
        ("pairs: {p: {base: a, derived: b, facts: {rows: 3}}}", "pair p: facts: unknown key 'rows'; did you mean"),
        ("pairs: {p: {base: a, derived: b, facts: 3}}", "pair p: facts must be a mapping, found 3"),
        ("pairs: {p: {base: {revision: x}, derived: b}}", "pair p: base has no `model`"),
        ("pairs: {p: {base: {model: a, rev: x}, derived: b}}", "pair p: base: unknown key 'rev'; did you mean"),
        (
            "pairs: {p: {base: {model: a, revision: 1234}, derived: b}}",
            "pair p: base: revision must be text, found 1234",
        ),
        ("pairs: {p: {base: 3, derived: b}}", "pair p: base must be a mapping, found 3"),
        ("pairs: {p: {base: a, derived: a}}", "pair p: base and derived are the same model"),
        ("pairs: {p: {base: a, derived: b, n_tokens: many}}", "pair p: n_tokens must be a whole number"),
        ("pairs: {a/b: {base: a, derived: b}}", "pair a/b: pair name 'a/b' would leave the results folder"),
        ("pairs: {7: {base: a, derived: b}}", "pair 7: name must be text, found 7"),
        ("pairs: {p: a--b}", "pair p must be a mapping with `base` and `derived`, found 'a--b'"),
        ("pairs: [a, b]", "must hold a mapping `pairs:`"),
        ("just text", "must hold a mapping `pairs:`"),
        ("pair: {p: {base: a, derived: b}}", "unknown key 'pair'; did you mean 'pairs'?"),
        ("pairs: {p: {base: a", "is not valid YAML"),
    ],
)
def test_malformed_registry_names_file_and_entry(tmp_path, registry, message):
    path = tmp_path / "pairs.yaml"
    path.write_text(registry)
    with pytest.raises(PsdError) as caught:
        load_registry(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_malformed_texts_name_file_and_entry(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text("texts: {t: {licence: x}}")
    with pytest.raises(PsdError, match=re.escape(f"{path}: text t has no `path`")):
        load_texts(path)


def test_missing_registry_is_named(tmp_path):
    with pytest.raises(PsdError, match=f"no registry at {re.escape(str(tmp_path))}"):
        load_registry(tmp_path / "pairs.yaml")


def test_an_edited_registry_is_read_again(tmp_path):
    """A live notebook must see a pair that was just added."""
    path = tmp_path / "pairs.yaml"
    path.write_text("pairs: {one: {base: a, derived: b}}")
    assert list(load_registry(path)) == ["one"]
    path.write_text("pairs: {two: {base: a, derived: b}}")
    assert list(load_registry(path)) == ["two"]


def test_models_of_the_registry_are_looked_up_by_name(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text(
        yaml.safe_dump(
            {"models": {"m": {"model": "org/m", "revision": "abc"}}, "pairs": {"p": {"base": "m", "derived": "org/n"}}}
        )
    )
    pair = load_pair("p", path)
    assert (pair.base, pair.derived) == (Member("org/m", "abc"), Member("org/n"))


# ---- which text


def test_texts_of_the_registry_hang_on_the_root_and_the_users_own_on_the_working_folder(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = load_pair("tiny_math")
    assert resolve_text(tiny) == str(root / "data/demo/prose.jsonl.zst")
    (tmp_path / "own.jsonl").write_text("{}")
    assert resolve_text(tiny, "own.jsonl") == "own.jsonl"
    monkeypatch.chdir(root)
    with pytest.raises(PsdError, match=r"no text at own.jsonl \(from .*\), and no registered text of that name"):
        resolve_text(tiny, "own.jsonl")
    assert resolve_text(tiny, "olmo_mix").startswith("hf://")
    assert resolve_text(tiny, "hf://datasets/a/b/c.jsonl") == "hf://datasets/a/b/c.jsonl"


def test_path_of_a_pairs_own_text_hangs_on_the_root_too(root, tmp_path, monkeypatch):
    (root / "mine.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_text(Pair("a", "b", text="mine.jsonl")) == str(root / "mine.jsonl")
    (tmp_path / "mine.jsonl").write_text("{}")
    assert Path(resolve_text(Pair("a", "b", text="mine.jsonl"))).resolve() == tmp_path / "mine.jsonl"


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.jsonl").write_text("{}")
    assert resolve_text(Pair("a", "b"), "~/text.jsonl") == str(tmp_path / "text.jsonl")


def test_text_that_is_not_given_or_misspelt_says_what_to_do():
    with pytest.raises(PsdError, match=r"pair x has no text of its own: give one, a path to JSON lines"):
        resolve_text(Pair("a", "b", name="x"))
    with pytest.raises(PsdError, match=r"no text at demo_pros .*did you mean 'demo_prose'"):
        resolve_text(load_pair("tiny_math"), "demo_pros")
