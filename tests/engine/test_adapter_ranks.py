"""Adapters on several ranks in processes: tokens are those of one rank, and a load is of all ranks or of none."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers import faulty_ranks
from helpers.adapters import load_adapters, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.effort import TEST_DAY
from helpers.families import MAKERS
from helpers.patience import until
from helpers.published import all_published
from helpers.quantise import quantise
from helpers.recount import recount_adapters
from pagerunner import LLM, ConfigError, LoRARequest, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.process import ProcessExecutor
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import orders
from pagerunner.types import EngineRequest, RequestUpdate

pytestmark = pytest.mark.usefixtures("forked")

OPTIONS: dict[str, Any] = {
    "use_tqdm": False,
    "dtype": "float32",
    "device": "cpu",
    "num_gpu_blocks_override": 96,
    "max_model_len": 128,
    "block_size": 64,  # a rank's page has room for a block of any family
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "enable_lora": True,
}
KINDS = ("awq", "fp8 tensor", "nvfp4", "compressed-tensors int8", "mxfp4 compressed")
DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
DRAFTS |= {"num_speculative_tokens_per_batch_size": [[1, 64, 2]]}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "block_size": 128, "num_gpu_blocks_override": 1_000}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)
numbers = itertools.count()
PROMPTS = [[7, 8, 9, 10 + n] * 5 for n in range(4)]


def made(family: str, path: Path) -> Path:
    """A checkpoint of a family, or a dense one in a format."""
    path.mkdir(parents=True, exist_ok=True)
    if family in KINDS:
        base = make_checkpoint(path, "qwen3", num_hidden_layers=2, hidden_size=256, intermediate_size=512)
        quantise(base, family)
        return base
    MAKERS[family](path)
    return next(found.parent for found in path.rglob("config.json"))


def answers(llm: LLM, wanted: list[LoRARequest | None]) -> list[list[tuple[int, Any]]]:
    outputs = llm.generate(PROMPTS[: len(wanted)], PARAMS, False, lora_request=wanted)
    assert [one.error for one in outputs] == [None] * len(wanted)
    return [
        [
            (token, found[token].logprob)
            for token, found in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
        ]
        for one in outputs
    ]


@pytest.mark.days(4)
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("gpt_oss", {"tensor_parallel_size": 2}),
        ("qwen3_next", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama", {"tensor_parallel_size": 4}),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
        ("bamba", {"pipeline_parallel_size": 2, "block_size": 128}),
        *((kind, {"tensor_parallel_size": 2}) for kind in KINDS),
        *((kind, {"tensor_parallel_size": 2, "speculative_config": DRAFTS}) for kind in ("nvfp4", "gpt_oss")),
        ("qwen3_next", {"tensor_parallel_size": 2, "speculative_config": DRAFTS} | FP8),
    ],
)
def test_tokens_are_those_of_one_rank(family: str, ways: dict[str, Any], tmp_path: Path) -> None:
    """A row without an adapter among others is, to the bit, what it is without them."""
    base = made(family, tmp_path / "base")
    one, two = (
        LoRARequest(f"a{n}", n, str(random_adapter(base, tmp_path / f"a{n}", rank=rank, seed=n)))
        for n, rank in ((1, 6), (2, 17))
    )
    limits: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 32}
    wanted = [one, None, two, one]
    pages = {name: value for name, value in ways.items() if name in FP8}
    alone = answers(LLM(str(base), **OPTIONS | limits | pages), wanted)
    ranks = LLM(str(base), **OPTIONS | limits | ways)
    found = answers(ranks, wanted)
    for got, want in zip(found, alone, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [value for _, value in got] == pytest.approx([value for _, value in want], abs=2e-4)
    ranks.reset_prefix_cache()
    plain = answers(ranks, [None] * 4)
    if "speculative_config" in ways:
        counts = ranks.stats().spec
        assert counts is not None and counts.num_draft_tokens
    elif "moe" not in family and family not in (
        "gpt_oss",
        "qwen3_next",
        "deepseek_v3",
    ):  # whose products go by rows' experts
        assert found[1] == plain[1]
    assert all(abs(found[n][0][1] - plain[n][0][1]) > 1e-3 for n in (0, 2, 3)), "adapters change something"


def test_the_plan_counts_a_ranks_part(tmp_path: Path) -> None:
    """Of A and B the half that isn't divided is whole on each rank. Of whole experts a rank has its own ones."""
    asked: dict[str, Any] = {
        "device": "cuda",
        "enable_lora": True,
        "max_loras": 8,
        "lora_target_modules": ["down_proj"],
    }
    found = {}
    for name, ways in (
        ("Qwen/Qwen3-8B", {}),
        ("Qwen/Qwen3-8B", {"tensor_parallel_size": 2}),
        ("Qwen/Qwen3-8B", {"pipeline_parallel_size": 2}),
        (
            "Qwen/Qwen3-30B-A3B",
            {
                "tensor_parallel_size": 4,
                "enable_expert_parallel": True,
                "hf_overrides": {"num_hidden_layers": 2},
                "block_size": 64,
            },
        ),
    ):
        (folder := tmp_path / f"{len(found)}").mkdir()
        args = EngineArgs(model=str(all_published()[name].place(folder)), **asked, **ways)
        plan = resolve(args, 80_000_000_000, plan_only=True).plan
        found[name, *ways] = dict(plan.other)["tables of adapters"] // (8 * 16), plan.adapter_pages
    assert list(found.values()) == [  # products, and pages; 6 blocks of A to a page of 2.36 MB, and 18 of B
        (36, 36 // 6 + 36 // 18),
        (36, 36 // 6 + 36 // 9),
        (18, 18 // 3 + 18 // 9),
        (2 * 32 * 3, 2 * 32 * (3 + 3 // 2) + 2 * 32 // 2),
    ]


def ask(core: EngineCore, lora: str) -> RequestUpdate:
    """The last update of a request with this adapter."""
    name = f"r{next(numbers)}"
    core.add(EngineRequest(request_id=name, prompt_token_ids=[7, 8, 9], params=PARAMS, seed=0, max_tokens=2, lora=lora))
    while True:
        for update in core.step():
            if update.finish_reason is not None:
                return update


def test_a_load_is_of_all_ranks_or_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank finds no files, or others. What the first one has read is forgotten, and the engine goes on."""
    base = made("qwen3", tmp_path / "base")
    a, b = (random_adapter(base, tmp_path / name, rank=4, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    gone, other = tmp_path / "gone", random_adapter(base, tmp_path / "other", rank=4, seed=3)
    shutil.copytree(a, gone)
    (gone / "last").mkdir()
    shutil.copytree(b, other / "last")
    monkeypatch.setenv(faulty_ranks.VARIABLE, "adapters")
    way = ("tensor_parallel_size", "pipeline_parallel_size")[TEST_DAY % 2]
    settings: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "device": "cpu", way: 2}
    settings["block_size"] = 32
    core = faulty_ranks.build(EngineArgs(model=str(base), enable_lora=True, **settings))
    executor = core._executor
    forgotten: list[str] = []
    assert isinstance(executor, ProcessExecutor)
    send = executor._ranks.send

    def noted(*given: orders.Order, team: int | None = None) -> None:
        forgotten.extend(order.digest for order in given if isinstance(order, orders.ForgetAdapter))
        send(*given, team=team)

    monkeypatch.setattr(executor._ranks, "send", noted)
    books = core.adapters.books
    for path, said, copies in (
        (gone, f"^Rank 1 of 2: .*{gone}/last", 1),
        (other, "^Rank 1 of 2 has read another content than rank 0", 2),
        (tmp_path / "nowhere", "^lora_path '.* is no directory", 0),  # a long path is cut in a message
    ):
        before = len(forgotten)
        with pytest.raises(ConfigError, match=said):
            load_adapters(core, [LoRARequest("x", 1, str(path))])
        assert not books.names and len(forgotten) == before + copies
    [first] = load_adapters(core, [LoRARequest("a", 1, str(a))])
    assert ask(core, "a").error is None and first.digest in forgotten  # read before for nothing, as `gone`
    forgotten.clear()
    [second] = load_adapters(core, [LoRARequest("b", 1, str(b))])  # host memory has room for one
    assert forgotten == [first.digest] and ask(core, "b").error is None
    (a / "last").mkdir()
    ended = ask(core, "a")
    assert (
        ended.finish_reason == "error" and str(ended.error).startswith("Rank 1 of 2: ") and "a/last" in str(ended.error)
    )
    recount_adapters(books, [])
    assert books.stats([]).resident == 2, (
        "their pages are there, though nobody knows any more how the first one's blocks lie in them"
    )
    assert second.digest not in forgotten[1:]
    (a / "last").rmdir()
    assert [ask(core, name).error for name in "bab"] == [None] * 3
    # A copy that is given up while all ranks have found it again, for another name of the same content.
    number = core.adapters.begin(LoRARequest("c", 3, str(a)))
    until(lambda: len(executor._ranks.watch._of_adapters.get(number, ())) == 2)
    core.adapters._loader.forget(first.digest)
    while core.adapters.busy:
        core.poll_adapters(0.01)
    core.reset_prefix_cache()
    assert ask(core, "c").error is None
    core._executor.close()
