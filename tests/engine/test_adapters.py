"""Adapters through the whole engine: mixed with others, in few slots, in the prefix cache, through preemption and sleep."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers.adapters import load_adapters, merged_checkpoint, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import make_smaller
from helpers.device import as_on_cuda
from helpers.effort import TEST_DAY
from pagerunner import LLM, ConfigError, InvalidRequestError, LoRARequest, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.lora import loader
from pagerunner.lora.adapter import read_adapter

OPTIONS: dict[str, Any] = {"use_tqdm": False, "dtype": "float32", "num_gpu_blocks_override": 96, "max_model_len": 128}
WAYS: list[dict[str, Any]] = [
    {},
    {("tensor_parallel_size", "pipeline_parallel_size")[TEST_DAY // 2 % 2]: 2, "device": "cpu"},
][: 1 + TEST_DAY % 2]
"""One rank, and on every second day also two."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7, 8, 9, 10 + n] * 6 for n in range(6)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", intermediate_size=64)  # a block fits half a page


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{n}", n + 1, str(random_adapter(base, folder / f"a{n}", rank=rank, seed=n)))
        for n, rank in enumerate((4, 8, 16, 3))
    ]


@pytest.fixture(scope="module", params=WAYS, ids=("one rank", "two ranks")[: len(WAYS)])
def llm(base: Path, request: pytest.FixtureRequest, forked: None) -> Iterator[LLM]:
    settings = OPTIONS | request.param
    yield LLM(str(base), enable_lora=True, max_loras=2, max_cpu_loras=3, enable_sleep_mode=True, **settings)


@pytest.fixture(scope="module")
def alone(base: Path, adapters: list[LoRARequest], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By adapter, what a model with merged weights generates for each prompt."""
    found = {"": LLM(str(base), **OPTIONS).generate(PROMPTS, GREEDY, False)}
    for one in adapters:
        merged = merged_checkpoint(base, Path(one.lora_path), tmp_path_factory.mktemp("merged"))
        found[one.lora_name] = LLM(str(merged), **OPTIONS).generate(PROMPTS, GREEDY, False)
    return {name: [output.outputs[0].token_ids for output in outputs] for name, outputs in found.items()}


def tokens(outputs: list[Any]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


def test_who_reads_an_adapter_computes_on_one_thread(
    base: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four directories are read at once. With a thread for each processor every reader's operators would wait for the others'."""
    found, usual = [], torch.get_num_threads()

    def read(*args: Any) -> Any:
        torch.ones(1_000_000).sum()  # before its first operator a thread has no number of its own
        found.append(torch.get_num_threads())
        return read_adapter(*args)

    monkeypatch.setattr(loader, "read_adapter", read)
    torch.set_num_threads(3)
    try:
        llm = LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS)
        llm.generate(PROMPTS[:2], GREEDY, False, lora_request=adapters[:2])
        assert found == [1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)


def test_mixed_requests_are_those_of_merged_weights(
    llm: LLM, adapters: list[LoRARequest], alone: dict[str, list[Any]]
) -> None:
    """Six requests, four adapters and none, in two slots: some wait for a slot, and all get their own model's tokens."""
    wanted = [adapters[0], None, adapters[1], adapters[2], adapters[0], adapters[3]]
    outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=wanted)
    for number, (one, got) in enumerate(zip(wanted, tokens(outputs), strict=True)):
        assert got == alone["" if one is None else one.lora_name][number]
    assert len({tuple(alone[name][0]) for name in alone}) == len(alone), "the adapters change what is generated"
    stats = llm.stats().lora
    assert stats is not None and (stats.max_loras, stats.resident, stats.registered) == (2, 4, 4)
    assert stats.fills_total >= 4 and not stats.running and not stats.waiting


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_token(
    base: Path, adapters: list[LoRARequest], alone: dict[str, list[Any]], tmp_path: Path, method: str, forked: None
) -> None:
    """Drafters have no adapters. In few slots requests come and go among rows with drafts."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 64, 3]]
    drafts |= {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(make_smaller(tmp_path, base))}
    wanted = [adapters[0], None, adapters[1], adapters[2], adapters[0], adapters[3]]
    more: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 4, "speculative_config": drafts}
    more["max_num_batched_tokens"] = 160
    rounds: list[tuple[Any, dict[str, Any]]] = [(nullcontext, {}), (as_on_cuda, {})]
    if method == ("ngram", "draft_model")[TEST_DAY % 2]:
        rounds.append((nullcontext, {"tensor_parallel_size": 2}))
    for around, ways in rounds:
        with around():
            llm = LLM(str(base), **OPTIONS, **more, **ways)
            outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=wanted)
        for number, (one, got) in enumerate(zip(wanted, tokens(outputs), strict=True)):
            assert got == alone["" if one is None else one.lora_name][number]
        counts = llm.stats().spec
        assert counts is not None and counts.num_draft_tokens > 5


def test_idle_copies_are_forgotten_before_those_of_running_requests(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Host memory has three. A request runs with the first, and three others are loaded: if it is preempted, its adapter can still come back from host memory."""
    core = llm._core
    names = [msgspec.structs.replace(one, lora_name=f"copy {one.lora_name}") for one in adapters]
    load_adapters(core, names[:1])
    [request] = llm._frontend.inputs.process(PROMPTS[0], GREEDY, "runs", lora=names[0].lora_name)
    core.add(request)
    while not core.stats().running:
        core.step()
    for one in names[1:]:
        load_adapters(core, [one])
    digests = [core.adapters.books.of(one.lora_name).digest for one in names]
    assert list(core.adapters._copies) == [digests[0], *digests[2:]]
    core.abort(["runs"])
    core.drain()
    for one in names:
        core.adapters.remove(one.lora_name)


