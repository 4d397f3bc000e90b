"""Figures and the loss profile: what is drawn is what the tables say, and can be read."""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REPOSITORY
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy.stats import spearmanr

import psd_utils as psd
from psd_utils import drawing, figures, loss_profile
from psd_utils.capture import TextStates
from psd_utils.token_table import CLASSES, token_class, token_table

pytestmark = pytest.mark.usefixtures("single_thread")
RECOVERY = pd.read_csv(REPOSITORY / "figures" / "recovery.csv")
CONTROLS = pd.read_csv(REPOSITORY / "figures" / "controls.csv")
PUBLISHED = pd.read_csv(REPOSITORY / "data" / "published" / "pairs.csv")


@pytest.fixture(scope="module")
def study(pair: psd.Pair, tmp_path_factory: pytest.TempPathFactory) -> psd.Study:
    folder = tmp_path_factory.mktemp("results")
    return psd.run_study(pair, n_tokens=2000, n_damage_seeds=2, n_resamples=300, device="cpu", out_dir=folder)


def drawn_x(axes: matplotlib.axes.Axes, label: str) -> dict[float, float]:
    """Return the points of a label as {y: x}."""
    found = [c for c in axes.containers if isinstance(c, ErrorbarContainer) and c.get_label() == label]
    return {float(c.lines[0].get_ydata()[0]): float(c.lines[0].get_xdata()[0]) for c in found}


def test_forest_draws_the_shares_of_the_table_the_largest_gap_first() -> None:
    figure = figures.forest_figure(RECOVERY)
    rows = RECOVERY.drop_duplicates("pair").sort_values("gap", ascending=False)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name.split(" ")[0] for name in reversed(names)] == list(rows["pair"])
    both = RECOVERY[RECOVERY["correction"] == "bias_temperature"].set_index("pair")
    places = {pair: len(rows) - 1 - i for i, pair in enumerate(rows["pair"])}
    shares, damages = (drawn_x(figure.axes[2], label) for label in ("pair's own share", "matched random damage"))
    excesses = drawn_x(figure.axes[4], "excess over damage")
    with_gap = both[both["symmetric_share"].notna()]
    assert len(shares) == len(damages) == len(excesses) == len(with_gap) < len(both)
    for pair, row in with_gap.iterrows():
        assert shares[places[pair] + 0.13] == pytest.approx(row["symmetric_share"])
        assert damages[places[pair] - 0.13] == pytest.approx(row["damage_share"])
        assert excesses[places[pair]] == pytest.approx(row["excess_share"])


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    made = {
        "forest": figures.forest_figure(RECOVERY),
        "gap_share": figures.gap_share_figure(RECOVERY, PUBLISHED),
        "temperatures": figures.temperature_figure(RECOVERY),
        "published": figures.published_figure(PUBLISHED, RECOVERY),
        "ladders": figures.ladders_figure(CONTROLS),
    }
    own = RECOVERY[RECOVERY["pair"].isin(["tiny_math_light", "tiny_anneal"])]
    return made | {f"shares_{p}": figures.share_figure(rows) for p, rows in own.groupby("pair")}


def boxes_of(texts: list[Text], figure: Figure) -> list:
    renderer = figure.canvas.get_renderer()
    return [t.get_window_extent(renderer) for t in texts if t.get_text().strip() and t.get_visible()]


def test_no_words_are_cut_off_and_no_tick_labels_overlap(drawn: dict[str, Figure]) -> None:
    for name, figure in drawn.items():
        figure.canvas.draw()
        used, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(used.x0, used.y0, width - used.x1, height - used.y1) > -0.02, name
        for axes in figure.axes:
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                boxes = boxes_of(labels, figure)
                assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :]), name


def test_names_beside_points_do_not_lie_on_each_other() -> None:
    rows = RECOVERY[RECOVERY["correction"] == "bias_temperature"].dropna(subset=["symmetric_share"]).head(3)
    close = rows.assign(gap=[0.20, 0.201, 0.202], symmetric_share=[0.1, 0.1005, 0.101])
    figure = figures.gap_share_figure(close)
    figure.canvas.draw()
    boxes = boxes_of([t for t in figure.axes[0].texts if t.get_text().startswith("tiny")], figure)
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def test_every_axis_of_shares_contains_zero_and_panels_share_it(drawn: dict[str, Figure]) -> None:
    for name in ("forest", "published", "ladders"):
        limits = {axes.get_xlim() for axes in drawn[name].axes}
        assert len(limits) == 1, name
        ((low, high),) = limits
        assert low < 0 < high
    low, high = drawn["gap_share"].axes[0].get_ylim()
    assert low < 0 < high


def test_models_are_told_apart_without_colour() -> None:
    looks = {(marker, member in drawing.OPEN) for member, marker in drawing.MARKERS.items()}
    assert len(looks) == len(drawing.MARKERS) == len(drawing.COLOURS)


def test_rank_correlation_in_the_title_is_that_of_scipy() -> None:
    rows = RECOVERY[(RECOVERY["correction"] == "bias_temperature") & RECOVERY["symmetric_share"].notna()]
    expected = spearmanr(rows["gap"], rows["symmetric_share"]).statistic
    title = figures.gap_share_figure(RECOVERY).axes[0].get_title(loc="left")
    assert f"rank correlation {expected:+.2f}, {len(rows)} pairs" in title


