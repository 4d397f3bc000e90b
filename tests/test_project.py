"""The project itself: dependencies said alike, imports only from above, nothing printed, licences stated."""

import ast
import csv
import re
import tomllib
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "psd_utils"
CONDA_NAMES = {"pytorch": "torch", "huggingface_hub": "huggingface-hub"}
ORDER = """
    errors version paths files correction pairs corpus kernels objectives capture devices sources output_layer
    models checkpoint_members storage batching score head fit selection recovery losses token_table loss_profile
    controls parts worlds known_answers ladder_problem ladder refitted_head fit_records settings
    study sensitivity control_steps pair_controls export release limits cells drawing decision
    study_figures overview_figures profile_figures figures control_figures report
    control_report pictures html_report notebook calibration surface subsample smaller_set readings exploration
    explorer_figures document_view live_plots widgets distributed plan sweep progress
""".split()
"""The modules from the top down; each may import only from those before it (DESIGN §4, with the small ones added)."""


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def split_requirement(text: str) -> tuple[str, str]:
    name, version = re.fullmatch(r"([\w.-]+)(.*)", text).groups()
    return name, version


def test_conda_environment_and_pyproject_say_the_same_dependencies() -> None:
    listed = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"]
    conda = dict(split_requirement(line) for line in listed if isinstance(line, str))
    conda = {CONDA_NAMES.get(name, name): version for name, version in conda.items()}
    assert conda.pop("pip") == ""
    python = conda.pop("python")
    assert conda == dict(split_requirement(line) for line in project()["dependencies"])
    assert project()["requires-python"] == f">={python.removeprefix('=')},<3.12"
    assert {"pip": ["--editable .[dev,sweep]"]} in listed


def locked() -> dict[str, str]:
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_locked_to_a_version_in_its_range() -> None:
    from packaging.requirements import Requirement

    own = project()
    extras = own["optional-dependencies"]
    for line in own["dependencies"] + extras["dev"] + extras["sweep"]:
        requirement = Requirement(line)
        versions = {name.lower().replace("_", "-"): version for name, version in locked().items()}
        assert versions[requirement.name.lower()] in requirement.specifier


def test_torch_is_locked_exactly_and_ranged_in_pyproject() -> None:
    assert locked()["torch"] == "2.13.0"
    assert "torch>=2.11,<3" in project()["dependencies"]


def own_imports(path: Path) -> set[str]:
    """Return the names of the package's modules that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("name", [n for n in ORDER if (PACKAGE / f"{n}.py").exists()])
def test_module_imports_only_from_above(name: str) -> None:
    assert own_imports(PACKAGE / f"{name}.py") <= set(ORDER[: ORDER.index(name)])


def test_every_module_has_its_place_in_the_order() -> None:
    modules = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules <= set(ORDER)


def test_spurious_imports_none_of_the_rest() -> None:
    own = {p.stem for p in (PACKAGE / "spurious").glob("*.py")}
    for path in (PACKAGE / "spurious").glob("*.py"):
        assert own_imports(path) <= own


def test_package_prints_nothing_and_has_module_docstrings() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        calls = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert "print" not in calls, path


def test_published_table_has_the_fourteen_pairs_of_the_registry() -> None:
    from psd_utils.pairs import load_registry

    with open(REPOSITORY / "data" / "published" / "pairs.csv") as file:
        published = {row["pair"] for row in csv.DictReader(file)}
    registered = load_registry(REPOSITORY / "data" / "pairs.yaml")
    assert len(published) == 14
    assert published == {name for name in registered if not name.startswith("tiny_")}


def test_licences_and_sources_are_stated() -> None:
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text()
    published = (REPOSITORY / "data" / "published" / "README.md").read_text()
    for words in ("CC BY 4.0", "arXiv 2610.42000", "Measured by its author; no third-party\nreplication"):
        assert words in published
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    demo = (REPOSITORY / "data" / "demo" / "README.md").read_text()
    for words in ("public domain", "PSF", "CC0"):
        assert words in demo
