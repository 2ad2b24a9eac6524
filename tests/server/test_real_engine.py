"""The server over the real core and a random checkpoint: HTTP answers equal the offline engine's, token for token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.checkpoints import make_checkpoint
from helpers.effort import effort
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.llm import LLM
from pagerunner.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked")

PROMPTS = ["Once upon a time", "What is the capital of France?", "12 + 30 =", "def main():"]
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 64,
    "pooler_config": '{"pooling_type": "MEAN"}',
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "qwen3", vocab_size=400)


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), use_tqdm=False, **OPTIONS)


@pytest.fixture(scope="module")
def expected(offline: LLM) -> list[list[int]]:
    """Greedy tokens of the offline engine."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in offline.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def real_server(checkpoint: Path) -> Iterator[RunningServer]:
    args = EngineArgs(model=str(checkpoint), **OPTIONS, kv_cache_metrics_sample=1.0)
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        yield server


GREEDY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 24,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


def test_whole_answers_equal_the_offline_engines(real_server: RunningServer, expected: list[list[int]]) -> None:
    answer = real_server.openai().completions.create(prompt=PROMPTS, **GREEDY)
    assert [choice.model_dump()["token_ids"] for choice in answer.choices] == expected
    real_server.wait_idle()
    assert real_server.metric("kv_cache_usage_perc") < 1


def test_streams_side_by_side_equal_the_offline_engines(real_server: RunningServer, expected: list[list[int]]) -> None:
    async def one(client: Any, prompt: str) -> list[int]:
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return [
            token async for chunk in stream for choice in chunk.choices for token in choice.model_dump()["token_ids"]
        ]

    async def main() -> list[list[int]]:
        async with real_server.async_openai() as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(main()) == expected * 4


def test_a_second_time_is_served_from_the_cache(real_server: RunningServer) -> None:
    prompt = "Every page of memory belongs to one request at a time. " * 3
    usages = [real_server.openai().completions.create(prompt=prompt, **GREEDY).usage for _ in range(2)]
    assert usages[1] is not None and usages[1].prompt_tokens_details is not None
    assert (usages[1].prompt_tokens_details.cached_tokens or 0) >= 16
    real_server.wait_idle()
    assert real_server.metric("prefix_cache_hits_total") >= 16


