"""Behind the last layer's mixer only the tokens that are sampled matter, and only they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.families import MAKERS
from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.layers.sublayer import FeedForward
from pagerunner.models.decoder import Decoder
from pagerunner.runner.builder import BatchBuilder

PROMPTS = ["Once upon a time there was a little dog who lived in a house near the park.", "Tom"]
IDS = [[3 + (7 * row + 13 * place) % 60 for place in range(length)] for row, length in enumerate((40, 5, 21))]
LIMITS = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 2**25}


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the last layer's feed-forward got."""
    found: list[int] = []
    whole = Decoder.__call__

    def watched(self, batch):
        feed_forward = self.layers[-1].feed_forward
        before: FeedForward.add_to = feed_forward.add_to

        def add_to(stream, norm):
            found.append(stream.x_TD.shape[0])
            before(stream, norm)

        monkeypatch.setattr(feed_forward, "add_to", add_to, raising=False)
        try:
            return whole(self, batch)
        finally:
            monkeypatch.delattr(feed_forward, "add_to", raising=False)

    monkeypatch.setattr(Decoder, "__call__", watched)
    return found


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of each step: its tokens, its sampled tokens, and the tokens whose hidden states the decoder returned."""
    found: list[tuple[int, int, int]] = []
    whole = Decoder.__call__

    def watched(self, batch):
        hidden = whole(self, batch)
        assert hidden.dim() == 2
        found.append((len(batch.token_ids), len(batch.logits_index), len(hidden)))
        return hidden

    monkeypatch.setattr(Decoder, "__call__", watched)
    return found


def greedy(path: Path | str) -> list[list[int]]:
    llm = LLM(str(path), max_num_batched_tokens=16, dtype="float32", skip_tokenizer_init=True, **LIMITS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in IDS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_prompt_feeds_its_last_token_only(fed: list[int]) -> None:
    llm = LLM(str(demo_path()), max_num_batched_tokens=8, **LIMITS)
    fed.clear()
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert sum(fed) == 1  # chunks before the last have no token to sample: nothing is computed for them


def test_prompt_logprobs_still_see_every_token(fed: list[int]) -> None:
    llm = LLM(str(demo_path()), **LIMITS)
    fed.clear()
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[:1], scored, use_tqdm=False)
    assert fed == [len(output.prompt_token_ids)]


@pytest.mark.days(3)
@pytest.mark.parametrize("family", MAKERS)
def test_tokens_of_every_family_are_those_of_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: list[tuple[int, int, int]], family: str
) -> None:
    path = MAKERS[family](tmp_path)
    found = greedy(path)
    assert all(hidden == sampled for tokens, sampled, hidden in returned if tokens == 16)
    kept = {hidden for tokens, _, hidden in returned if tokens > 1}
    assert min(kept) == 0 < max(kept), "no step without a token to sample was run"
    returned.clear()
    eager = BatchBuilder.eager
    monkeypatch.setattr(
        BatchBuilder, "eager", lambda self, step, saves=(), *, last_alone=False, **how: eager(self, step, saves, **how)
    )
    assert greedy(path) == found
    assert all(hidden == tokens for tokens, _, hidden in returned)
