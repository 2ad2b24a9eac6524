"""LLM.stream gives the same text as generate, piece by piece, and leaves nothing behind."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from pagerunner import LLM, EngineSleepingError, InvalidRequestError, SamplingParams
from pagerunner.demo import demo_path

PROMPT = "<|bos|><|user|>What is 12 + 30?<|end|><|assistant|>"


@pytest.fixture(scope="module")
def llm():
    return LLM(str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=4, use_tqdm=False)


def params(**values):
    return SamplingParams(temperature=0.0, max_tokens=32, **values)


def idle(llm):
    stats = llm.stats()
    return stats.running == stats.waiting == 0


def test_deltas_add_up_to_what_generate_returns(llm):
    [whole] = llm.generate([PROMPT], params(), use_tqdm=False)
    pieces = list(llm.stream(PROMPT, params(output_kind="delta")))
    assert len(pieces) > 2 and pieces[-1].finished
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text == "12 + 30 = 42"
    tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert tokens == list(whole.outputs[0].token_ids)


def test_cumulative_outputs_grow(llm):
    texts = [output.outputs[0].text for output in llm.stream(PROMPT, params())]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_closing_early_frees_the_request(llm):
    stream = llm.stream(PROMPT, params(output_kind="delta"))
    next(stream)
    assert not idle(llm)
    stream.close()
    assert idle(llm)


def test_a_prompt_is_cached_from_its_first_token_on(llm):
    """A client whose answer ended at a stop string may ask again at once: the pages don't wait for the abort."""
    prompt = PROMPT + "The answer is a number between one and a hundred, and it is written in digits. "
    whole = len(llm.get_tokenizer().encode(prompt))
    stream = llm.stream(prompt, params(output_kind="delta"))
    assert next(stream).num_cached_tokens < 16 < whole
    [beside] = llm.generate([prompt], params(), use_tqdm=False)
    assert whole - 16 <= beside.num_cached_tokens < whole
    stream.close()
    [after] = llm.generate([prompt], params(), use_tqdm=False)
    assert after.num_cached_tokens == beside.num_cached_tokens


def test_a_suspended_stream_and_generate_do_not_disturb_each_other(llm):
    stream = llm.stream(PROMPT, params(output_kind="delta"))
    text = next(stream).outputs[0].text
    [other] = llm.generate([PROMPT], params(), use_tqdm=False)
    text += "".join(piece.outputs[0].text for piece in stream)
    assert text == other.outputs[0].text
    assert idle(llm)


def test_chat_streams_through_the_template(llm):
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    pieces = list(llm.stream_chat(messages, params(output_kind="delta")))
    assert "".join(piece.outputs[0].text for piece in pieces) == "12 + 30 = 42"


def test_a_bad_prompt_is_refused_and_the_next_one_runs(llm):
    with pytest.raises(InvalidRequestError):
        next(llm.stream("", params()))
    assert list(llm.stream(PROMPT, params()))[-1].finished


@pytest.mark.parametrize(
    ("mode", "reason", "same"), [("abort", "abort", False), ("wait", "stop", True), ("keep", "stop", True)]
)
def test_a_suspended_stream_hears_what_sleep_made_of_its_request(mode, reason, same):
    llm = LLM(str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=4, enable_sleep_mode=True, use_tqdm=False)
    [whole] = llm.generate([PROMPT], params(), use_tqdm=False)
    stream = llm.stream(PROMPT, params())
    next(stream)
    llm.sleep(1, mode)
    assert idle(llm) == (mode != "keep")
    llm.wake_up()
    last = None
    for _ in range(len(whole.outputs[0].token_ids) + 2):
        last = next(stream, None) or last
    assert last.finished and last.outputs[0].finish_reason == reason
    assert (last.outputs[0].token_ids == whole.outputs[0].token_ids) == same


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_stream_read_while_the_engine_sleeps_says_so_and_goes_on_after_waking(level, read):
    llm = LLM(str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=4, enable_sleep_mode=True, use_tqdm=False)
    [whole] = llm.generate([PROMPT], params(n=2), use_tqdm=False)
    stream = llm.stream(PROMPT, params(n=2, output_kind="delta"))
    pieces = [next(stream) for _ in range(read)]
    llm.sleep(level, "keep")
    for _ in range(2):
        with pytest.raises(EngineSleepingError, match="is paused" if level == 0 else f"level {level}"):
            next(stream)
    llm.wake_up()
    assert llm.generate([PROMPT], params(n=2), use_tqdm=False)[0].outputs[0].text == whole.outputs[0].text
    pieces += list(stream)
    for index in (0, 1):
        tokens = [token for piece in pieces for one in piece.outputs if one.index == index for token in one.token_ids]
        assert tokens == list(whole.outputs[index].token_ids)
    assert idle(llm)


def test_a_stream_that_is_closed_or_forgotten_while_the_engine_sleeps_is_gone():
    llm = LLM(str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=4, enable_sleep_mode=True, use_tqdm=False)
    streams = [llm.stream(PROMPT, params()) for _ in range(3)]
    for stream in streams:
        next(stream)
    llm.sleep(1, "keep")
    for stream in streams:
        with pytest.raises(EngineSleepingError):
            list(stream)  # what had come before is handed out first
    streams[0].close()
    with pytest.raises(KeyError):
        streams[1].throw(KeyError("the reader's own"))
    assert next(streams[0], None) is next(streams[1], None) is None
    del stream, streams
    gc.collect()
    assert idle(llm)
    llm.wake_up()
    assert llm.generate([PROMPT], params(), use_tqdm=False)[0].outputs[0].text == "12 + 30 = 42"
