"""What the steps of a warm-up are made of."""

from __future__ import annotations

from pagerunner.runner.scoring import CHUNK
from pagerunner.types import EngineRequest, SamplingParams, StepRow


def first_request(params: SamplingParams) -> EngineRequest:
    """A request of a warm-up."""
    return EngineRequest(request_id="", prompt_token_ids=[0] * (CHUNK + 1), params=params, seed=0, max_tokens=1)


def even_rows(count: int, tokens: int, longest: int, *, past: bool) -> list[StepRow]:
    """At most `count` rows of `tokens` tokens together, at the beginning or the end of sequences of `longest` tokens.

    Rows of one token are those of requests that generate.
    """
    rows: list[StepRow] = []
    left = tokens
    for slot in range(count):
        size = min(-(-left // (count - slot)), longest)
        if size:
            rows.append(StepRow(slot, longest - size if past else 0, size, [0] * size if size > 1 else [], True))
        left -= size
    return rows