def test_logprobs_of_an_echoed_prompt_are_the_models(real_server: RunningServer) -> None:
    answer = real_server.openai().completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=1, temperature=0, echo=True, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    for token, value, top in zip(logprobs.tokens or [], logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        if value is not None:
            assert value <= max(top.values()) + 1e-6 and token in top
    assert logprobs.token_logprobs[-1] == pytest.approx(max(logprobs.top_logprobs[-1].values()))


def test_batches_of_token_ids_are_scored_as_lm_eval_asks(real_server: RunningServer, offline: LLM) -> None:
    batch = [[5 + i, 9, 77, 40 + i, 300] * (3 + i) for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = offline.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    body = {
        "model": MODEL,
        "prompt": batch,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = real_server.post("/v1/completions", body).json()["choices"]
    for ids, output, choice in zip(batch, outputs, sorted(choices, key=lambda one: one["index"]), strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == len(choice["logprobs"]["top_logprobs"]) == len(ids) + 1 and scores[0] is None
        positions = (output.prompt_logprobs or [])[1:]
        wanted = [position[token].logprob for token, position in zip(ids[1:], positions, strict=True) if position]
        assert scores[1:-1] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_generating(real_server: RunningServer, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[:2], "echo": True, "logprobs": 1, "temperature": 0}
    client = real_server.openai()
    longer = client.completions.create(**options, max_tokens=1).choices
    if stream:
        usage = {"include_usage": True}
        chunks = list(client.completions.create(**options, max_tokens=0, stream=True, stream_options=usage))
        choices = sorted((one for chunk in chunks for one in chunk.choices), key=lambda one: one.index)
        counts = chunks[-1].usage
    else:
        answer = client.completions.create(**options, max_tokens=0)
        choices, counts = answer.choices, answer.usage
    assert [choice.text for choice in choices] == PROMPTS[:2]
    assert counts is not None and counts.completion_tokens == 0
    for choice, other in zip(choices, longer, strict=True):
        assert choice.logprobs is not None and other.logprobs is not None and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == pytest.approx((other.logprobs.token_logprobs or [])[:-1], nan_ok=True)
    assert real_server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).status_code == 400


def test_embeddings_equal_the_offline_engines(real_server: RunningServer, offline: LLM) -> None:
    answer = real_server.openai().embeddings.create(model=MODEL, input=PROMPTS)
    for one, wanted in zip(answer.data, offline.embed(PROMPTS, use_tqdm=False), strict=True):
        assert one.embedding == pytest.approx(wanted, abs=1e-5)


def test_a_response_is_the_chats_answer(real_server: RunningServer) -> None:
    client = real_server.openai()
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=12, temperature=0
    )
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content


def test_a_chat_answers(real_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    client = real_server.openai()
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(real_server: RunningServer) -> None:
    response = real_server.post("/v1/completions", {"prompt": [5] * 300, "max_tokens": 5})
    assert response.status_code == 400 and "256" in response.json()["error"]["message"]
    assert real_server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_leaving_a_stream_frees_the_pages(real_server: RunningServer) -> None:
    stream = real_server.openai().completions.create(**{**GREEDY, "max_tokens": 200}, prompt="Once", stream=True)
    next(iter(stream))
    stream.close()
    real_server.wait_idle()
    assert real_server.engine.stats.running == 0


def test_memory_shows_whose_pages_are_in_use_while_a_stream_runs(real_server: RunningServer) -> None:
    stream = real_server.openai().completions.create(
        prompt="Once upon a time", stream=True, **GREEDY | {"max_tokens": 200}
    )
    next(iter(stream))
    body = real_server.get("/memory").json()
    stream.close()
    (one,) = body["state"]["requests"]
    (group,) = body["state"]["groups"]
    assert group["in_use"] == sum(count for _, count in one["pages"][0]) > 0
    assert body["plan"]["num_slabs"] == body["state"]["num_slabs"]
    real_server.wait_idle()
    body = real_server.get("/memory").json()
    assert body["state"]["requests"] == [] and body["state"]["groups"][0]["in_use"] == 0
    text = real_server.get("/metrics").text
    assert 'pagerunner:group_pages_in_use{engine="0",group="full",model_name="tiny"} 0.0' in text
    assert "pagerunner:group_prefix_hits_total" in text


def test_evictions_are_counted_with_how_long_their_pages_stayed(real_server: RunningServer) -> None:
    def evictions() -> tuple[float, float]:
        lines = dict(line.rsplit(" ", 1) for line in real_server.get("/metrics").text.splitlines())
        labels = 'engine="0",group="full",model_name="tiny"'
        counted = lines['vllm:kv_block_idle_before_evict_seconds_count{engine="0",model_name="tiny"}']
        return float(lines[f"pagerunner:group_evictions_total{{{labels}}}"]), float(counted)

    before = evictions()
    for number in range(200):
        real_server.openai().completions.create(model=MODEL, prompt=[number % 50, *range(90)], max_tokens=1)
        after = evictions()
        if after[0] > before[0]:
            break
    assert after[0] - before[0] == after[1] - before[1] > 0


def test_metrics_count_exactly_what_was_sent(real_server: RunningServer) -> None:
    real_server.wait_idle()

    def read() -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(real_server.get("/metrics").text)
        return {
            (sample.name, sample.labels.get("source") or sample.labels.get("finished_reason") or ""): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    before = read()
    client = real_server.openai()
    usages = [
        client.completions.create(
            model=MODEL,
            prompt=f"{number}{number} is a number " * 4,
            max_tokens=10 + number,
            extra_body={"ignore_eos": True},
        ).usage
        for number in (1, 2, 3, 3)
    ]
    client.completions.create(model=MODEL, prompt=[9, 9, 9], n=3, max_tokens=2, extra_body={"ignore_eos": True})
    real_server.wait_idle()
    after = read()
    change = {key: value - before.get(key, 0) for key, value in after.items()}
    prompt = sum(usage.prompt_tokens for usage in usages if usage)
    cached = sum(
        (usage.prompt_tokens_details.cached_tokens or 0) for usage in usages if usage and usage.prompt_tokens_details
    )
    assert cached > 0
    assert change["vllm:prompt_tokens_total", ""] == change["vllm:request_prompt_tokens_sum", ""] == prompt + 9
    generated = 11 + 12 + 13 + 13 + 6
    assert change["vllm:generation_tokens_total", ""] == change["vllm:request_generation_tokens_sum", ""] == generated
    assert (
        change["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == change["vllm:prompt_tokens_cached_total", ""]
    )
    assert cached <= change["vllm:prompt_tokens_cached_total", ""] < cached + 9
    assert (
        sum(change["vllm:prompt_tokens_by_source_total", s] for s in ("local_compute", "local_cache_hit")) == prompt + 9
    )
    assert change["vllm:request_success_total", "length"] == 7
    assert (
        change["vllm:time_to_first_token_seconds_count", ""]
        == change["vllm:e2e_request_latency_seconds_count", ""]
        == 7
    )
    assert change["vllm:inter_token_latency_seconds_count", ""] == generated - 7
    assert change["vllm:request_params_n_sum", ""] == 4 + 3 and change["vllm:request_params_n_count", ""] == 5
    assert change["vllm:request_params_max_tokens_sum", ""] == generated
    for name in ("queue", "prefill", "decode", "inference", "time_per_output_token"):
        name = f"vllm:request_{name}_seconds" if "token" in name else f"vllm:request_{name}_time_seconds"
        assert change[f"{name}_count", ""] == 7 and change[f"{name}_sum", ""] >= 0
    latency = change["vllm:e2e_request_latency_seconds_sum", ""]
    parts = change["vllm:request_queue_time_seconds_sum", ""] + change["vllm:request_inference_time_seconds_sum", ""]
    assert 0 < change["vllm:request_inference_time_seconds_sum", ""] <= parts <= latency
    assert 0 < change["pagerunner:device_busy_seconds_total", ""] <= latency
    assert after["pagerunner:startup_seconds", ""] > 0


# -- hundreds of concurrent streams, half of them dropped at random moments: nothing is left behind

STREAMS = effort(250, 500)
BODY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LAST = {**BODY, "prompt": "The last one", "max_tokens": 24}


def tokens(server: RunningServer) -> list[int]:
    found: list[int] = server.post("/v1/completions", LAST).json()["choices"][0]["token_ids"]
    return found


async def one(server: RunningServer, number: int, chance: random.Random) -> str:
    """Reads its stream to the end, or leaves: before the request is whole, before an answer, or while it comes.

    Lines are counted, not seconds: a fast machine answers all streams in any number of seconds that a slow one needs.
    """
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({**BODY, "prompt": f"Stream {number % 50}", "stream": True, "n": 1 + number % 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    leaves = number % 2 == 1
    whole = not leaves or chance.random() < 0.9
    writer.write(head.encode() + (data if whole else data[:20]))
    # A stream has 18 lines or more: 8 of headers and what precedes the first tokens, and 6 from "[DONE]" on.
    most_lines = (chance.randint(0, 11) if whole else 0) if leaves else None
    text = b""
    async with asyncio.timeout(LONG):
        while most_lines is None or text.count(b"\n") < most_lines:
            line = await reader.readline()
            if not line:
                break
            text += line
    if leaves and chance.random() < 0.5:
        writer.transport.abort()  # a reset instead of an orderly end
    writer.close()
    return "left" if b"[DONE]" not in text else text.decode()


def test_every_page_is_free_and_the_next_answer_exact(real_server: RunningServer) -> None:
    expected = tokens(real_server)
    chance = random.Random(0)

    async def storm() -> list[str]:
        return await asyncio.gather(*(one(real_server, number, chance) for number in range(STREAMS)))

    texts = asyncio.run(storm())
    assert not [number for number in range(0, STREAMS, 2) if texts[number] == "left"]
    assert sum(text == "left" for text in texts) == STREAMS // 2
    for number in range(0, STREAMS, 2):  # streams of one prompt have one text
        assert _ids(texts[number]) == _ids(texts[number % 50]), number
    real_server.wait_idle(20)
    assert tokens(real_server) == expected
    real_server.wait_idle()
    state = real_server.get("/memory").json()["state"]
    assert state["requests"] == [] and [group["in_use"] for group in state["groups"]] == [0]
    assert real_server.engine.num_unfinished == 0 and real_server.metric("kv_cache_usage_perc") == 0
    assert real_server.get("/health").status_code == 200


def _ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
