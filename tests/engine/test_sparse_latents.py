"""DeepSeek-V3.2 through the engine against `transformers` in float32: latents of which an indexer chooses.

Chunks, prefix hits, preemption and the pages' size change nothing; every fresh page holds NaN.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.device import as_on_cuda, counted_graphs
from helpers.effort import by_days, share_of_the_day
from helpers.engine_oracle import CONDITIONS, check, check_tokens, engine, prompt, run, tokens_of
from helpers.published import all_published
from pagerunner.attention import paged_sparse
from pagerunner.batch import WritePlaces
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import ConfigError
from pagerunner.memory.specs import LatentKV
from pagerunner.models import deepseek
from pagerunner.models.configs.reader import read_model_config

pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
BACKENDS = ("auto", "triton")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn, few chosen": {"rope_parameters": YARN, "index_topk": 3},
    "all chosen, biases, tied, all dense": {
        "index_topk": 512,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 3,
        "index_head_dim": 8,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")
    make = functools.partial(make_latent_checkpoint, directory, "deepseek_v32")
    # no seed of the five letters of "plain": two groups of experts differ by 1e-7 for one of its tokens
    return functools.cache(lambda name: make(seed=len(name) + 1, **VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(models: Any, name: str) -> None:
    path, reference = models(name)
    texts = [prompt(i, n) for i, n in enumerate((1, 35, 17, 150, 64))]
    check(reference, run(engine(path, max_num_batched_tokens=100), texts))


@pytest.mark.parametrize(("condition", "backend"), by_days(CONDITIONS, BACKENDS))
def test_results_do_not_depend_on_the_memory(models: Any, backend: str, condition: str) -> None:
    path, reference = models("plain")
    llm = engine(path, attention_backend=backend, **CONDITIONS[condition])
    check(reference, run(llm, [prompt(i, n) for i, n in enumerate((5, 110, 33, 20))]))


AROUND = {"at once": {}} | CONDITIONS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("condition", [[*AROUND][number] for number in share_of_the_day(len(AROUND), 4)])
def test_prompts_that_end_around_borders(models: Any, backend: str, condition: str) -> None:
    """Of a page, of 64 and 128 tokens, and of as many as are chosen, which are 17."""
    path, reference = models("plain")
    lengths = (2, 3, 4, 11, 12, 15, 16, 17, 18, 63, 64, 122, 127, 128)
    llm = engine(path, attention_backend=backend, **AROUND[condition])
    check(reference, run(llm, [prompt(i, n) for i, n in enumerate(lengths)]))


FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 128}
"""A start in graphs computes as large a step."""


@pytest.mark.days(3)
@pytest.mark.parametrize(("kv_cache_dtype", "level"), by_days(["auto", "fp8"], [1, 2]))
def test_sleep_changes_no_bit(models: Any, kv_cache_dtype: str, level: int) -> None:
    """In graphs, before and after."""
    path, _ = models("plain")
    texts = [prompt(i, n) for i, n in enumerate((70, 33))]

    def answers() -> list[Any]:
        made = [output.outputs[0] for output in run(llm, texts)]
        return [(list(one.token_ids), [next(iter(entry.values())).logprob for entry in one.logprobs]) for one in made]

    with as_on_cuda(), counted_graphs() as graphs:
        llm = engine(path, kv_cache_dtype=kv_cache_dtype, enable_sleep_mode=True, **FEW)
        before = answers()
        llm.sleep(level)
        llm.wake_up()
        assert answers() == before
    assert graphs.replays


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_long_prompts_in_blocks_of_tokens(models: Any, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reference = models("plain")
    texts = [prompt(i, n) for i, n in enumerate((70, 3, 40))]
    whole = tokens_of(engine(path, attention_backend="triton", kv_cache_dtype=kv_cache_dtype), texts)
    monkeypatch.setattr(paged_sparse, "MOST_TOKENS", 16)
    llm = engine(path, attention_backend="triton", kv_cache_dtype=kv_cache_dtype)
    assert tokens_of(llm, texts) == whole
    if kv_cache_dtype == "auto":
        check_tokens(reference, llm, texts)


def test_slots_in_fp8_do_not_depend_on_the_memory(models: Any) -> None:
    """Each slot has scales of its own, so nothing depends on a slot's neighbours."""
    path, _ = models("plain")
    texts = [prompt(i, n) for i, n in enumerate((5, 110, 33, 20))]
    expected = tokens_of(engine(path, kv_cache_dtype="fp8"), texts)
    assert expected != tokens_of(engine(path), texts)
    for condition in ("budget-7", "page-48", "two in flight"):
        found = engine(path, kv_cache_dtype="fp8", attention_backend="triton", **CONDITIONS[condition])
        assert tokens_of(found, texts) == expected