def test_prefixes_are_found_by_those_with_the_same_content_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    llm.reset_prefix_cache()
    [first] = llm.generate(PROMPTS[0], GREEDY, False, lora_request=adapters[0])
    [same] = llm.generate(PROMPTS[0], GREEDY, False, lora_request=adapters[0])
    [other] = llm.generate(PROMPTS[0], GREEDY, False, lora_request=adapters[1])
    [none] = llm.generate(PROMPTS[0], GREEDY, False)
    assert [output.num_cached_tokens for output in (first, same, other, none)] == [0, 16, 0, 0]
    alias = LoRARequest("alias", 9, adapters[0].lora_path)
    [again] = llm.generate(PROMPTS[0], GREEDY, False, lora_request=alias)
    assert again.num_cached_tokens == 16, "another name for the same content"
    assert tokens([again]) == tokens([first])


def test_a_name_with_new_content_leaves_running_requests_as_they_are(
    llm: LLM, base: Path, adapters: list[LoRARequest], alone: dict[str, list[Any]], tmp_path: Path
) -> None:
    path = random_adapter(base, tmp_path / "v", rank=4, seed=0)  # as adapters[0]
    one = LoRARequest("changing", 1, str(path))
    stream = llm.stream(PROMPTS[0], GREEDY, lora_request=one)
    text = [next(stream)]
    random_adapter(base, path, rank=8, seed=1)  # as adapters[1]
    [new] = llm.generate(
        PROMPTS[0], GREEDY, False, lora_request=LoRARequest("changing", 1, str(path), load_inplace=True)
    )
    text += list(stream)
    assert text[-1].outputs[0].token_ids == alone["a0"][0], "from its first token to its last"
    assert tokens([new]) == [alone["a1"][0]] and new.num_cached_tokens in (0, 16)


def test_sleep_forgets_what_is_on_the_device(
    llm: LLM, adapters: list[LoRARequest], alone: dict[str, list[Any]]
) -> None:
    stream = llm.stream(PROMPTS[1], GREEDY, lora_request=adapters[1])
    next(stream)
    llm.sleep(1, mode="keep")
    stats = llm.stats().lora
    assert stats is not None and stats.resident == 0
    llm.wake_up()
    assert list(stream)[-1].outputs[0].token_ids == alone["a1"][1]
    assert tokens(llm.generate(PROMPTS[:1], GREEDY, False, lora_request=adapters[2])) == [alone["a2"][0]]


def test_a_directory_that_has_changed_in_silence_ends_the_request(
    llm: LLM, base: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    """Its copies are pushed out of the device and of host memory by others. Then the files are read again, and aren't those that were loaded."""
    path = random_adapter(base, tmp_path / "w", rank=4, seed=5)
    one = LoRARequest("silent", 1, str(path))
    llm.generate(PROMPTS[:1], GREEDY, False, lora_request=one)
    random_adapter(base, path, rank=4, seed=6)
    for other in adapters:
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=other)
    [output] = llm.generate(PROMPTS[:1], GREEDY, False, lora_request=one)
    assert output.outputs[0].finish_reason == "error" and "has changed since it was loaded" in str(output.error)
    assert llm.generate(PROMPTS[:1], GREEDY, False, lora_request=adapters[0]), "the engine goes on"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_lora_rank": 12}, "max_lora_rank must be one of 1, 8, 16"),
        ({"max_loras": 257}, "max_loras must be at most 256, got 257.*max_cpu_loras"),
        ({"max_loras": 200, "max_num_seqs": 5000}, "max_loras=200 and max_num_seqs=5000"),
        ({"lora_target_modules": "q_proj"}, "lora_target_modules must be a list of names or None, got 'q_proj'"),
        ({"lora_target_modules": []}, r"lora_target_modules must be a list of names .*, got \[\]"),
        ({"lora_target_modules": [""]}, "lora_target_modules must be a list"),
        ({"enable_lora": False, "max_loras": 4}, "max_loras=4 says how adapters are served.*--enable-lora"),
        ({"enable_lora": False, "max_cpu_loras": 4}, "max_cpu_loras=4 says"),
        ({"enable_lora": False, "max_lora_rank": 32}, "max_lora_rank=32 says"),
        ({"enable_lora": False, "lora_target_modules": ["q_proj"]}, "lora_target_modules=.* says"),
        ({"max_loras": 0}, "max_loras must be a whole number of at least 1"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras must be at least max_loras=4"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "enable_lora isn't there for data_parallel_size=2 with enable_expert_parallel.*take tensor_parallel_size=2",
        ),
    ],
)
def test_options_are_checked(base: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(base), **{"enable_lora": True, **options})


