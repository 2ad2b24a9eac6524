"""Every family on the device in float32, eagerly and in graphs: the CPU's greedy tokens, which are transformers'."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.device import collect, counted_graphs, device_llm
from helpers.families import MAKERS
from pagerunner import LLM, SamplingParams
from pagerunner.models.registry import FAMILIES

LIMITS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "dtype": "float32",
    "poison_fresh_pages": True,
    "skip_tokenizer_init": True,
}
TIE = 1e-4  # log-probabilities of the best two tokens that are nearer have no order across devices
MOST_TIES = 1
LOGPROB_ERROR = 1e-3


def prompts() -> list[list[int]]:
    """18 of uneven lengths: 150 tokens come in three steps and pass every window, some share a beginning, one has one token."""
    rng = random.Random(11)
    shared = [rng.randrange(4, 500) for _ in range(40)]
    lengths = (150, 1, 3, 17, 40, 70, 21, 5, 33, 64, 2, 90, 16, 48, 9, 31, 100, 12)
    own = [[rng.randrange(4, 500) for _ in range(length)] for length in lengths]
    return [shared[: (16, 33, 40)[i % 3]] + text if i % 4 == 3 else text for i, text in enumerate(own)]


def siblings() -> list[list[int]]:
    """16 that begin with the same two pages."""
    rng = random.Random(12)
    shared = [rng.randrange(4, 500) for _ in range(37)]
    return [shared + [rng.randrange(4, 500) for _ in range(1 + i % 7)] for i in range(16)]


@dataclass(frozen=True)
class Run:
    """Tokens of each prompt; with them the log-probability of each, and how much worse the second best is."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    leads: list[list[float]]


def run(llm: LLM, texts: list[list[int]], logprobs: int | None) -> Run:
    """Greedy tokens. Requests end one after another, so that steps of every number of rows run."""
    params = [
        SamplingParams(temperature=0, max_tokens=4 + i % 15, ignore_eos=True, detokenize=False, logprobs=logprobs)
        for i in range(len(texts))
    ]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(texts)
    made = [output.outputs[0] for output in outputs]
    chosen, leads = [], []
    for one in made if logprobs is not None else ():
        ranked = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in one.logprobs]
        chosen.append([step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)])
        leads.append([best[0] - best[1] if len(best) > 1 else float("inf") for best in ranked])
    return Run([list(one.token_ids) for one in made], chosen, leads)


def compare(found: Run, expected: Run, tie: float = TIE, error: float = LOGPROB_ERROR) -> list[str]:
    """Check tokens, and log-probabilities where `found` has them. Returns a line for each sequence that a tie cut short."""
    ties = []
    for i, (tokens, wanted) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        assert len(tokens) == len(wanted)
        same = next((at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(wanted))
        if same < len(wanted):
            lead = expected.leads[i][same]
            assert lead < tie, f"prompt {i}: {tokens} instead of {wanted}, though token {same} leads by {lead:.2g}"
            ties.append(f"prompt {i}, token {same}: the best two are {lead:.1e} apart")
        if found.logprobs:
            assert found.logprobs[i][:same] == pytest.approx(expected.logprobs[i][:same], abs=error)
    return ties


def expected_of(path: Path) -> tuple[Run, Run]:
    """What the CPU makes of `prompts` and of `siblings`."""
    llm = LLM(str(path), device="cpu", kv_cache_memory_bytes=2**25, use_tqdm=False, **LIMITS)
    return run(llm, prompts(), 2), run(llm, siblings(), 2)


def test_every_family_is_here() -> None:
    assert set(MAKERS) == set(FAMILIES)


@pytest.mark.parametrize("family", MAKERS)
def test_tokens_are_the_cpus(family: str, tmp_path: Path) -> None:
    path = MAKERS[family](tmp_path)
    expected = expected_of(path)
    ties: list[str] = []
    for eager in (True, False):
        with counted_graphs() as graphs:
            llm = device_llm(path, enforce_eager=eager, **LIMITS)
            ties += compare(run(llm, prompts(), None), expected[0])
            decodes = {key.rows for key in graphs.replays if key.decode}
            ties += compare(run(llm, siblings(), 0), expected[1])
        del llm
        collect()
        if eager:
            assert not graphs.captures
        else:
            assert decodes == {1, 2, 4, 8, 16}, "decode steps of every size ran in graphs"
            assert any(not key.decode for key in graphs.replays), "and mixed steps"
    for tie in ties:
        warnings.warn(f"{family}: {tie}, and the device took the other", stacklevel=1)
    assert len(ties) <= MOST_TIES, ties


def test_a_wrong_token_is_no_tie() -> None:
    expected = Run([[5, 6, 7]], [[-1.0, -1.0, -1.0]], [[0.1, 0.5 * TIE, 0.1]])
    assert compare(Run([[5, 6, 7]], [[-1.0, -1.0, -1.0]], []), expected) == []
    assert len(compare(Run([[5, 9, 9]], [], []), expected)) == 1
    with pytest.raises(AssertionError, match="token 0 leads by 0.1"):
        compare(Run([[4, 6, 7]], [], []), expected)
    with pytest.raises(AssertionError):
        compare(Run([[5, 6, 7]], [[-1.0, -1.1, -1.0]], []), expected)