def test_saved_figure_has_its_table_beside_it(tmp_path: Path) -> None:
    files = figures.save_figure(figures.forest_figure(RECOVERY), RECOVERY, tmp_path / "a.b")
    assert [f.name for f in files] == ["a.b.svg", "a.b.png", "a.b.csv"]
    pd.testing.assert_frame_equal(pd.read_csv(files[2]), RECOVERY)
    assert files[0].read_text(encoding="utf-8").startswith("<?xml")
    again = figures.save_figure(figures.forest_figure(RECOVERY), RECOVERY, tmp_path / "again")
    assert again[0].read_bytes() == files[0].read_bytes()


@pytest.mark.parametrize(
    ("text", "after_space", "expected"),
    [
        (" the", False, "word, lower case"),
        ("the", True, "word, lower case"),
        ("ing", False, "inside a word"),
        (" The", False, "word, capitalised"),
        ("Élan", False, "word, capitalised"),
        (" 1984", False, "number"),
        ("x2", False, "number"),
        (" ...", False, "punctuation"),
        ("\n\n", False, "line break"),
        (" \n", False, "line break"),
        ("   ", False, "space"),
        ("", False, "space"),
        (" \ufffd", False, "part of a character"),
        ("中", False, "inside a word"),
    ],
)
def test_token_class(text: str, after_space: bool, expected: str) -> None:
    assert token_class(text, after_space) == expected
    assert expected in CLASSES


def test_token_table_counts_targets_and_names_special_ids(tokenizer) -> None:
    table = token_table(tokenizer, torch.tensor([5, 5, 7]), torch.tensor([0, 1, 2]))
    assert list(table["id"]) == list(range(len(tokenizer)))
    assert table.loc[[5, 6, 7], "count"].tolist() == [2, 0, 1]
    assert (table.loc[:2, "token_class"] == "special").all()
    assert "special" not in set(table.loc[3:, "token_class"])
    assert table.loc[300, "token"] == repr(tokenizer.decode([300]))


def test_loss_profile_is_the_sum_of_a_plain_loop() -> None:
    """Lengths, targets and losses are drawn; the truth is a loop over tokens in float64."""
    draw = np.random.default_rng(0)
    lengths = [1, 7, 130, 40]
    n, counts = sum(lengths), [0, 1, 2, 3, 9, 10, 250, 5000]
    classes = [CLASSES[i] for i in (0, 1, 2, 3, 4, 5, 8, 0)]
    tokens = pd.DataFrame({"id": range(8), "count": counts, "token_class": classes})
    targets, losses = draw.integers(0, 8, n), draw.exponential(size=(2, n)).astype(np.float32)
    states = TextStates(torch.empty(n, 0), torch.as_tensor(targets), torch.tensor(lengths), ("a", "b", "c", "d"))
    labels = {"pair": "p", "member": "base", "damage_seed": None}
    rows = loss_profile.profile_rows(states, torch.as_tensor(losses), ["none", "bias"], tokens, labels)
    expected: dict[tuple[str, str, str], list[float]] = {}
    positions = [p for length in lengths for p in range(length)]
    names = {"position": "0 1 2–3 4–7 8–15 16–31 32–63 64–127 128–255".split(), "frequency": "0 1–2 3–9 10–29".split()}
    for position, target, first, second in zip(positions, targets, *losses, strict=True):
        place = 0 if position == 0 else int(np.log2(position)) + 1
        frequency = {5000: "3,000–9,999", 250: "100–299"}.get(counts[target])
        frequency = frequency or names["frequency"][int(np.searchsorted([1, 3, 10], counts[target], side="right"))]
        where = {"position": names["position"][place], "frequency": frequency, "class": classes[target]}
        for axis, label in where.items():
            for kind, loss in (("none", first), ("bias", second)):
                entry = expected.setdefault((axis, label, kind), [0, 0.0])
                entry[0] += 1
                entry[1] += float(loss)
    assert len(rows) == len(expected)
    for row in rows.to_dict("records"):
        count, total = expected[row["axis"], row["label"], row["correction"]]
        assert row["tokens"] == count
        assert row["loss_sum"] == pytest.approx(total, rel=1e-12)


def test_bins_of_a_profile_add_up_to_the_gap_of_the_study(study: psd.Study) -> None:
    profile = pd.read_parquet(study.path / "loss_profile.parquet")
    table = figures.profile_table(profile)
    losses = study.losses[study.losses["split"] == "eval"]
    sums = losses.groupby(["member", "correction"])[["loss_sum", "tokens"]].sum()
    means = sums["loss_sum"] / sums["tokens"]
    gaps = {
        "gap_before": means["derived", "none"] - means["base", "none"],
        "gap_after": means["derived", "bias_temperature"] - means["base", "bias_temperature"],
        "gap_damaged": means["damaged", "none"] - means["base", "none"],
    }
    for axis, rows in table.groupby("axis"):
        assert axis in loss_profile.AXES
        assert rows["tokens"].sum() == study.recovery["n_tokens"].iloc[0]
        for name, gap in gaps.items():
            assert rows[name].sum() == pytest.approx(gap, rel=1e-9)


def test_biases_are_drawn_with_their_token_and_count(study: psd.Study, tokenizer) -> None:
    tokens = pd.read_parquet(study.path / "tokens.parquet")
    correction = study.corrections["derived", "bias_temperature"]
    table = figures.bias_table(tokens, {"derived": correction}).set_index("id")
    at = int(correction.bias.abs().argmax())
    some = int(correction.ids[at])
    assert table.loc[some, "bias"] == float(correction.bias[at]) != 0
    assert table.loc[some, "token"] == repr(tokenizer.decode([some]))
    targets = study.captures["base"].states("fit").targets
    assert table.loc[some, "count"] == int((targets == some).sum()) > 0
