"""What a notebook was asked for: names and kinds are checked, and nothing that papermill changed passes unseen."""

import json
import logging
import re

import pytest
from conftest import REPOSITORY
from papermill.cli import _resolve_type
from papermill.translators import PythonTranslator

from psd_utils import notebook
from psd_utils.errors import PsdError
from psd_utils.notebook import check_parameters, chosen_members, chosen_pair, study_arguments
from psd_utils.pairs import Member, load_pair

NAMES = [
    "pair",
    "base",
    "derived",
    "base_revision",
    "derived_revision",
    "base_adapter",
    "derived_adapter",
    "text",
    "n_tokens",
    "top_k",
    "device",
    "dtype",
    "seed",
    "n_resamples",
    "n_damage_seeds",
    "members",
    "out_dir",
    "overwrite",
]


def code_cells(name):
    cells = json.loads((REPOSITORY / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def defaults_cell(name="02_fit.ipynb"):
    (cell,) = (cell for cell in code_cells(name) if cell.startswith("# Defaults"))
    return cell


def injected_cell(p=None, r=None):
    """The cell that papermill injects for -p and -r parameters."""
    values = {name: _resolve_type(value) for name, value in (p or {}).items()} | (r or {})
    return PythonTranslator.codify(values)


def run(*cells, names=None):
    """Run cells as IPython does, the check after the last one; return the checked parameters."""
    names = {"In": [""]} if names is None else names
    for cell in cells:
        names["In"].append(cell)
        exec(cell, names)
    names["In"].append("check")
    return check_parameters(names)


def error_of(**given):
    with pytest.raises(PsdError) as caught:
        run(defaults_cell(), injected_cell(**given))
    return str(caught.value)


# ---- the notebooks' own parameters


@pytest.mark.parametrize("name", ["01_score.ipynb", "02_fit.ipynb"])
def test_notebook_takes_the_parameters_of_the_design_and_no_others(name):
    assert list(run(defaults_cell(name))) == NAMES


def test_defaults_pass_and_an_empty_string_means_not_given():
    parameters = run(defaults_cell())
    assert parameters["pair"] == "tiny_instruct"
    assert (parameters["base"], parameters["text"], parameters["n_tokens"], parameters["dtype"]) == (None,) * 4
    assert (parameters["seed"], parameters["n_damage_seeds"], parameters["overwrite"]) == (0, 5, False)
    assert study_arguments(parameters) == {"device": "auto", "seed": 0, "n_damage_seeds": 5, "n_resamples": 10_000}


def test_values_given_with_p_and_r_arrive():
    given = {"n_tokens": "5000", "seed": "3", "overwrite": "True"}
    parameters = run(defaults_cell(), injected_cell(p=given, r={"text": "my.jsonl", "dtype": "float32"}))
    assert (parameters["n_tokens"], parameters["seed"], parameters["overwrite"]) == (5000, 3, True)
    assert study_arguments(parameters)["text"] == "my.jsonl"


@pytest.mark.parametrize("name", NAMES)
def test_empty_string_on_the_command_line_means_not_given(name):
    assert run(defaults_cell(), injected_cell(r={name: ""})) == run(defaults_cell())


# ---- unknown names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n_token", "unknown parameter 'n_token'; did you mean 'n_tokens'"),
        ("topk", "unknown parameter 'topk'; did you mean 'top_k'"),
        ("base_rev", "unknown parameter 'base_rev'; did you mean 'base_revision'"),
        ("Pair", "unknown parameter 'Pair'; did you mean 'pair'?"),
        ("zzz", "unknown parameter 'zzz'; known: pair, base, derived, "),
    ],
)
def test_unknown_parameter_names_the_nearest(name, message):
    assert message in error_of(p={name: "5"})


def test_one_unknown_parameter_among_known_ones_is_found():
    assert "unknown parameter 'sed'; did you mean 'seed'" in error_of(p={"n_tokens": "5", "sed": "1"}, r={"pair": "x"})


# ---- wrong kinds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"p": {"n_tokens": "many"}},
            "parameter n_tokens must be a whole number, found 'many': for papermill, -p n_tokens 1000",
        ),
        (
            {"r": {"n_tokens": "1000"}},
            "parameter n_tokens must be a whole number, found '1000': for papermill, -p n_tokens 1000",
        ),
        ({"p": {"n_tokens": "1e6"}}, "parameter n_tokens must be a whole number, found 1000000.0"),
        ({"p": {"top_k": "True"}}, "parameter top_k must be a whole number, found True"),
        ({"p": {"seed": "0.5"}}, "parameter seed must be a whole number, found 0.5"),
        ({"p": {"seed": "inf"}}, "parameter seed must be a whole number, found inf"),
        ({"p": {"overwrite": "1"}}, "parameter overwrite must be True or False, found 1"),
        (
            {"r": {"overwrite": "true"}},
            "parameter overwrite must be True or False, found 'true': for papermill, -p overwrite True",
        ),
        ({"p": {"pair": "7"}}, "parameter pair must be text, found 7 (int)"),
        ({"p": {"text": "True"}}, "parameter text must be text, found True (bool)"),
    ],
)
def test_parameter_of_the_wrong_kind_is_named_with_what_was_found(given, message):
    assert message in error_of(**given)