@pytest.mark.parametrize(
    ("kv_cache_dtype", "size", "mixed"), [("fp8", 16, True), ("fp8", 12, False), ("auto", 16, False)]
)
def test_indexer_keys_in_fp8_are_mixed(
    models: Any, tmp_path: Path, kv_cache_dtype: str, size: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As their makers' code does; a Hadamard matrix has a power of two of rows."""
    path = (
        models("plain")[0] if size == 12 else make_latent_checkpoint(tmp_path, "deepseek_v32", index_head_dim=size)[0]
    )
    seen, heads = [], deepseek.indexer_heads
    monkeypatch.setattr(deepseek, "indexer_heads", lambda *args: seen.append(args[-1]) or heads(*args))
    tokens_of(engine(path, kv_cache_dtype=kv_cache_dtype), [prompt(0, 20)])
    assert set(seen) == {mixed}


def test_slots_in_fp8_are_those_that_are_published() -> None:
    """656 bytes of a token and 132 of its indexer key."""
    config = read_model_config(all_published()["deepseek-ai/DeepSeek-V3.2"].file, quantised=True)
    spec = config.layer_specs("fp8_e4m3")[0]
    assert isinstance(spec, LatentKV)
    assert (spec.slot_bytes, spec.indexer_slot_bytes, spec.page_bytes(64)) == (656, 132, 64 * (656 + 132))
    for latent, scales in (
        (256, 8),
        (384, 4),
        (1024, 32),
        (200, 4),
    ):  # a block of 128 has one, if their number is a power of two
        other = replace(config, latent_dim=latent).layer_specs("fp8_e4m3")[0]
        assert isinstance(other, LatentKV)
        assert other.scale_bytes == scales


def test_prefix_hits_and_a_pool_too_small(models: Any) -> None:
    path, reference = models("plain")
    llm = engine(path, max_num_batched_tokens=40, max_model_len=128, kv_cache_memory_bytes=200_000)
    shared = prompt(7, 64)
    texts = [shared[: 16 * (i % 5)] + prompt(20 + i, 4 + 5 * (i % 9)) for i in range(20)]
    for _ in range(2):
        check_tokens(reference, llm, texts)
    assert llm.stats().prefix_hits_total
    assert llm.stats().preemptions_total or sum(group.evictions for group in llm.stats().groups)


def test_pages_hold_indexer_keys(models: Any) -> None:
    (group,) = resolve(EngineArgs(model=str(models("plain")[0]), max_model_len=64)).plan.groups
    assert group.layers[0].spec.page_bytes(16) == 16 * (24 + 8) * 4 + 16 * 12 * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_head_dim", 6),
        ("index_topk", 0),
        ("q_lora_rank", None),
        ("layer_types", ["full_attention"] * 3),
        ("mlp_layer_types", ["sparse", "dense", "sparse"]),
        ("rope_interleave", False),
    ],
)
def test_refuses_what_it_would_not_compute(tmp_path: Path, field: str, value: Any) -> None:
    path, _ = make_latent_checkpoint(tmp_path, "deepseek_v32")
    values = json.loads((path / "config.json").read_text()) | {field: value}
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=field):
        read_model_config(path)


@pytest.mark.days(3)
@pytest.mark.parametrize("planted", ["nothing", "a choice", "a table", "places"])
def test_graphs_keep_nothing_of_the_step_in_which_they_were_recorded(
    models: Any, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """What a layer takes once, by the number of tokens, and uses again, is noticed."""
    path, _ = models("plain")
    texts, first = [prompt(i, n) for i, n in enumerate((60, 5, 33))], {}
    choose = paged_sparse.choose_slots

    def stale_choice(q: Any, *more: Any) -> Any:
        found = choose(q, *more)
        return first.setdefault(len(q), found.clone()) if len(q) == 4 else found  # of steps that are recorded

    read, absorb = paged_sparse.chosen_values, paged_sparse.absorb_slots_

    def stale_table(q: Any, q_rotary: Any, held: Any, table: Any, *more: Any) -> Any:
        return read(q, q_rotary, held, first.setdefault(len(q), table.clone()), *more)

    def stale_places(q: Any, *more: Any) -> Any:
        kept = first.setdefault(len(q), WritePlaces(*(one.clone() for one in more[-1])))
        return absorb(q, *more[:-1], kept)

    def answers(llm: Any) -> list[Any]:
        return [output.error or list(output.outputs[0].token_ids) for output in run(llm, texts)]

    expected = answers(engine(path))
    if planted == "a choice":
        monkeypatch.setattr(paged_sparse, "choose_slots", stale_choice)
    elif planted == "a table":
        monkeypatch.setattr(paged_sparse, "chosen_values", stale_table)
    elif planted == "places":
        monkeypatch.setattr(paged_sparse, "absorb_slots_", stale_places)
    with as_on_cuda(), counted_graphs() as graphs:
        found = answers(engine(path, **FEW))
    assert graphs.replays
    assert (found == expected) == (planted == "nothing"), found
