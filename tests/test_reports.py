"""The decision rule, the limits and the HTML reports; and that the README says what the committed results say."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY

import psd_utils as psd
from psd_utils import html_report, pictures, report
from psd_utils.decision import RULE, decide
from psd_utils.limits import LIMITS
from psd_utils.pair_controls import PairControls

pytestmark = pytest.mark.usefixtures("single_thread")
RECOVERY = pd.read_csv(REPOSITORY / "figures" / "recovery.csv")
CONTROLS = pd.read_csv(REPOSITORY / "figures" / "controls.csv")


@pytest.fixture(scope="module")
def study(pair: psd.Pair, tmp_path_factory: pytest.TempPathFactory) -> psd.Study:
    folder = tmp_path_factory.mktemp("results")
    return psd.run_study(pair, n_tokens=2000, n_damage_seeds=2, n_resamples=300, device="cpu", out_dir=folder)


def one_pair(**changes: object) -> pd.DataFrame:
    row = RECOVERY[(RECOVERY["pair"] == "tiny_instruct") & (RECOVERY["correction"] == "bias_temperature")]
    return row.assign(**changes)


def ladder(share: float, low: float) -> pd.DataFrame:
    rows = {"analysis": "ladder", "correction": ["none", "temperature", "head"], "symmetric_share": [0.0, 0.01, share]}
    more = {"symmetric_low": [0.0, 0.005, low], "damage_share": 0.3, "setting": "ladder", "excess_low": 0.0}
    return pd.DataFrame({**rows, **more})


BELOW = {"excess_share": -0.1, "excess_low": -0.2, "excess_high": -0.05}
ABOVE = {"excess_share": 0.1, "excess_low": 0.05, "excess_high": 0.2}
ACROSS = {"excess_share": 0.0, "excess_low": -0.05, "excess_high": 0.05}


LESS = "bias and temperature give back less than after random damage"
EQUAL = "bias and temperature give back about as much as after random damage"
MORE = "bias and temperature give back more than after random damage: a prior shift"
OTHER = "mostly fixable at the output layer, but not by a bias on the set and a temperature"


@pytest.mark.parametrize(("share", "excess_low", "said"), [(0.59, 0.3, True), (0.3, 0.1, False), (0.59, -0.01, False)])
def test_special_tokens_are_named_where_they_bring_much_more_than_damage(
    share: float, excess_low: float, said: bool
) -> None:
    own = {"analysis": "sensitivity", "correction": "bias_temperature", "setting": "specials allowed"}
    row = {**own, "symmetric_share": share, "damage_share": 0.27, "excess_low": excess_low}
    controls = pd.concat([ladder(0.6, 0.5), pd.DataFrame([row])])
    decision = decide(one_pair(symmetric_share=0.17, symmetric_low=0.15, **BELOW), controls)
    assert ("a prior shift of special tokens" in decision.verdict) == said
    assert any("(matched damage: 27.0%)" in step for step in decision.steps) == said


@pytest.mark.parametrize(
    ("share", "low", "excess", "controls", "verdict"),
    [
        (0.3, 0.2, ABOVE, None, f"partly fixable by a fixed bias and temperature; {MORE}"),
        (0.02, 0.01, BELOW, None, f"hardly fixable by a fixed bias and temperature; {LESS}"),
        (0.3, -0.1, ACROSS, None, f"hardly fixable by a fixed bias and temperature; {EQUAL}"),
        (0.6, 0.5, ABOVE, (0.7, 0.6), f"mostly fixable at the output layer; {MORE}"),
        (0.02, 0.01, BELOW, (0.05, 0.01), f"hardly fixable at the output layer; {LESS}"),
        (0.17, 0.15, BELOW, (0.59, 0.55), f"{OTHER}; {LESS}"),
    ],
)
def test_decision_follows_the_rule(
    share: float, low: float, excess: dict, controls: tuple | None, verdict: str
) -> None:
    table = None if controls is None else ladder(*controls)
    decision = decide(one_pair(symmetric_share=share, symmetric_low=low, **excess), table)
    assert decision.verdict == verdict
    assert len(decision.steps) == len(RULE)


def test_decision_without_a_gap_or_without_damage_says_so() -> None:
    nothing = RECOVERY[RECOVERY["pair"] == "tiny_anneal"]
    assert decide(nothing).verdict == "nothing to fix"
    assert "no share is defined (nothing to recover" in decide(nothing).steps[0]
    alone = decide(one_pair(damage_share=None, excess_share=None, excess_low=None, excess_high=None))
    assert alone.verdict.endswith("; not compared with damage")
    one_seed = decide(one_pair(n_damage_seeds=1, **ABOVE), ladder(0.7, 0.6).assign(damage_share=None))
    assert one_seed.verdict.endswith("; not compared with damage")
    assert "run more" in one_seed.steps[2]
    assert "70.0% (no matched damage)" in one_seed.steps[3]


def test_every_rung_of_every_pair_stands_beside_its_damage() -> None:
    rows = CONTROLS[CONTROLS["analysis"] == "ladder"].set_index(["correction", "pair"])
    table = report.ladders_table(rows.reset_index())
    expected = rows.loc[("head", "tiny_math")]
    cell = f"{expected['symmetric_share']:.3f} [{expected['symmetric_low']:.3f}, {expected['symmetric_high']:.3f}]"
    assert table.loc["head fitted anew", "tiny_math"] == f"{cell}; damage {expected['damage_share']:.3f}"


class Page(HTMLParser):
    """What a page would load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += data


