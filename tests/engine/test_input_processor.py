"""Prompts and parameters to engine requests, and every refusal with its numbers."""

from __future__ import annotations

import pytest

from pagerunner import limits
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.errors import InvalidRequestError
from pagerunner.types import SamplingParams
from text.tokenizers_for_tests import tokenizer

V = 330
LENGTH = 32


def processor(kind: str | None = "byte_level", **kwargs: object) -> InputProcessor:
    settings: dict = {"vocab_size": V, "max_model_len": LENGTH, "eos_token_ids": (1,), "seed": 7} | kwargs
    return InputProcessor(tokenizer(kind) if kind else None, **settings)


def refused(
    prompt: object, params: SamplingParams | None = None, kind: str | None = "byte_level", **kwargs: object
) -> str:
    one = processor(kind, **kwargs)
    with pytest.raises(InvalidRequestError) as error:
        one.process(prompt, params or SamplingParams(), "r")
    assert one.process([5, 6], SamplingParams(), "next")[0].prompt_token_ids == [5, 6]
    return str(error.value)


@pytest.mark.parametrize("prompt", ["the fox", {"prompt": "the fox"}, {"prompt_token_ids": None, "prompt": "the fox"}])
def test_text_prompts(prompt: object) -> None:
    [request] = processor().process(prompt, SamplingParams(), "r", 3, "salt")
    assert request.prompt_token_ids == tokenizer("byte_level").encode("the fox")
    assert (request.request_id, request.parent_id, request.priority, request.cache_salt) == ("r", "r", 3, "salt")
    assert request.eos_token_ids == (1,)


@pytest.mark.parametrize(
    "prompt", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 6], "prompt": "shown"}]
)
@pytest.mark.parametrize("kind", ["byte_level", None])
def test_token_prompts(prompt: object, kind: str | None) -> None:
    [request] = processor(kind).process(prompt, SamplingParams(detokenize=kind is not None), "r")
    assert request.prompt_token_ids == [5, 6]


def test_siblings_share_a_parent_and_count_seeds_up() -> None:
    requests = processor().process([5], SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1), "r")
    assert [r.request_id for r in requests] == ["r_0", "r_1", "r_2"]
    assert [r.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {r.parent_id for r in requests} == {"r"}
    assert [r.params.prompt_logprobs for r in requests] == [1, None, None]


def test_unseeded_requests_get_seeds_that_repeat_with_the_engine_seed() -> None:
    def seeds(engine_seed: int) -> list[int]:
        one = processor(seed=engine_seed)
        return [one.process([5], SamplingParams(), str(i))[0].seed for i in range(20)]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8)}) == 40


@pytest.mark.parametrize(("asked", "given"), [(None, 30), (16, 16), (30, 30), (31, 30), (10**6, 30)])
def test_max_tokens_ends_at_the_models_length(asked: int | None, given: int) -> None:
    assert processor().process([5, 6], SamplingParams(max_tokens=asked), "r")[0].max_tokens == given


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompt(prompt: object) -> None:
    assert "empty" in refused(prompt)


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1, 5000])
def test_prompt_longer_than_the_model(length: int) -> None:
    message = refused([5] * length)
    assert f"prompt has {length};" in message and f"{LENGTH} tokens" in message and "max_model_len" in message
    assert processor().process([5] * (LENGTH - 1), SamplingParams(), "r")[0].max_tokens == 1


@pytest.mark.parametrize("bad", [V, -1, 10**30])
def test_token_ids_outside_the_vocabulary(bad: int) -> None:
    message = refused([5, 6, bad])
    assert f"{bad} at index 2" in message and f"{V} tokens" in message


@pytest.mark.parametrize("bad", ["5", 5.0, True, None, [5]])
def test_token_ids_that_are_no_integers(bad: object) -> None:
    assert "at index 1" in refused({"prompt_token_ids": [5, bad]})


@pytest.mark.parametrize(
    "prompt", [None, 5, b"bytes", {}, {"prompt": 5}, {"prompt_token_ids": "56"}, {"prompt_token_ids": 5}]
)
def test_prompts_of_another_kind(prompt: object) -> None:
    refused(prompt)


def test_unsupported_keys_are_named() -> None:
    assert "'multi_modal_data'" in refused({"prompt": "a", "multi_modal_data": {}})
    assert "cache_salt" in refused({"prompt": "a", "cache_salt": 5})


def test_salt_may_come_with_the_prompt() -> None:
    assert processor().process({"prompt": "a", "cache_salt": "x"}, SamplingParams(), "r")[0].cache_salt == "x"


def test_text_that_is_no_unicode() -> None:
    assert "character 3" in refused("abc\ud800")


def test_min_tokens_beyond_the_length() -> None:
    message = refused([5, 6], SamplingParams(min_tokens=31, max_tokens=None))
    assert "31" in message and "30" in message and "32" in message


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[V]),
        SamplingParams(logit_bias={V: 1.0}),
        SamplingParams(allowed_token_ids=[1, V]),
    ],
)
def test_parameters_outside_the_vocabulary(params: SamplingParams) -> None:
    assert f"token id {V}, outside the vocabulary of {V}" in refused([5], params)


def test_bad_words_outside_the_models_vocabulary() -> None:
    ids = tokenizer("byte_level").encode("the")
    assert "bad_words" in refused([1], SamplingParams(bad_words=["the"]), vocab_size=max(ids))


@pytest.mark.parametrize("params", [SamplingParams(stop="a"), SamplingParams(bad_words="a")])
def test_what_needs_a_tokenizer(params: SamplingParams) -> None:
    assert "tokenizer" in refused([5], params, kind=None)
    assert "skip_tokenizer_init" in refused("text", kind=None)


def test_bad_words_with_and_without_a_leading_space() -> None:
    encode = tokenizer("byte_level").encode
    [request] = processor().process([5], SamplingParams(bad_words=["the", " the", "zz"]), "r")
    assert len(encode(" the")) == len(encode("the")) == 1 and len(encode(" zz")) > len(encode("zz"))
    assert request.bad_words_ids == (tuple(encode("the")), tuple(encode(" the")), tuple(encode("zz")))


def test_bad_words_have_a_limit_in_tokens() -> None:
    words = [f"{number:04}" + "€" * 300 for number in range(30)]
    assert str(limits.MAX_BAD_WORD_TOKENS) in refused([5], SamplingParams(bad_words=words))


def test_one_bad_word_has_a_limit_in_tokens_too() -> None:
    """The sampler compares so many of the last tokens with each word."""
    most = limits.MAX_BAD_WORD_LENGTH
    encode = tokenizer("byte_level").encode
    word = "€" * most
    length = len(encode(word))
    assert most < length <= limits.MAX_BAD_WORD_TOKENS
    message = refused([5], SamplingParams(bad_words=["the", word]))
    assert f"a word of {length} tokens" in message and str(most) in message
    assert "PAGERUNNER_LIMIT_MAX_BAD_WORD_LENGTH" in message
    longest = next(word[:count] for count in range(most, 0, -1) if len(encode(word[:count])) <= most)
    [request] = processor().process([5], SamplingParams(bad_words=[longest]), "r")
    assert max(map(len, request.bad_words_ids)) > most / 2
