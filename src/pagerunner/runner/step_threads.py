"""How many threads a step of a CPU engine takes.

torch divides the work of every operator between all its threads. In a small step an operator is over before a second thread has
woken up. Example: 4 layers of width 256 and one row run 1.2 times as fast on one thread as on two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pagerunner.types import StepRow

SMALL_BYTES = 8 << 20  # where one thread and two took the same time
WEIGHT_BOUND_TOKENS = 8  # up to that many, reading the weights takes the time, and not computing with them


class StepThreads:
    """Gives a step one thread or all of torch's, by the work of one layer. Other threads of the process keep their number.

    Args:
        layer_bytes: of a layer's weights: the model's, embedding and output weights included, over its number of layers.
        token_bytes: of a layer's keys and values, or whatever its memory is, for one token.
        ranks: how many ranks of this machine run a step at the same time, each on its share of the threads.
    """

    def __init__(self, layer_bytes: int, token_bytes: int, ranks: int = 1) -> None:
        self._layer_bytes = layer_bytes
        self._token_bytes = token_bytes
        self._ranks = ranks
        self._set = own_thread_setter()
        self._usual: int | None = None  # during a step, and after one that an interrupt kept from ending

    def is_small(self, rows: Sequence[StepRow], most_tokens: int = 0) -> bool:
        """Whether the step is faster on one thread. `most_tokens`: see StepPlan; a rank computes its experts for all teams."""
        tokens = max(sum(row.num_tokens for row in rows), most_tokens)
        context = sum(row.start + row.num_tokens for row in rows)
        weights = self._layer_bytes * max(tokens / WEIGHT_BOUND_TOKENS, 1)
        return weights + self._token_bytes * context < SMALL_BYTES

    @property
    def usual(self) -> int:
        """The threads of a step that isn't small."""
        return max((self._usual or torch.get_num_threads()) // self._ranks, 1)

    @contextmanager
    def during(self, rows: Sequence[StepRow], most_tokens: int = 0) -> Iterator[None]:
        """The threads of a step with these rows; afterwards as before. `most_tokens`: see StepPlan."""
        if self._usual is None:
            self._usual = torch.get_num_threads()
        try:
            self._set(1 if self.is_small(rows, most_tokens) else self.usual)
            yield
        finally:
            self._set(self._usual)
            self._usual = None


def own_thread_setter() -> Callable[[int], object]:
    """The OpenMP function that sets how many threads the calling thread's operators take. It does nothing without OpenMP.

    `torch.set_num_threads` also sets the number that every new thread of the process begins with.
    """
    try:
        found = ctypes.CDLL(torch._C.__file__).omp_set_num_threads
    except (AttributeError, OSError):
        return lambda count: None
    found.restype = None
    return found