def plain(marked: str) -> str:
    return marked.replace("*", "")


def test_report_is_whole_in_itself_and_says_verdict_limits_and_controls(study: psd.Study) -> None:
    rows = CONTROLS[CONTROLS["pair"] == "tiny_instruct"]
    left_out = pd.DataFrame(
        {
            "pair": "tiny_instruct", "member": np.repeat(["base", "derived"], 4), "correction": "none",
            "group": ["set", "special", "padded", "rare"] * 2, "ids": 3, "tokens": [5, 0, 0, 5] * 2,
            "mass": [0.8, 0.1, 0.0, 0.1] * 2, "loss_sum": [1.0, 0.0, 0.0, 2.0] * 2,
        }
    )  # fmt: skip
    controls = PairControls(rows, rows, left_out, {"refused": {}, "refit": None}, study.path)
    path = html_report.write_report(study, controls)
    page = Page(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 1_500_000
    assert len(page.loaded) == len(pictures.study_pictures(study)) + len(pictures.control_pictures(controls)) == 10
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loaded)
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "embed"})
    assert not re.search(r"@import|url\(", page.text)
    words = " ".join(page.text.split())
    for text in (*LIMITS, *RULE, decide(study.recovery, rows).verdict, *report.sentences(study.recovery)):
        assert " ".join(plain(text).split()) in words
    assert "What this does not show" in words
    assert str(REPOSITORY) not in path.read_text(encoding="utf-8")
    assert str(study.path.parent) not in words
    without = Page(html_report.render(study))
    assert "No controls of this pair were found" in without.text


def test_readme_states_the_same_limits_as_every_report() -> None:
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    section = readme.split("## What this does not show")[1].split("## ")[0]
    for text in LIMITS:
        assert text in section


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"[-+]?\d+\.\d+", text.replace("−", "-"))]


def test_readme_table_of_tiny_pairs_is_that_of_the_committed_results() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = {m[1]: m[0] for m in re.finditer(r"^\| (tiny_\w+) \|.*$", readme, re.MULTILINE)}
    assert set(lines) == set(RECOVERY["pair"])
    shares = RECOVERY.set_index(["pair", "correction"])
    for pair, line in lines.items():
        both = shares.loc[(pair, "bias_temperature")]
        expected = [both["gap"]]
        if pd.notna(both["symmetric_share"]):
            columns = ["symmetric_share", "symmetric_low", "symmetric_high", "damage_share", "damage_sd"]
            expected += list(both[[*columns, "excess_share", "excess_low", "excess_high"]])
            expected += [shares.loc[(pair, kind), "symmetric_share"] for kind in ("temperature", "bias", "bias_all")]
        found = numbers(line)
        assert found == pytest.approx(expected, abs=0.00051), pair


def test_readme_verdicts_are_those_of_the_rule() -> None:
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    verdicts = pd.read_csv(REPOSITORY / "figures" / "verdicts.csv")
    assert set(verdicts["pair"]) == set(RECOVERY["pair"])
    again = report.verdict_table(RECOVERY, CONTROLS).reset_index()
    pd.testing.assert_frame_equal(verdicts, again, check_dtype=False)
    assert "`verdicts.csv`" in readme


def test_readme_sentences_on_where_the_loss_sits_are_those_of_the_committed_profiles() -> None:
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    profiles = pd.read_csv(REPOSITORY / "figures" / "profiles.csv")

    def percent(pair: str, column: str, axis: str, labels: list[str]) -> int:
        rows = profiles[(profiles["pair"] == pair) & (profiles["axis"] == axis)]
        return round(100 * rows.loc[rows["label"].isin(labels), column].sum() / rows[column].sum())

    rare = ["0", "1–2", "3–9"]
    found = [percent(pair, "gap_before", "frequency", rare) for pair in ("tiny_math", "tiny_code")]
    tokens, damage = (percent("tiny_math", column, "frequency", rare) for column in ("tokens", "gap_damaged"))
    span = f"{min(found)} to {max(found)}" if min(found) < max(found) else f"{found[0]}"
    assert f"lost {span} % of their gap on the {tokens} % of tokens whose target is rare" in readme
    assert f"noise on the head puts {damage} % there" in readme
    capital, breaks = ["word, capitalised"], ["line break"]
    chat = ("tiny_instruct", "tiny_dpo")
    (capitals,) = {percent(pair, "gap_before", "class", capital) for pair in chat}
    lines = [percent(pair, "gap_before", "class", breaks) for pair in chat]
    share = [percent("tiny_dpo", "tokens", "class", labels) for labels in (capital, breaks)]
    words = f"lost {capitals} % on capitalised words and {min(lines)} to {max(lines)} % on line breaks"
    assert f"{words}, {share[0]} % and {share[1]} % of the tokens" in readme