@pytest.mark.parametrize(
    ("revision", "number"), [("12e4567", "inf"), ("007", "7"), ("1_000", "1000"), ("1e5", "100000.0")]
)
def test_revision_that_papermill_turned_into_a_number_says_to_use_r(revision, number):
    """The text is lost, so nothing but an error is right."""
    assert str(_resolve_type(revision)) == number
    message = error_of(p={"base": "a", "derived": "b", "base_revision": revision})
    assert f"parameter base_revision must be text, found {number} (" in message
    assert "papermill's -p turns text that looks like a number into one and loses the text" in message
    assert message.endswith("give it with -r base_revision instead")
    kept = run(defaults_cell(), injected_cell(r={"base": "a", "derived": "b", "base_revision": revision}))
    assert chosen_pair(kept).base == Member("a", revision)


# ---- a live notebook


def test_running_all_cells_a_second_time_works():
    names = {"In": [""]}
    cells = (defaults_cell(), injected_cell(p={"n_tokens": "700"}), "x = 1")
    assert run(*cells, names=names) == run(*cells, names=names)
    assert names["n_tokens"] == 700


def test_injected_cell_of_an_earlier_pass_is_not_held_against_a_later_one():
    """Someone opens an executed notebook, runs it, deletes the injected cell and runs all cells again."""
    names = {"In": [""]}
    with pytest.raises(PsdError, match="unknown parameter 'n_token'"):
        run(defaults_cell(), injected_cell(p={"n_token": "700"}), names=names)
    parameters = run(defaults_cell(), names=names)
    assert parameters["n_tokens"] is None


def test_second_pass_is_checked_too():
    names = {"In": [""]}
    run(defaults_cell(), names=names)
    with pytest.raises(PsdError, match="unknown parameter 'n_token'"):
        run(defaults_cell(), injected_cell(p={"n_token": "700"}), names=names)


def test_values_typed_into_the_defaults_cell_are_used():
    edited = defaults_cell().replace('n_tokens = ""', "n_tokens = 3_000").replace("seed = 0", "seed = 4")
    parameters = run(edited)
    assert (parameters["n_tokens"], parameters["seed"]) == (3000, 4)
    with pytest.raises(PsdError, match=r"parameter n_tokens must be a whole number, found 3000.0"):
        run(defaults_cell().replace('n_tokens = ""', "n_tokens = 3e3"))
    with pytest.raises(PsdError, match=r"parameter n_tokens must be a plain value, found 3 \* 1000"):
        run(defaults_cell().replace('n_tokens = ""', "n_tokens = 3 * 1000"))


def test_without_its_defaults_a_notebook_says_which_cell_to_run():
    with pytest.raises(PsdError, match="run the cell that begins with `# Defaults` first"):
        check_parameters({"In": ["", "x = 1"]})
    with pytest.raises(PsdError, match="run the cell that begins with `# Defaults` first"):
        check_parameters({})


# ---- what they stand for


def pair_from(**given):
    return chosen_pair(run(defaults_cell(), injected_cell(r=given)))


def test_pair_is_a_registered_name_or_the_users_own_two_models():
    assert pair_from(pair="tiny_math") == load_pair("tiny_math")
    own = pair_from(base="org/a", derived="org/b", base_revision="abc", derived_adapter="org/c")
    assert (own.base, own.derived) == (Member("org/a", "abc"), Member("org/b", None, "org/c"))
    assert re.fullmatch("a--b-[0-9a-f]{8}", own.name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base": "org/a"}, "a pair of your own needs both base and derived; derived is missing"),
        ({"derived": "org/a"}, "a pair of your own needs both base and derived; base is missing"),
        ({"base_revision": "abc"}, "base_revision goes with base and derived; the pair tiny_instruct has its own"),
        ({"derived_adapter": "abc"}, "derived_adapter goes with base and derived; the pair tiny_instruct has its own"),
        ({"pair": "tiny_maths"}, "no pair named 'tiny_maths'; did you mean 'tiny_math'"),
        ({"base": "org/a", "derived": "org/a"}, "base and derived are the same model, org/a"),
    ],
)
def test_pair_that_is_not_one_is_explained(given, message):
    with pytest.raises(PsdError, match=re.escape(message)):
        pair_from(**given)


def test_no_pair_at_all_is_explained():
    with pytest.raises(PsdError, match="give a pair by name, or base and derived by path or hub name"):
        chosen_pair(run(defaults_cell().replace('"tiny_instruct"', '""')))


def test_members_are_both_or_one():
    assert chosen_members("both") == ("base", "derived")
    assert chosen_members("derived") == ("derived",)
    with pytest.raises(
        PsdError, match=r"members must be both, base or derived, found 'derive'; did you mean 'derived'\?"
    ):
        chosen_members("derive")


def test_log_is_shown_once(monkeypatch):
    logger = logging.getLogger("psd_utils")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    try:
        notebook.start()
        notebook.start()
        assert len(logger.handlers) == 1
    finally:
        logger.setLevel(level)
