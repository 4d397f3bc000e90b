"""Golden token ids: recorded once for a tokenizer family, then enforced."""

import json
import re
import sys
from dataclasses import replace

import pytest
from conftest import REPOSITORY, english_like, make_tokenizer

import psd_utils as psd
from psd_utils import corpus
from psd_utils.corpus import GOLDEN_STRINGS, check_golden_ids, golden_file
from psd_utils.errors import PsdError
from psd_utils.pairs import Member
from psd_utils.score import prepare
from psd_utils.sources import locate

sys.path.insert(0, str(REPOSITORY / "scripts"))
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def own_root(tmp_path, monkeypatch):
    """A root of its own, so that recording changes nothing else."""
    (tmp_path / "data").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    registry = {"pairs": {"mine": {"base": "data/model", "derived": "data/other", "family": "My Family 2.5"}}}
    (tmp_path / "data" / "pairs.yaml").write_text(json.dumps(registry))
    monkeypatch.setenv("PSD_ROOT", str(tmp_path))
    return tmp_path


def record(*arguments):
    import record_golden_ids

    record_golden_ids.main(list(arguments))


def test_demo_tokenizer_gives_the_recorded_ids():
    pair = psd.load_pair("tiny_math")
    recorded = json.loads(golden_file(pair.family).read_text())
    assert [row["text"] for row in recorded["strings"]] == list(GOLDEN_STRINGS)
    assert len(set(GOLDEN_STRINGS)) == 20
    assert prepare(pair, None, 6000).tokenizer_length == 4096


def test_tokenizer_that_splits_differently_is_stopped_with_both_ids(pair, own_root, make_model):
    make_model(own_root / "data" / "model")
    record("My Family 2.5")
    path = own_root / "data" / "golden" / "my-family-2.5.json"
    recorded = json.loads(path.read_text())
    assert recorded["model"] == "data/model"
    own = replace(pair, family="My Family 2.5")
    prepare(own, pair.text, 500)
    recorded["strings"][6]["ids"][0] += 1
    path.write_text(json.dumps(recorded))
    message = f"tokenizer of {pair.base.label}: '1234567890 12,345.67 3.14159e-10' gets the ids ["
    with pytest.raises(PsdError, match=re.escape(message) + rf".*{path} says \["):
        prepare(own, pair.text, 500)


def test_another_tokenizer_does_not_pass(own_root, make_model):
    make_model(own_root / "data" / "model")
    record("My Family 2.5")
    other = make_tokenizer([text[::-1] for text in english_like(200, seed=1)])
    with pytest.raises(PsdError, match="splits text differently from when this family was recorded"):
        check_golden_ids("model", "My Family 2.5", other)


def test_record_is_not_replaced_unawares(own_root, make_model):
    make_model(own_root / "data" / "model")
    record("My Family 2.5")
    with pytest.raises(PsdError, match="is there; give --again to replace it"):
        record("My Family 2.5")
    record("--again", "My Family 2.5")
    with pytest.raises(PsdError, match=re.escape("no registered family 'My Famly 2.5'; did you mean 'My Family 2.5'")):
        record("My Famly 2.5")


def test_family_without_a_record_and_pair_without_a_family_pass(tokenizer):
    check_golden_ids("model", "", tokenizer)
    check_golden_ids("model", "never recorded", tokenizer)


def test_name_of_a_family_stays_in_its_folder():
    assert corpus.golden_file("../../x").parent.name == "golden"


def test_only_the_tokenizer_is_fetched_to_record_it(tmp_path, make_model, monkeypatch):
    import huggingface_hub

    make_model(tmp_path / "abc")
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.extend(allow_patterns)
        return str(tmp_path / "abc")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    locate(Member("org/name"), weights=False)
    assert "*.json" in asked
    assert not any("safetensors" in pattern for pattern in asked)
    (tmp_path / "abc" / "model.safetensors").unlink()
    assert locate(Member(str(tmp_path / "abc")), weights=False).identity == {}
