"""Safety: nothing secret is written, nothing outside the project is reached, nothing damaged or foreign is loaded."""

import json
import re

import pytest
from conftest import REPOSITORY

import psd_utils as psd
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.models import load_model
from psd_utils.pairs import Member, load_registry, load_texts
from psd_utils.sources import locate

CPU = choose_device("cpu", "float32")
TOKEN = "hf_" + "Secret0" * 5
pytestmark = pytest.mark.usefixtures("single_thread")


def load(folder):
    return load_model(locate(Member(str(folder))), CPU)


# ---- secrets


def test_hub_token_is_written_nowhere(pair, tmp_path, root, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, TOKEN)
    before = set((root / "data").rglob("*"))
    study = psd.run_study(pair, n_tokens=1600, n_damage_seeds=0, n_resamples=100, device="cpu", out_dir=tmp_path)
    written = [p for p in [*tmp_path.rglob("*"), *(set((root / "data").rglob("*")) - before)] if p.is_file()]
    assert any(p.name == "manifest.json" for p in written)
    assert study.path / "summary.json" in written
    assert [p for p in written if TOKEN.encode() in p.read_bytes()] == []


@pytest.mark.slow
def test_hub_token_is_not_in_an_executed_notebook(tmp_path, monkeypatch):
    papermill = pytest.importorskip("papermill")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    parameters = {"pair": "tiny_instruct", "n_tokens": 6000}
    notebook = REPOSITORY / "notebooks" / "01_score.ipynb"
    papermill.execute_notebook(notebook, tmp_path / "out.ipynb", parameters, progress_bar=False)
    assert TOKEN not in (tmp_path / "out.ipynb").read_text()


# ---- registries


@pytest.mark.parametrize("path", ["/etc/models/a", "../elsewhere", "data/../../elsewhere", "~/models/a"])
@pytest.mark.parametrize("place", ["base", "models", "adapter", "text", "texts"])
def test_path_of_a_registry_that_leads_out_of_the_project_is_refused(tmp_path, place, path):
    entry = {"base": "data/demo/base", "derived": "data/demo/math"}
    document = {"pairs": {"mine": entry}}
    if place in ("base", "text"):
        entry[place] = path
    elif place == "adapter":
        entry["derived"] = {"model": "data/demo/base", "adapter": path}
    elif place == "models":
        document["models"], entry["base"] = {"named": {"model": path}}, "named"
    else:
        document["texts"] = {"named": {"path": path}}
    registry = tmp_path / "pairs.yaml"
    registry.write_text(json.dumps(document))
    read = load_texts if place == "texts" else load_registry
    with pytest.raises(PsdError, match=re.escape(repr(path)) + " leads out of the project; a registry names hub"):
        read(registry)


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "a\\b", "/abs"])
def test_name_of_a_pair_cannot_lead_out_of_the_results(tmp_path, name):
    registry = tmp_path / "pairs.yaml"
    registry.write_text(json.dumps({"pairs": {name: {"base": "org/a", "derived": "org/b"}}}))
    with pytest.raises(PsdError, match="would leave the results folder"):
        load_registry(registry)


def test_shipped_registry_stays_inside():
    path = REPOSITORY / "data" / "pairs.yaml"
    assert load_registry(path)
    assert load_texts(path)


# ---- weights


def header(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(values, rest):
    text = json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text + rest


def overlapping(content):
    values, rest = header(content)
    first, second, *_ = (name for name in values if name != "__metadata__")
    values[second]["data_offsets"] = values[first]["data_offsets"]
    return with_header(values, rest)


def beyond_the_end(content):
    values, rest = header(content)
    name = [name for name in values if name != "__metadata__"][-1]
    values[name]["data_offsets"][1] += 4096
    return with_header(values, rest)


def larger_shape(content):
    values, rest = header(content)
    values["model.norm.weight"]["shape"] = [64]
    return with_header(values, rest)


@pytest.mark.parametrize(
    "damage",
    [
        overlapping,
        beyond_the_end,
        larger_shape,
        lambda content: (1 << 60).to_bytes(8, "little") + content[8:],
        lambda content: content[:8] + b"x" + content[9:],
        lambda content: content + b"more",
        lambda content: content[:-1],
    ],
    ids=["overlap", "beyond", "shape", "length", "json", "trailing", "cut"],
)
def test_weights_whose_header_is_not_true_are_refused_by_name(tmp_path, make_model, damage):
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PsdError, match=rf"{tmp_path}: model.safetensors is damaged \(.*\); fetch or save it again"):
        load(tmp_path)


def test_gguf_is_refused_by_name(tmp_path, make_model):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    with pytest.raises(
        PsdError, match=r"has no safetensors weights; it holds GGUF weights, which are mostly quantised"
    ):
        locate(Member(str(tmp_path)))
    with pytest.raises(PsdError, match=r"model .*model.gguf is a GGUF file, whose weights are mostly quantised"):
        locate(Member(str(tmp_path / "model.gguf")))


# ---- a folder inside a repository


@pytest.fixture
def hub(tmp_path, make_model, monkeypatch):
    """A hub with one repository, org/name, that holds a model in checkpoints/last."""
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / "abc123"
    make_model(snapshot / "checkpoints" / "last")
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return asked


def test_model_in_a_folder_of_a_repository(hub):
    source = locate(Member("org/name/checkpoints/last", revision="main"))
    assert source.identity == {"repository": "org/name", "commit": "abc123", "subfolder": "checkpoints/last"}
    assert load_model(source, CPU).head.shape == (400, 32)
    ((name, revision, patterns),) = hub
    assert (name, revision) == ("org/name", "main")
    assert "checkpoints/last/*.safetensors" in patterns
    assert all(pattern.startswith("checkpoints/last/") for pattern in patterns)


def test_folder_that_a_repository_lacks_is_named(hub):
    with pytest.raises(PsdError, match="the repository org/name has no folder other with weights in it"):
        locate(Member("org/name/other"))


@pytest.mark.parametrize("name", ["org/name/..", "org/name/../../x", "org/name/./x", "org/name/x/.."])
def test_folder_of_a_repository_cannot_lead_out_of_it(name):
    with pytest.raises(PsdError, match="is neither a local folder nor a hub name"):
        locate(Member(name))


def test_member_in_a_local_subfolder_is_its_path(tmp_path, make_model):
    make_model(tmp_path / "run" / "last")
    assert locate(Member(str(tmp_path / "run" / "last"))).folder == tmp_path / "run" / "last"
