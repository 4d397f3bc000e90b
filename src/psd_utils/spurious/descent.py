"""Plain SGD on the associative memory, all seeds at once, and the minibatches it reads.

In: weights, a pool of facts, item numbers for each step. Out: the weights after every step, changed in place.

The gradients are written out, since the model is two matrices; the tests compare them with autograd. The loop
uses one thread (small batched products lose time on more); the former number is put back after.

Source: Palit et al. (2026), toy model: SGD, batches drawn uniformly with replacement, one rate for W and U.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from psd_utils.spurious.memory import Facts, MemorySettings, Weights, generator


class Batches:
    """Item numbers for every step and seed, drawn with replacement from each seed's own stream."""

    BLOCK = 256

    def __init__(self, seeds: Sequence[int], stream: str, n_items: int, batch_size: int, first: int = 0) -> None:
        self.generators = [generator(s, stream) for s in seeds]
        self.n_items, self.batch_size, self.first = n_items, batch_size, first

    def steps(self, n_steps: int) -> Iterator[Tensor]:
        """Yield [S, batch] once per step. Blocks have one fixed size, so longer runs begin like shorter
        ones.
        """
        shape = (self.BLOCK, self.batch_size)
        for start in range(0, n_steps, self.BLOCK):
            block = torch.stack([torch.randint(self.n_items, shape, generator=g) for g in self.generators], dim=1)
            yield from (block + self.first)[: n_steps - start]


class _OneThread:
    """How many loops are inside one_thread now, and the thread count to put back when the last one leaves."""

    lock = threading.Lock()
    inside = 0
    before = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread inside and the former number again afterwards; may be nested, in any thread."""
    with _OneThread.lock:
        if _OneThread.inside == 0:
            _OneThread.before = torch.get_num_threads()
        _OneThread.inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _OneThread.lock:
            _OneThread.inside -= 1
            if _OneThread.inside == 0:
                torch.set_num_threads(_OneThread.before)


def descend(
    weights: Weights,
    pool: Facts,
    batches: Iterable[Tensor],
    rate: Tensor | float,
    settings: MemorySettings,
    readout_rate: float = 1.0,
    project: Tensor | None = None,
) -> Iterator[tuple[int, Weights]]:
    """SGD on the mean cross-entropy of minibatches, in place; yields (step, weights) after every step.

    Args:
        weights: changed in place, and yielded every time.
        pool: the facts that batches number.
        batches: item numbers [S, b] for each step.
        rate: learning rate of W, [S] or one number.
        settings: for φ.
        readout_rate: factor on the rate of U.
        project: μ [S, d] to keep W's shared row as it was: W ← W₀ + (I − μμᵀ)(W − W₀), done on every update.
    """
    d, n_values = weights.U.shape[-2:]
    n_seeds, n_items = pool.answers.shape
    keys = pool.keys.reshape(-1, d)
    onehot = torch.nn.functional.one_hot(pool.answers.reshape(-1), n_values).to(keys)
    written = keys
    if project is not None:
        inside = torch.bmm(pool.keys, project.unsqueeze(-1))
        written = (pool.keys - inside * project.unsqueeze(1)).reshape(-1, d)
    rates = torch.as_tensor(rate, dtype=keys.dtype).expand(n_seeds).reshape(-1, 1, 1)
    first = (torch.arange(n_seeds) * n_items).unsqueeze(-1)
    root, W, U = math.sqrt(d), weights.W, weights.U
    with one_thread():
        for step, items in enumerate(batches, start=1):
            index, shape = (items + first).reshape(-1), (n_seeds, items.shape[1], -1)
            k = keys.index_select(0, index).view(shape)
            h = torch.bmm(k, W)
            if settings.normalisation == "rms":
                scale = root / torch.linalg.vector_norm(h, dim=-1, keepdim=True)
                x = h * scale
            else:
                x = h.clamp_min(0) if settings.normalisation == "relu" else h
            error = torch.softmax(torch.bmm(x, U), -1).sub_(onehot.index_select(0, index).view(shape))
            error.mul_(rates / items.shape[1])
            force = torch.bmm(error, U.transpose(1, 2))
            if readout_rate:
                U.baddbmm_(x.transpose(1, 2), error, alpha=-readout_rate)
            if settings.normalisation == "rms":
                inward = (force * x).sum(-1, keepdim=True).div_(d)
                force = force.sub_(x * inward).mul_(scale)
            elif settings.normalisation == "relu":
                force = force * (h > 0)
            if project is not None:
                k = written.index_select(0, index).view(shape)
            W.baddbmm_(k.transpose(1, 2), force, alpha=-1)
            yield step, weights