def test_a_path_may_begin_with_the_home_directory(llm: LLM, base: Path, tmp_path: Path) -> None:
    """No shell has read a path in JSON, or one behind the name in `--lora-modules`."""
    random_adapter(base, tmp_path / "own", rank=4, seed=9)
    behind_home = os.path.relpath((tmp_path / "own").resolve(), Path.home().resolve())
    whole, short = (
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=LoRARequest(path, 50 + number, path))
        for number, path in enumerate((str(tmp_path / "own"), f"~/{behind_home}"))
    )
    assert whole[0].outputs[0].token_ids == short[0].outputs[0].token_ids


def test_what_cannot_be_loaded_is_refused(llm: LLM, base: Path, adapters: list[LoRARequest], tmp_path: Path) -> None:
    big = random_adapter(base, tmp_path / "big", rank=20, seed=1)
    for request, kind, said in (
        (LoRARequest("big", 1, str(big)), ConfigError, "rank 20.*at most 16.*max_lora_rank"),
        (
            LoRARequest("gone", 1, str(tmp_path / "gone")),
            ConfigError,
            "lora_path '.* is no directory on the engine's machine",
        ),
        (LoRARequest("nowhere", 1), InvalidRequestError, "lora_path"),
        (LoRARequest("a0", 1, "/elsewhere"), InvalidRequestError, "load_inplace"),
    ):
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=adapters[0])
        with pytest.raises(kind, match=said):
            llm.generate(PROMPTS[:1], GREEDY, False, lora_request=request)
    both = [LoRARequest("new", 1, adapters[0].lora_path), LoRARequest("new", 1, adapters[1].lora_path)]
    with pytest.raises(InvalidRequestError, match="the name 'new' to two directories, .*a0' and .*a1'"):
        llm.generate(PROMPTS[:2], GREEDY, False, lora_request=both)
    plain = LLM(str(base), **OPTIONS)
    with pytest.raises(ConfigError, match="enable_lora=True"):
        plain.generate(PROMPTS[:1], GREEDY, False, lora_request=adapters[0])


def test_the_longest_length_that_fits_leaves_room_for_an_adapter(base: Path, adapters: list[LoRARequest]) -> None:
    """Else each request with an adapter that names no max_tokens, and may grow to max_model_len, was refused."""
    options = OPTIONS | {"num_gpu_blocks_override": 24, "max_model_len": "auto"}
    llm = LLM(str(base), enable_lora=True, max_lora_rank=16, **options)
    plan = llm.memory_plan
    assert plan.adapter_pages > 0 and plan.max_model_len == 16 * (24 - plan.adapter_pages)
    everything = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate([PROMPTS[0]], everything, lora_request=adapters[2])
    assert len(PROMPTS[0]) + len(output.outputs[0].token_ids) == plan.max_model_len


def test_a_page_that_is_too_small_for_a_block_is_refused_with_a_size_that_serves(tmp_path: Path) -> None:
    """Pages have 1, 2, 4, 8 or a multiple of 16 tokens: what twelve tokens take is enough here, and no page has twelve."""
    model = str(make_checkpoint(tmp_path, "qwen3"))
    for size in (1, 2, 4, 8):
        args = EngineArgs(model=model, device="cpu", enable_lora=True, block_size=size, max_model_len=64)
        with pytest.raises(ConfigError, match=f"block_size={size}; raise block_size to ") as refused:
            resolve(args)
        served = int(str(refused.value).rpartition(" ")[2].rstrip("."))
        assert resolve(msgspec.structs.replace(args, block_size=served)).plan.adapter_pages
