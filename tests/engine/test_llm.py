"""LLM as its users see it: prompts, parameters, sharing, sleep, and errors that harm nobody else."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from pagerunner import LLM, EngineArgs, SamplingParams
from pagerunner.engine.frontend import input_processor
from pagerunner.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineSleepingError,
    InvalidRequestError,
    PagerunnerError,
)
from pagerunner.types import checks
from pagerunner.types.checks import extremes

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG_PROMPT = {"prompt_token_ids": [7 + index % 400 for index in range(100)]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llm"), "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), max_model_len=256, enable_sleep_mode=True)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_prompt_forms_agree(llm: LLM) -> None:
    text = "The quick brown fox"
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.generate([text, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    first, second, third = tokens(outputs)
    assert first == second == third
    assert tokens(llm.generate(text, GREEDY, use_tqdm=False)) == [first]
    assert outputs[0].prompt == text
    assert outputs[2].prompt is None
    assert outputs[2].prompt_token_ids == ids
    assert outputs[0].outputs[0].text == llm.get_tokenizer().decode(first)
    assert outputs[0].outputs[0].finish_reason == "length"
    assert tokens(llm.generate([ids, tuple(ids), text], GREEDY, use_tqdm=False)) == [first] * 3
    [alone] = llm.generate(ids, GREEDY, use_tqdm=False)
    assert tokens([alone]) == [first] and alone.prompt is None and alone.prompt_token_ids == ids
    assert [tokens([output]) for output in llm.stream(ids, GREEDY)][-1] == [first]


def test_the_ids_of_a_prompt_are_looked_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look(ids: Collection[int]) -> tuple[int, int]:
        looked.append(len(ids))
        return extremes(ids)

    for module in (checks, input_processor):
        monkeypatch.setattr(module, "extremes", look)
    llm.generate([LONG_PROMPT, LONG_PROMPT], GREEDY, use_tqdm=False)
    assert looked.count(100) == 2
    with pytest.raises(InvalidRequestError, match="512"):
        llm.generate({"prompt_token_ids": [5] * 99 + [512]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "prompts", [None, 5, [None], [5, "a"], [[5], 6], b"a", [("a",)], [[[5]]], torch.tensor([5, 6])]
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match="A prompt must be a text, a list of token ids or a mapping|must hold"
    ):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_a_fork_of_the_process_hears_that_the_engine_is_not_there(llm: LLM) -> None:
    stream = llm.stream("The quick brown fox", GREEDY)
    next(stream)
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate("one", GREEDY, use_tqdm=False),
        "stream": lambda: next(stream),
        "stats": llm.stats,
        "sleep": llm.sleep,
        "wake_up": llm.wake_up,
    }
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may go on here
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                os.write(writer, f"{name}: {error}\n".encode())
        os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], 20)[0], "the fork hangs"
        with os.fdopen(reader) as said:
            lines = said.read().splitlines()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [line.partition(":")[0] for line in lines] == list(calls)
    sentence = f"This LLM was made in process {os.getpid()}, of which process {child} is a fork."
    assert all(
        sentence in line and "make the LLM in a process that multiprocessing's spawn method starts" in line
        for line in lines
    )
    assert list(stream)[-1].finished  # nothing is lost where it was made


def test_generate_returns_whole_outputs_whatever_their_kind(llm: LLM) -> None:
    whole = llm.generate("one", GREEDY, use_tqdm=False)[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind="delta")
    [output] = llm.generate("one", params, use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (whole.token_ids, whole.text)


def test_one_sampling_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(found) for found in tokens(outputs)] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="2 entries for 3"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_seeded_requests_do_not_depend_on_the_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    alone = tokens(llm.generate(LONG_PROMPT, seeded, use_tqdm=False))[0]
    noise = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    crowd = llm.generate(["x", "y z", LONG_PROMPT, "w"], [noise, noise, seeded, noise], use_tqdm=False)
    assert tokens(crowd)[2] == alone
    other = SamplingParams(temperature=1.0, seed=12, max_tokens=12, ignore_eos=True)
    assert tokens(llm.generate(LONG_PROMPT, other, use_tqdm=False))[0] != alone


def test_n_samples_share_the_prompt_pages(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=6, ignore_eos=True)
    for caching in (True, False):
        llm = LLM(str(checkpoint), max_model_len=256, enable_prefix_caching=caching, num_gpu_blocks_override=16)
        [output] = llm.generate(LONG_PROMPT, params, use_tqdm=False)
        assert [one.index for one in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 4
        # 100 tokens are 7 pages, so four unshared copies would not fit 16 pages at once without preemption.
        assert llm.stats().preemptions_total == 0
        for index, one in enumerate(output.outputs):
            alone = SamplingParams(temperature=1.0, seed=3 + index, max_tokens=6, ignore_eos=True)
            assert tokens(llm.generate(LONG_PROMPT, alone, use_tqdm=False))[0] == one.token_ids


def test_a_batch_shares_a_prefix_computed_in_the_same_step(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=256)
    head = [9 + index % 300 for index in range(96)]
    prompts = [{"prompt_token_ids": [*head, 5 + index]} for index in range(8)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] + [96] * 7
    cold = LLM(str(checkpoint), max_model_len=256, enable_prefix_caching=False)
    assert tokens(outputs) == tokens(
        cold.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    )


def test_prefix_hits_are_counted_and_can_be_reset(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=256)
    first = llm.generate(LONG_PROMPT, GREEDY, use_tqdm=False)
    second = llm.generate(LONG_PROMPT, GREEDY, use_tqdm=False)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 96)
    assert tokens(first) == tokens(second)
    assert llm.stats().prefix_hits_total == 96
    assert llm.reset_prefix_cache()
    assert llm.generate(LONG_PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake_give_the_same_tokens(llm: LLM, level: int) -> None:
    before = tokens(llm.generate(["one", LONG_PROMPT], GREEDY, use_tqdm=False))
    llm.sleep(level)
    with pytest.raises(EngineSleepingError, match="wake_up"):
        llm.generate("one", GREEDY, use_tqdm=False)
    llm.wake_up()
    assert tokens(llm.generate(["one", LONG_PROMPT], GREEDY, use_tqdm=False)) == before


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_were_made_in_inference_mode_are_filled_again_outside_it(
    checkpoint: Path, load_format: str
) -> None:
    with torch.inference_mode():
        llm = LLM(str(checkpoint), max_model_len=64, enable_sleep_mode=True, load_format=load_format, use_tqdm=False)
    before = tokens(llm.generate("one", GREEDY, use_tqdm=False))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm.generate("one", GREEDY, use_tqdm=False)) == before


def test_sleep_needs_its_switch(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        LLM(str(checkpoint), max_model_len=64).sleep(1)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False) == text


def test_the_tokenizers_template_gives_a_text(llm: LLM) -> None:
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.apply_chat_template(messages) and text.endswith("assistant\n")
    with pytest.raises(InvalidRequestError, match="add_special_tokens=False"):
        tokenizer.apply_chat_template(messages, tokenize=True)


def test_chat_goes_on_with_a_message_and_shows_tools(llm: LLM) -> None:
    def prompt(messages: list[dict[str, str]], **options: object) -> str:
        [output] = llm.chat(messages, GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
        return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    user, begun = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, "}
    whole = prompt([user, begun], add_generation_prompt=False)
    assert whole.endswith("Well, <|im_end|>\n")
    goes_on = prompt([user, begun], add_generation_prompt=False, continue_final_message=True)
    assert goes_on == whole.removesuffix("<|im_end|>\n")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        prompt([user, begun], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="last message"):
        prompt([{"role": "user", "content": ""}], add_generation_prompt=False, continue_final_message=True)
    own = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}{{ mood }}"
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert prompt([user], chat_template=own, tools=tools, chat_template_kwargs={"mood": "!"}) == "[look]hello!"
    assert prompt([user], chat_template=own, chat_template_kwargs={"tools": tools}) == "[look]hello"
    for name in ("goes_on", "options", "self"):  # any name may be one of the template's
        named = "{{ messages[0].content }}{{ " + ("mood" if name == "self" else name) + " }}"
        assert prompt([user], chat_template=named, chat_template_kwargs={name: 1, "mood": 1}) == "hello1"
    for refused, others in (("tools", {"tools": tools}), ("messages", {})):
        with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs may not set {refused}"):
            prompt([user], chat_template=own, chat_template_kwargs={refused: []}, **others)


def test_chat_shows_templates_texts_and_values_as_the_server_does(llm: LLM) -> None:
    """Templates that know texts only take a list of parts for an empty text."""
    shown = "{% for m in messages %}{{ m.content if m.content is string else '?' }}|{{ m.tool_calls }}\n{% endfor %}"

    def prompt(*messages: Any) -> str:
        [output] = llm.chat(list(messages), GREEDY, use_tqdm=False, chat_template=shown)
        return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    def parts(*found: Any) -> dict[str, Any]:
        return {"role": "user", "content": list(found)}

    one = {"type": "text", "text": "one"}
    assert prompt(parts(one, "two")) == "one\ntwo|\n"
    assert prompt(parts({"type": "refusal", "refusal": "no"}, one)) == "no\none|\n"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    asked: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert prompt(asked).startswith("|[{") and "'arguments': {'x': 1}" in prompt(asked)
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    for arguments, text in (("[1", "'[1'"), ("", "{}")):
        call["function"] = {"name": "f", "arguments": arguments}
        assert f"'arguments': {text}" in prompt(asked)
    assert prompt({"role": "assistant", "refusal": "no"}) == "no|\n"
    shown = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert prompt({"role": "assistant", "content": "x", "reasoning": "why"}) == "why why"
    for message, words in (
        (parts(one, {"type": "image_url", "image_url": {"url": "x"}}), r"messages\[0\].* 'image_url'.* text only"),
        (parts({"type": "text"}), "without text"),
        (parts({"type": "refusal", "refusal": 5}), "'refusal'.* text only"),
        (parts(5), r"messages\[0\]"),
        ("hello", r"messages\[0\] must be a mapping"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            prompt(message)


def test_prompt_logprobs_cover_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, logprobs=0)
    llm.generate(LONG_PROMPT, GREEDY, use_tqdm=False)
    [output] = llm.generate(LONG_PROMPT, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 100
    assert all(
        token in entry
        for token, entry in zip(LONG_PROMPT["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True)
        if entry is not None
    )


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty text": ("", {}, "empty"),
    "empty ids": ({"prompt_token_ids": []}, {}, "empty"),
    "too long": ({"prompt_token_ids": [5] * 300}, {}, "256.*300"),
    "id outside the vocabulary": ({"prompt_token_ids": [5, 512]}, {}, "512"),
    "negative id": ({"prompt_token_ids": [-1]}, {}, "-1"),
    "unknown key": ({"prompt": "a", "images": []}, {}, "images"),
    "lone surrogate": ("a\ud800", {}, "(?i)unicode|surrogate"),
    "nan temperature": ("a", {"temperature": float("nan")}, "temperature.*nan"),
    "negative temperature": ("a", {"temperature": -1.0}, "temperature.*-1"),
    "no samples": ("a", {"n": 0}, "n must be"),
    "200,000 stop strings": ("a", {"stop": ["x"] * 200_000}, "200000"),
    "bias of an unknown token": ("a", {"logit_bias": {600: 1.0}}, "600"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_are_refused_and_the_next_good_one_runs(llm: LLM, case: str) -> None:
    prompt, fields, message = BAD_REQUESTS[case]
    good = tokens(llm.generate("good", GREEDY, use_tqdm=False))
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["fine", prompt], SamplingParams(**fields), use_tqdm=False)
    assert tokens(llm.generate("good", GREEDY, use_tqdm=False)) == good


def test_unknown_sampling_field_and_engine_argument_are_named(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_model_length.*max_model_len"):
        LLM(str(checkpoint), max_model_length=64)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=128, num_gpu_blocks_override=8)
    with pytest.raises(CapacityError, match=r"(?s)max_model_len"):
        LLM(str(checkpoint), max_model_len=128, num_gpu_blocks_override=7)
    assert len(tokens(llm.generate(LONG_PROMPT, GREEDY, use_tqdm=False))[0]) == 8


def test_auto_length_takes_what_the_override_holds(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len="auto", num_gpu_blocks_override=20)
    assert llm.memory_plan.max_model_len == 320
    assert LLM(str(checkpoint), max_model_len=-1).memory_plan.max_model_len == 2048


def test_skip_tokenizer_init_takes_ids_and_gives_ids(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=128, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    with pytest.raises(PagerunnerError, match="skip_tokenizer_init"):
        llm.generate("text", params, use_tqdm=False)


def test_dummy_weights_need_only_a_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    llm = LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    assert len(tokens(llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False))[0]) == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda path: (path / "config.json").write_text('{"model_type": "gpt9"}'), "gpt9"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:5000]),
            "model.safetensors",
        ),
    ],
)
def test_broken_checkpoints_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = make_checkpoint(tmp_path, "llama")
    damage(path)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(path), max_model_len=64, use_tqdm=False)


def test_a_missing_tokenizer_is_told_before_weights_are_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    for name in ("tokenizer.json", "model.safetensors"):
        (path / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        LLM(str(path), max_model_len=64, use_tqdm=False)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(PagerunnerError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"takes the fields of EngineArgs by name"):
        LLM(EngineArgs(model=str(tmp_path)))  # type: ignore[arg-type]


def test_the_checkpoints_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path,
        "qwen3",
        generation_config={"do_sample": False, "top_p": 0.8, "max_new_tokens": 3, "eos_token_id": [0]},
    )
    llm = LLM(str(path), max_model_len=64)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, top_p=0.8, max_tokens=3)
    changed = llm.get_default_sampling_params()
    changed.max_tokens = 2
    assert [len(found) for found in tokens(llm.generate(["a"] * 2, [changed, llm.get_default_sampling_params()]))] == [
        2,
        3,
    ]
    stream = llm.stream("a", changed)
    next(stream)
    changed.max_tokens = 1  # of the next request
    assert len([*stream][-1].outputs[0].token_ids) == 2
    with pytest.raises(InvalidRequestError, match="sampling_params must be a SamplingParams, got"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest, got 'sql'"):
        llm.generate("a", lora_request="sql")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] must be a mapping with role and content"):
        llm.chat({"role": "user", "content": "one message, and no list"})  # type: ignore[arg-type]
    assert LLM(str(path), max_model_len=64, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    for wrong, words in (('{"top_p": 7}', "top_p.*7"), ('{"temperature": "0.6"}', "temperature.*'0.6'")):
        (path / "generation_config.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=words):
            LLM(str(path), max_model_len=64)
