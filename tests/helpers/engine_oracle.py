"""A whole engine against `transformers` in float32: greedy tokens and log-probabilities, on pages that are NaN when fresh."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagerunner import LLM, SamplingParams

NEW_TOKENS = 6
CONDITIONS: dict[str, dict[str, Any]] = {  # engine arguments that must change nothing
    "budget-7": {"max_num_batched_tokens": 7},
    "budget-64": {"max_num_batched_tokens": 64},
    "page-48": {"block_size": 48},
    "page-1": {"block_size": 1, "max_num_batched_tokens": 50},
    "two in flight": {"max_in_flight": 2, "max_num_batched_tokens": 40},
    "no prefix hits": {"enable_prefix_caching": False},
}

_DEFAULTS: dict[str, Any] = {  # little memory: a pool of millions of tiny pages takes seconds to set up
    "poison_fresh_pages": True,
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 8_000_000,
}


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    ids = random.Random(seed)
    return [ids.randrange(4, 500) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], n: int = 1) -> list[Any]:
    """Greedy outputs with log-probabilities of prompt and result."""
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0, n=n, ignore_eos=True, detokenize=False
    )
    return llm.generate([{"prompt_token_ids": text} for text in prompts], params, use_tqdm=False)


def engine(path: Path, **options: Any) -> LLM:
    """An engine whose fresh pages are poisoned."""
    return LLM(str(path), **(_DEFAULTS | options))


@functools.lru_cache(maxsize=64)
@torch.inference_mode()
def _log_probs(reference: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """What may follow each token, [tokens, vocabulary]; the same texts are asked under many conditions."""
    return reference(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)


def check(reference: Any, outputs: list[Any]) -> None:
    """Tokens are the reference's greedy choice, with its log-probabilities; so are the prompt's that were computed."""
    for output in outputs:
        assert output.error is None, output.error
        text = list(output.prompt_token_ids)
        for made in output.outputs:
            tokens = text + list(made.token_ids)
            want = _log_probs(reference, tuple(tokens[:-1]))
            assert want[len(text) - 1 :].argmax(-1).tolist() == tokens[len(text) :]
            found = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
            found = [entry[t].logprob for t, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True)] + found
            rows = want[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
            assert found == pytest.approx(rows.tolist(), abs=1e-4)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": text} for text in prompts], params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_tokens(reference: Any, llm: LLM, prompts: list[list[int]]) -> None:
    """The engine's greedy tokens are the reference's: each is the most likely one after those before it."""
    for text, made in zip(prompts, tokens_of(llm, prompts), strict=True):
        want = _log_probs(reference, (*text, *made[:-1]))
        assert len(made) == NEW_TOKENS and want[len(text) - 1 :].argmax(-1).tolist() == made
