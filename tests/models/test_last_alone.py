"""Behind the last layer's attention only the tokens that are sampled matter, and only they are computed."""

from __future__ import annotations

import pytest

from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.models.decoder import DecoderLayer

PROMPTS = ["Once upon a time there was a little dog who lived in a house near the park.", "Tom"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the last layer's feed-forward part got."""
    found: list[int] = []
    last = DecoderLayer.last

    def watched(self, x_TD, angles, batch):
        before = self.mlp.add_

        def add_(x, norm):
            found.append(x.shape[0])
            before(x, norm)

        monkeypatch.setattr(self.mlp, "add_", add_, raising=False)
        try:
            return last(self, x_TD, angles, batch)
        finally:
            monkeypatch.delattr(self.mlp, "add_", raising=False)

    monkeypatch.setattr(DecoderLayer, "last", watched)
    return found


def test_a_prompt_feeds_its_last_token_only(fed: list[int]) -> None:
    llm = LLM(str(demo_path()), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=128)
    fed.clear()
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert sum(fed) == 1  # chunks before the last have no token to sample: nothing is computed for them


def test_prompt_logprobs_still_see_every_token(fed: list[int]) -> None:
    llm = LLM(str(demo_path()), max_num_seqs=4, max_model_len=128)
    fed.clear()
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[:1], scored, use_tqdm=False)
    assert fed == [len(output.prompt_token_ids)]


def test_tokens_are_those_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "dtype": "float32"}
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(DecoderLayer, "last", lambda self, x, angles, batch: self.add_(x, angles, batch) or x)
        outputs = LLM(str(demo_path()), **limits).generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
