import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psd_utils.spurious import shift

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7))


def pair(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=draws, dtype=torch.float64) * 5 for _ in range(2))  # type: ignore[return-value]


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, seed=st.integers(0, 2**31), n_groups=st.integers(1, 4))
def test_common_plus_individual_is_the_change(shape, seed, n_groups):
    before, after = pair(shape, seed)
    n_groups = min(n_groups, shape[1])
    labels = torch.arange(shape[1]) % n_groups
    split = shift.split_change(before, after, labels)
    torch.testing.assert_close(split.change, after - before, rtol=0, atol=1e-12)
    assert split.common.shape == (shape[0], n_groups, shape[2])
    for group in range(n_groups):
        mean = split.individual[:, labels == group].mean(1)
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-12)
        expected = (after - before)[:, labels == group].mean(1)
        torch.testing.assert_close(split.common[:, group], expected, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_the_two_parts_alone_add_up(shape, seed):
    before, after = pair(shape, seed)
    split = shift.split_change(before, after)
    both = shift.common_only(before, split) + shift.individual_only(before, split) - before
    torch.testing.assert_close(both, after, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_subtracting_the_mean_leaves_no_mean(shape, seed):
    before, after = pair(shape, seed)
    left = (shift.subtract_offset(before, after) - before).mean(-2)
    torch.testing.assert_close(left, torch.zeros_like(left), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31), k=st.integers(1, 9))
def test_offset_from_some_items_equals_the_mean_of_those(shape, seed, k):
    before, after = pair(shape, seed)
    k = min(k, shape[1])
    draws = torch.Generator().manual_seed(seed)
    each = torch.stack([torch.randperm(shape[1], generator=draws)[:k] for _ in range(shape[0])])
    found = shift.subtract_offset(before, after, each)
    for row in range(shape[0]):
        offset = (after - before)[row, each[row]].mean(0)
        torch.testing.assert_close(found[row], after[row] - offset, rtol=0, atol=1e-12)
    everything = shift.subtract_offset(before, after, torch.arange(shape[1]))
    torch.testing.assert_close(everything, shift.subtract_offset(before, after), rtol=0, atol=1e-12)


def test_offset_by_groups_from_some_items():
    before, after = pair((6, 3), 0)
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    found = shift.subtract_offset(before, after, torch.tensor([0, 1, 2]), groups)
    change = after - before
    torch.testing.assert_close(found[4], after[4] - (change[0] + change[2]) / 2)
    torch.testing.assert_close(found[3], after[3] - change[1])
    with pytest.raises(ValueError, match=r"No item was chosen from groups \[1\]"):
        shift.subtract_offset(before, after, torch.tensor([0, 2]), groups)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31), scale=st.floats(0.01, 100))
def test_removing_a_direction_leaves_none_of_it(shape, seed, scale):
    change, other = pair(shape, seed)
    direction = other[:, :, 0] * scale
    rest = shift.remove_direction(change, direction)
    inside = torch.einsum("sr,src->sc", direction / scale, rest)
    torch.testing.assert_close(inside, torch.zeros_like(inside), rtol=0, atol=1e-10)
    again = shift.remove_direction(rest, direction)
    torch.testing.assert_close(again, rest, rtol=0, atol=1e-10)
    squares = (rest.square() + shift.shared_part(change, direction).square()).sum((-2, -1))
    torch.testing.assert_close(squares, change.square().sum((-2, -1)))


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_removing_all_singular_directions_leaves_nothing(shape, seed):
    change, _ = pair(shape, seed)
    full = min(shape[-2:])
    rest = shift.remove_top_directions(change, full)
    torch.testing.assert_close(rest, torch.zeros_like(rest), rtol=0, atol=1e-10)
    shares = shift.top_directions(change, full).share.sum(-1)
    torch.testing.assert_close(shares, torch.ones_like(shares))


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**31), rank=st.integers(1, 7))
def test_random_control_is_as_large_as_what_the_surgery_removes(shape, seed, rank):
    change, _ = pair(shape, seed)
    rank = min(rank, *shape[-2:])
    draws = torch.Generator().manual_seed(seed)
    removed = change - shift.remove_random_part(change, rank, draws)
    top = change - shift.remove_top_directions(change, rank)
    torch.testing.assert_close(torch.linalg.matrix_norm(removed), torch.linalg.matrix_norm(top))
    values = torch.linalg.svdvals(removed)
    assert bool((values[..., rank:] <= 1e-9 * values[..., :1]).all())


def test_top_directions_agree_with_numpy():
    change, _ = pair((2, 6, 4), 3)
    top = shift.top_directions(change, 2)
    left, values, right = np.linalg.svd(change.numpy(), full_matrices=False)
    np.testing.assert_allclose(top.values, values[:, :2], rtol=1e-12)
    best = (left[:, :, :2] * values[:, None, :2]) @ right[:, :2]
    np.testing.assert_allclose(top.matrix, best, atol=1e-11)


def test_svd_that_does_not_converge_falls_back(monkeypatch, caplog):
    change, _ = pair((2, 3, 5, 4), 1)
    expected = shift.top_directions(change, 2).matrix

    def fails(*args, **kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    found = shift.top_directions(change, 2)
    torch.testing.assert_close(found.matrix, expected, rtol=0, atol=1e-10)
    assert "gesvd" in caplog.text


def test_zero_change_has_zero_shares():
    zero = torch.zeros(3, 4, dtype=torch.float64)
    assert shift.top_directions(zero, 2).share.tolist() == [0, 0]
    assert not shift.remove_top_directions(zero, 2).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    before, after = (t.to(dtype) for t in pair((5, 3), 2))
    split = shift.split_change(before, after)
    assert split.common.dtype == torch.float32
    torch.testing.assert_close(split.change, after.float() - before.float(), rtol=0, atol=1e-5)


def test_mixed_precision_takes_the_wider():
    before, after = pair((5, 3), 2)
    assert shift.split_change(before.float(), after).common.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shift.split_change(torch.ones(2, 3), torch.ones(3, 2)), "same items in the same order"),
        (lambda: shift.split_change(torch.ones(3), torch.ones(3)), "at least one item"),
        (lambda: shift.split_change(torch.ones(0, 3), torch.ones(0, 3)), "at least one item"),
        (lambda: shift.split_change(torch.ones(2, 3) * torch.nan, torch.ones(2, 3)), "before holds 6 values"),
        (lambda: shift.split_change(torch.ones(2, 3), torch.ones(2, 3) / 0), "after holds 6 values"),
        (lambda: shift.split_change(torch.ones(2, 3), [[1.0]]), "must be a torch tensor"),
        (lambda: shift.split_change(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0])), "2 integers"),
        (lambda: shift.split_change(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0, 2])), "left out"),
        (lambda: shift.subtract_offset(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([2])), "0 … 1"),
        (lambda: shift.subtract_offset(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([])), "non-empty"),
        (lambda: shift.shared_part(torch.ones(2, 3), torch.ones(3)), "one entry per row"),
        (lambda: shift.shared_part(torch.ones(2, 3), torch.zeros(2)), "direction is zero"),
        (lambda: shift.top_directions(torch.ones(2, 3), 3), "expected 1 … 2"),
        (lambda: shift.top_directions(torch.ones(3), 1), "rows, columns"),
        (
            lambda: shift.random_part(torch.ones(2, 3), 1, torch.ones(2), torch.Generator()),
            "one number per matrix",
        ),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
