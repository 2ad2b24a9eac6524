"""An engine with `enable_lora` of which no step has an adapter: the same graphs, the same launches, the same bits as one without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.adapters import random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.device import as_on_cuda, counted_graphs
from pagerunner import LLM, LoRARequest, SamplingParams

OPTIONS: dict[str, Any] = {
    "use_tqdm": False,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "cudagraph_capture_sizes": [2, 4, 16],
}
PROMPTS = [{"prompt_token_ids": [7, 8, 9, 10 + n] * (2 + n)} for n in range(5)]
PARAMS = [
    SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=3 + n, ignore_eos=True, logprobs=1) for n in range(5)
]


def told(call: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """What a call is: its name, and the shapes and dtypes of what it is given."""
    of = [f"{one.dtype}{list(one.shape)}" for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return (str(call.__name__), *of)


class Calls(TorchDispatchMode):
    """All that torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, ...]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in helpers/graphs.py

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(told(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def ran(llm: LLM, adapters: Any = None) -> tuple[Any, ...]:
    """What some requests run, without an adapter or with these: graphs, calls outside of them, and what comes of it."""
    llm.reset_prefix_cache()
    if adapters:  # what is on the device already keeps no row waiting while others run
        one = SamplingParams(max_tokens=1)
        llm.generate([{"prompt_token_ids": [5]}] * len(adapters), one, lora_request=adapters)
    with counted_graphs() as count, Calls() as calls:
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=adapters)
    found = [(one.outputs[0].token_ids, str(one.outputs[0].logprobs)) for one in outputs]
    return count.replays, calls.made, found


def graphs(llm: LLM, of: str = "_plain") -> dict[Any, list[tuple[str, ...]]]:
    """What the graphs of steps without adapters, or of others, do, by their keys."""
    found = getattr(llm._core._executor._runner._graphs, of)  # type: ignore[attr-defined]
    every = [*found.decode.graphs, *found.mixed.graphs, *found.no_shared_prefix.graphs]
    return {one.key: [told(call, args, kwargs) for call, args, kwargs, _ in one.graph._calls] for one in every}


def names(graphs: dict[Any, list[tuple[str, ...]]]) -> dict[Any, list[str]]:
    """What is called alone, as shapes of tables go by what may have an adapter."""
    return {key: [call[0] for call in calls] for key, calls in graphs.items()}


def test_adapters_that_nobody_uses_cost_nothing(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    adapter = LoRARequest("a", 1, str(random_adapter(base, tmp_path / "a", rank=4, seed=1)))
    with as_on_cuda():
        plain = LLM(str(base), **OPTIONS)
        able = LLM(str(base), enable_lora=True, max_loras=3, **OPTIONS)
    assert graphs(plain) == graphs(able) and len(graphs(plain)) >= 3
    wanted = ran(plain)
    assert wanted[0] and ran(able) == wanted
    [changed] = able.generate(PROMPTS[:1], PARAMS[:1], lora_request=adapter)  # one is in a slot now
    assert changed.outputs[0].token_ids != wanted[2][0][0]
    ran(able)  # the request's slot is one of a request without an adapter again
    assert ran(able) == ran(plain)


def test_adapters_of_attention_alone_run_no_experts(tmp_path: Path) -> None:
    """Where no row's adapter has products of experts, steps are those of an engine whose experts can have none: graphs, their calls, tokens."""
    base = make_window_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    every = LoRARequest("every", 1, str(random_adapter(base, tmp_path / "every", rank=4, seed=1)))
    of_attention = random_adapter(base, tmp_path / "attention", rank=4, seed=1, only=("q_proj", "o_proj"))
    some = [LoRARequest("attention", 2, str(of_attention)) if n % 2 else None for n in range(len(PROMPTS))]
    with as_on_cuda():
        without = LLM(str(base), enable_lora=True, lora_target_modules=["q_proj", "o_proj"], max_loras=2, **OPTIONS)
        able = LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS)
    kinds = [names(graphs(without, "_adapted")), *(names(graphs(able, of)) for of in ("_adapted", "_of_experts"))]
    assert kinds[0] == kinds[1] and kinds[2].keys() == {replace(key, experts=True) for key in kinds[0]}
    assert all(len(calls) > 20 + len(kinds[1][replace(key, experts=False)]) for key, calls in kinds[2].items())
    replays, _, wanted = ran(without, some)
    assert any(key.adapters for key in replays) and not any(key.experts for key in replays)
    assert ran(able, some)[::2] == (replays, wanted)
    mixed = [every if request is None else request for request in some]
    replays, _, changed = ran(able, mixed)
    assert all(key.experts for key in replays if key.rows == len(PROMPTS)) and any(key.experts for key in replays)
    tokens = [(one[0], other[0]) for one, other in zip(changed, wanted, strict=True)]
    assert all(one == other for one, other in tokens[1::2]) and all(one != other for one, other in tokens[::2])
