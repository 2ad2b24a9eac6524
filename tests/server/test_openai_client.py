"""The unmodified openai package against a listening server. The fake core repeats the prompt's tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from helpers import fake_core
from helpers.serving import MODEL, RunningServer
from pagerunner.text.tokenizer import Tokenizer

PROMPT = "What is the capital of France? Grüße 日本語 🙂"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello, world"}]


@pytest.fixture(scope="module")
def tokenizer(text_side: Path) -> Tokenizer:
    return Tokenizer.from_path(str(text_side))


def test_models_are_listed_and_found(server: RunningServer) -> None:
    client = server.openai()
    [card] = client.models.list().data
    assert card.id == MODEL
    assert card.model_dump()["max_model_len"] == 2048
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = server.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=len(ids))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (PROMPT, "length", 0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(ids))
    assert answer.usage.total_tokens == 2 * len(ids)


def test_completion_has_sixteen_tokens_unless_told(server: RunningServer) -> None:
    usage = server.openai().completions.create(model=MODEL, prompt=PROMPT).usage
    assert usage is not None and usage.completion_tokens == 16


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
def test_every_kind_of_prompt(server: RunningServer, tokenizer: Tokenizer, kind: str) -> None:
    texts = [PROMPT, "one two three"] if kind in ("texts", "lists of ids") else [PROMPT]
    ids = [tokenizer.encode(text) for text in texts]
    prompt = {"text": PROMPT, "texts": texts, "ids": ids[0], "lists of ids": ids}[kind]
    answer = server.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=3)
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.text for choice in answer.choices] == [tokenizer.decode(one[:3]) for one in ids]
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))


def test_streamed_completion_is_the_same_text(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    stream = server.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=len(ids), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == PROMPT
    assert not any("\ufffd" in choice.text for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_n_and_several_prompts_give_every_index_once(server: RunningServer) -> None:
    client = server.openai()
    answer = client.completions.create(model=MODEL, prompt=["abc", "xyz"], n=2, max_tokens=2)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    texts: dict[int, str] = {}
    for chunk in client.completions.create(model=MODEL, prompt=["abc", "xyz"], n=2, max_tokens=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_completion_logprobs_and_echo(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello, world")
    answer = server.openai().completions.create(model=MODEL, prompt="hello, world", max_tokens=2, logprobs=2, echo=True)
    [choice] = answer.choices
    assert choice.text == "hello, world" + tokenizer.decode(ids[:2])
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == [tokenizer.decode([one]) for one in [*ids, *ids[:2]]]
    assert logprobs.token_logprobs == [None, *([-0.5] * (len(ids) + 1))]
    assert logprobs.top_logprobs is not None and logprobs.text_offset is not None
    assert logprobs.top_logprobs[0] is None
    assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_streamed_logprobs_join_to_the_whole(server: RunningServer) -> None:
    client = server.openai()
    options = {"model": MODEL, "prompt": "hello, world", "max_tokens": 6, "logprobs": 1, "echo": True}
    [whole] = client.completions.create(**options).choices
    parts = [choice.logprobs for chunk in client.completions.create(**options, stream=True) for choice in chunk.choices]
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole.logprobs, name)


def test_chat(server: RunningServer, tokenizer: Tokenizer) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    answer = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=len(ids), extra_body={"skip_special_tokens": False}
    )
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", rendered, "length")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_chat_may_fill_the_context_and_parts_are_joined(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = server.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": parts}],
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert answer.usage is not None and answer.usage.total_tokens == 2048
    assert str(answer.choices[0].message.content).startswith("<|im_start|>user\na\nb<|im_end|>\n")


def test_streamed_chat_starts_with_the_role(server: RunningServer) -> None:
    client = server.openai()
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "n": 2}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    for index in (0, 1):
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert deltas[0].role == "assistant" and not deltas[0].content
        assert all(delta.role is None for delta in deltas[1:])
        texts[index] = "".join(delta.content or "" for delta in deltas)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24


def test_chat_logprobs(server: RunningServer) -> None:
    client = server.openai()
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    [choice] = client.chat.completions.create(**options).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 4
    for entry in choice.logprobs.content:
        assert entry.logprob == -0.5
        assert entry.bytes == list(entry.token.encode())
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5, -2.5]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for one in chunk.choices
        if one.logprobs is not None
        for entry in one.logprobs.content or []
    ]
    assert streamed == choice.logprobs.content


def test_stop_token_and_stop_string_end_with_stop(server: RunningServer, tokenizer: Tokenizer) -> None:
    client, ids = server.openai(), tokenizer.encode("hello, world")
    [choice] = client.completions.create(
        model=MODEL, prompt="hello, world", max_tokens=50, extra_body={"stop_token_ids": [ids[2]]}
    ).choices
    assert choice.finish_reason == "stop" and choice.model_dump()["stop_reason"] == ids[2]
    [choice] = client.completions.create(model=MODEL, prompt="hello, world", max_tokens=50, stop=["worldh"]).choices
    assert (choice.text, choice.finish_reason) == ("hello, ", "stop")
    chunks = client.completions.create(model=MODEL, prompt="hello, world", max_tokens=500, stop="worldh", stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello, "
    server.wait_idle()


def test_cached_tokens_are_reported(server: RunningServer) -> None:
    client = server.openai()
    prompt = "a prompt that no other test sends"
    first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=40).usage for _ in range(2))
    assert first is not None and second is not None and second.prompt_tokens_details is not None
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens


def test_extension_fields_reach_the_engine(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc def")
    body = {
        "min_tokens": 2,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "bad_words": ["zzz"],
        "allowed_token_ids": ids,
        "cache_salt": "mine",
        "priority": 3,
        "include_stop_str_in_output": True,
        "return_token_ids": True,
        "add_special_tokens": False,
        "prompt_logprobs": 1,
    }
    answer = server.openai().completions.create(
        model=MODEL, prompt="abc def", max_tokens=2, seed=1, logit_bias={str(ids[0]): 1}, user="me", extra_body=body
    )
    raw = answer.choices[0].model_dump()
    assert raw["token_ids"] == [ids[0], ids[1]]
    assert raw["prompt_token_ids"] == ids
    assert raw["prompt_logprobs"][0] is None
    assert raw["prompt_logprobs"][1][str(ids[1])]["logprob"] == -0.5


def test_fields_that_change_nothing_are_accepted(server: RunningServer) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "use_beam_search": False}
    answer = server.openai().chat.completions.create(
        model=MODEL,
        messages=[*MESSAGES, {"role": "assistant", "content": "hi", "refusal": None}, {"role": "user", "content": "a"}],
        max_tokens=1,
        store=False,
        metadata={"a": "b"},
        extra_body=neutral,
    )
    assert len(answer.choices) == 1


def test_continuous_usage_counts_up(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.openai().completions.create(model=MODEL, prompt="abc", max_tokens=5, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == 5 and len(counts) == len(chunks)


def test_the_stream_ends_with_done_on_the_wire(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])


def test_thirty_two_streams_at_once(server: RunningServer, tokenizer: Tokenizer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"stream {number} says hello", max_tokens=30, stream=True
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def main() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    for number, text in enumerate(asyncio.run(main())):
        ids = tokenizer.encode(f"stream {number} says hello")
        assert text == tokenizer.decode([ids[index % len(ids)] for index in range(30)])
    server.wait_idle()


def test_a_prompt_that_is_only_scored_ends_by_its_length(server: RunningServer) -> None:
    """Whatever the token is that the engine makes beside it, here one that ends the text."""
    body = {"prompt": [fake_core.SCRIPT, fake_core.SCRIPT_END], "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert len(choice["logprobs"]["tokens"]) == 2
