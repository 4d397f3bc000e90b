"""Documents -> batches: the same for everyone who scores them, and with little padding."""

MOST_PADDING = 0.05
# of one batch; the last keeps the whole within MOST_PADDING whatever the lengths
_PADDING_OF_A_BATCH = (1.0, 0.5, 0.35, 0.25, 0.18, 0.13, 0.1, 0.07, MOST_PADDING)


def batches(documents: range | list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Return documents grouped by length, the longest first, at most `batch_tokens` padded tokens a batch.

    Of all positions that are computed, at most 5 % are padding; within that, the batches are as large as can be.
    """
    longest_first = sorted(documents, key=lambda d: (-lengths[d], d))
    groups: list[list[int]] = []
    for share in _PADDING_OF_A_BATCH:
        groups = _grouped(longest_first, lengths, batch_tokens, share)
        if padding_share(groups, lengths) <= MOST_PADDING:
            break
    return groups


def padding_share(groups: list[list[int]], lengths: list[int]) -> float:
    """Return the share of padding among the positions of batches, each as long as its first document."""
    positions = sum(len(group) * lengths[group[0]] for group in groups)
    return 1 - sum(lengths[d] for group in groups for d in group) / max(positions, 1)


def _grouped(longest_first: list[int], lengths: list[int], batch_tokens: int, most_padding: float) -> list[list[int]]:
    groups: list[list[int]] = []
    real = 0
    for d in longest_first:
        positions = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        if groups and positions <= batch_tokens and positions - real - lengths[d] <= most_padding * positions:
            groups[-1].append(d)
            real += lengths[d]
        else:
            groups.append([d])
            real = lengths[d]
    return groups
