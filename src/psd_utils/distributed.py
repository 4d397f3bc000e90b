"""Several processes for one pair: they share the scoring of a model, and fit on statistics that each holds a part of.

    torchrun --nproc-per-node 4 -m psd_utils.distributed --pair math_7b

One process a GPU, or with `--device cpu` gloo processes. Each gets a fixed part of a capture's shards, with the batches
of a single process, so the capture is the same whoever wrote it (to the last bit, where processes compute with the same
number of threads).
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import distributed

from .capture import Capture
from .errors import PsdError
from .fit import Fit, fit_correction
from .kernels import HeadStatistics, Objective
from .notebook import chosen_members, chosen_pair
from .objectives import BiasObjective, FitObjective, StatisticsObjective
from .pairs import Pair
from .paths import captures_dir
from .score import Crew, prepare, score_member
from .settings import resolve_settings

_LOG = logging.getLogger(__name__)
# the others wait while the leader waits for the lock of another run
_LONGEST_WAIT = timedelta(days=7)


def start_processes(device: str = "auto") -> Accelerator:
    """Return accelerate's view of the processes that torchrun started; without torchrun, of this one alone.

    Raises:
        PsdError: `device` names one device of several, or "spread": every process has a device of its own.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise PsdError(f"device must be auto, cpu or cuda for several processes, found {device!r}")
    cpu = device == "cpu" or not torch.cuda.is_available()
    return Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=_LONGEST_WAIT)])


def crew_of(accelerator: Accelerator) -> Crew:
    """Return the crew for `score_member`: the first process leads, shards are dealt in turn."""
    rank, size = accelerator.process_index, accelerator.num_processes
    return Crew(
        leader=accelerator.is_main_process,
        deal=lambda shards: shards[rank::size],
        wait=accelerator.wait_for_everyone,
    )


def score_together(
    pair: Pair,
    accelerator: Accelerator,
    *,
    text: str | None = None,
    n_tokens: int | None = None,
    dtype: str | None = None,
    members: Sequence[str] = ("base", "derived"),
) -> dict[str, Capture]:
    """Return the captures of a pair by member, scored by all processes; every process must call it alike.

    Raises:
        PsdError: as `prepare` and `score_member`.
    """
    settings = resolve_settings(pair, text=text, n_tokens=n_tokens, device=str(accelerator.device), dtype=dtype)
    with accelerator.main_process_first():  # one download, which the others then find
        task = prepare(pair, settings.text, settings.n_tokens)
    facts = {"base": pair.facts, "derived": None}
    crew = crew_of(accelerator)
    return {role: score_member(task, role, settings.device, captures_dir(), facts[role], crew) for role in members}


@dataclass(frozen=True)
class ShardedObjective:
    """A fit's problem over the texts of all processes: mean loss and gradient, summed by all-reduce.

    `local` is this process's part, on the same ids and nodes as the others'. Every process gets the same values, so
    the same solver takes the same steps in all of them.
    """

    local: FitObjective

    def __post_init__(self) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise PsdError("no process group: start with torchrun and call start_processes first")
        own = [self.local.ids.tolist(), self.local.beta_interval, self.local.precise, self.local.n_tokens]
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, own)
        for rank, other in enumerate(everyone):
            if other[-1] == 0:
                raise PsdError(f"process {rank} has no tokens: deal the text so that each has some")
            if other[:-1] != everyone[0][:-1]:
                raise PsdError(f"process {rank} has statistics of other ids, nodes or precision than process 0")

    @property
    def ids(self) -> torch.Tensor:
        """The set, int64 [K]."""
        return self.local.ids

    @cached_property
    def counts(self) -> torch.Tensor:
        """Targets of each id in all texts, float64 [K]."""
        return _summed(self.local.counts)

    @cached_property
    def n_tokens(self) -> int:
        """Tokens of all texts."""
        return int(_summed(torch.tensor([self.local.n_tokens])))

    @property
    def beta_interval(self) -> tuple[float, float]:
        """The lowest and highest β that can be evaluated."""
        return self.local.beta_interval

    @property
    def whole_vocabulary(self) -> bool:
        """Whether a common bias changes nothing."""
        return self.local.whole_vocabulary

    @property
    def precise(self) -> bool:
        """Whether sums are over float64 terms."""
        return self.local.precise

    def __call__(self, beta: float, bias: torch.Tensor) -> Objective:
        """Return mean loss and gradient at (β, b) over all texts."""
        own = self.local(beta, bias)
        scalars = torch.tensor([own.loss, own.gradient_beta], dtype=torch.float64)
        mean = self._mean(scalars, own.gradient_bias)
        return Objective(float(mean[0]), float(mean[1]), mean[2:])

    def at_beta_one(self) -> BiasObjective:
        """Return the objective in b alone."""
        evaluate = self.local.at_beta_one()

        def everywhere(bias: torch.Tensor) -> tuple[float, torch.Tensor]:
            loss, gradient = evaluate(bias)
            mean = self._mean(torch.tensor([loss], dtype=torch.float64), gradient)
            return float(mean[0]), mean[1:]

        return everywhere

    def _mean(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens of per-process means, float64, the parts joined."""
        own = torch.cat([part.cpu().double() for part in parts])
        return _summed(own * self.local.n_tokens) / self.n_tokens


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes, float64 on the CPU: the same bits in each."""
    device = torch.device("cuda") if distributed.get_backend() == "nccl" else torch.device("cpu")
    total = values.to(device, torch.float64, copy=True)
    distributed.all_reduce(total)
    return total.cpu()


def fit_together(statistics: HeadStatistics, kind: str = "bias_temperature", penalty: float = 0.0) -> Fit:
    """Return the fit to the texts of all processes; `statistics` are this one's. Every process must call it alike.

    Raises:
        PsdError: as `fit_correction`; or the processes' statistics do not go together.
    """
    return fit_correction(ShardedObjective(StatisticsObjective(statistics)), kind, penalty)


def _arguments(argv: Sequence[str] | None) -> Mapping[str, Any]:
    parser = argparse.ArgumentParser(prog="torchrun -m psd_utils.distributed", description="Score a pair together.")
    for name in ("pair", "base", "derived", "base_revision", "derived_revision", "base_adapter", "derived_adapter"):
        parser.add_argument(f"--{name.replace('_', '-')}")
    parser.add_argument("--text", help="path, hf:// address or registered text; the pair's own if not given")
    parser.add_argument("--n-tokens", type=int)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype")
    parser.add_argument("--members", default="both", help="both, base or derived")
    return vars(parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> None:
    """Score the pair that the command line names, together with the other processes of torchrun."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = _arguments(argv)
    try:
        accelerator = start_processes(given["device"])
        captures = score_together(
            chosen_pair(given),
            accelerator,
            text=given["text"],
            n_tokens=given["n_tokens"],
            dtype=given["dtype"],
            members=chosen_members(given["members"]),
        )
    except PsdError as error:
        raise SystemExit(f"error: {error}") from error
    if accelerator.is_main_process:
        for role, capture in captures.items():
            _LOG.info("%s: capture %s, by %d processes", role, capture.folder, accelerator.num_processes)
    accelerator.end_training()


if __name__ == "__main__":
    main()
