"""DeepSeek-V4 through the engine against `transformers` in float32: windows, compressed latents and compressor state.

Chunks, prefix hits, preemption and the pages' size change nothing; every fresh page holds NaN.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints_compressed import HEAVY, SPARSE, WINDOW, make_compressed_checkpoint
from helpers.device import as_on_cuda, counted_graphs
from helpers.effort import by_days, effort, share_of_the_day
from helpers.engine_oracle import CONDITIONS, check, check_tokens, engine, prompt, run
from helpers.published import all_published
from pagerunner.attention import paged_vectors
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.memory.specs import LatentKV
from pagerunner.models import deepseek_v4
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops import vectors_attention
from pagerunner.ops.rope import RopeAngles

pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "three kinds": {},
    "yarn, sigmoid scores": {"rope_parameters": YARN, "scoring_func": "sigmoid"},
    "windows only": {"layer_types": [WINDOW] * 2, "num_hidden_layers": 2},
    "heavy only, 2 to 1": {
        "layer_types": [HEAVY] * 2,
        "num_hidden_layers": 2,
        "compress_rates": {SPARSE: 4, HEAVY: 2},
        "mlp_layer_types": ["moe", "hash_moe"],
    },
    "odd sizes": {
        "compress_rates": {SPARSE: 3, HEAVY: 10},
        "sliding_window": 5,
        "index_topk": 2,
        "num_attention_heads": 6,
        "o_groups": 3,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
        "vocab_size": 517,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_compressed_checkpoint(directory, seed=len(name), **VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(models: Any, name: str) -> None:
    path, reference = models(name)
    check(
        reference,
        run(engine(path, max_num_batched_tokens=100), [prompt(i, n) for i, n in enumerate((1, 35, 3, 170, 64))]),
    )


@pytest.mark.days(3)
@pytest.mark.parametrize(("condition", "name"), by_days(CONDITIONS, ["three kinds", "odd sizes"]))
def test_results_do_not_depend_on_the_memory(models: Any, name: str, condition: str) -> None:
    path, reference = models(name)
    llm = engine(path, **CONDITIONS[condition])
    for _ in range(2):  # prompt log-probabilities need the whole prompt; siblings of a step may share it
        check(reference, run(llm, [prompt(i, n) for i, n in enumerate((5, 130, 33, 32, 77))]))


@pytest.mark.parametrize("batched_tokens", [(16, 50, 1000)[number] for number in share_of_the_day(3, 3)])
def test_prefix_hits(models: Any, batched_tokens: int) -> None:
    path, reference = models("three kinds")
    llm = engine(path, max_num_batched_tokens=batched_tokens)
    shared = prompt(4, 150)
    for text in (shared, shared, shared + prompt(5, 20), shared[:100] + prompt(6, 3), shared[:130]):
        check_tokens(reference, llm, [text])
    assert llm.stats().prefix_hits_total >= 2 * 128


def test_siblings_and_a_pool_too_small(models: Any) -> None:
    path, reference = models("three kinds")
    check(reference, run(engine(path, max_num_batched_tokens=48), [prompt(5, 70), prompt(6, 33)], n=3))
    llm = engine(path, max_num_batched_tokens=40, max_model_len=128, kv_cache_memory_bytes=400_000)
    shared = prompt(7, 64)
    texts = [shared[: 16 * (i % 5)] + prompt(20 + i, 4 + 5 * (i % 9)) for i in range(effort(12, 24))]
    check_tokens(reference, llm, texts)
    assert llm.stats().preemptions_total or sum(group.evictions for group in llm.stats().groups)


def test_pages_store_fewer_slots_than_tokens(models: Any) -> None:
    plan = resolve(EngineArgs(model=str(models("three kinds")[0]), max_model_len=512, block_size=16)).plan
    latents = {group.layers[0].spec.compression: group for group in plan.groups if group.kind == "latent"}
    assert {ratio: group.page_tokens % ratio for ratio, group in latents.items()} == {4: 0, 32: 0}
    for ratio, group in latents.items():
        assert group.layers[0].spec.slots(group.page_tokens) == group.page_tokens // ratio


def test_without_the_state_zeroed_the_poison_is_noticed(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagerunner.memory.specs import RecurrentState

    monkeypatch.setattr(RecurrentState, "zero_fresh", False)
    (output,) = run(engine(models("three kinds")[0]), [prompt(8, 40)])
    assert output.error is not None and "NaN" in output.error


def rewrite(path: Path, drop: tuple[str, ...] = (), **fields: Any) -> Path:
    values = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: x for name, x in values.items() if name not in drop}))
    return path


def test_fields_and_names_as_the_published_files_have_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    sizes = {"compress_rates": {SPARSE: 4, HEAVY: 128}, "rope_parameters": YARN}
    path, reference = make_compressed_checkpoint(tmp_path, **sizes)
    rewrite(
        path,
        ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"),
        compress_ratios=[0, 4, 128, 4, 0],  # one more, for multi-token prediction
        num_hash_layers=1,
        qk_rope_head_dim=8,
        rope_scaling={**{name: x for name, x in YARN.items() if name != "rope_type"}, "type": "yarn"},
        topk_method="noaux_tc",
    )
    names = {"model.embed_tokens.weight": "embed.weight"}
    names |= {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    tensors = load_file(path / "model.safetensors")
    renamed = {names.get(name, name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"mtp.0.enorm.weight": torch.ones(48)}, path / "model.safetensors")
    check(reference, run(engine(path), [prompt(1, 300)]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("o_groups", 3),
        ("index_head_dim", 4),
        ("num_experts_per_tok", 7),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("n_shared_experts", 2),
        ("scoring_func", "softmax"),
        ("qk_rope_head_dim", 6),
        ("compress_rates", {SPARSE: 1}),
        ("compress_rates", [4, 128]),
        ("layer_types", [WINDOW] * 3),
        ("layer_types", ["full_attention"] * 4),
        ("layer_types", [{}] * 4),
        ("mlp_layer_types", ["dense"] * 4),
        ("compress_ratios", [[4]] * 4),
        ("compress_ratios", [0] * 4),  # beside other layer_types
        ("rope_scaling", {"type": "linear", "factor": 2.0}),  # beside rope_parameters
        ("rope_parameters", {"main": {}, "compress": {}, "else": 1}),
        ("sliding_window", 0),
        ("hc_mult", 0),
        ("swiglu_limit", 0.0),
    ],
)
def test_refuses_what_it_would_not_compute(models: Any, tmp_path: Path, field: str, value: Any) -> None:
    shutil.copy(models("three kinds")[0] / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=field):
        read_model_config(rewrite(tmp_path, **{field: value}))


def test_a_missing_table_of_experts_is_named_and_a_wrong_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, _ = make_compressed_checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.ffn.gate.tid2eid"
    save_file({**tensors, name: tensors[name].float()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tid2eid.*float32"):
        engine(path)
    for outside in (-1, 9):
        table = tensors[name].clone()
        table[5, 1] = outside
        save_file({**tensors, name: table}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"tid2eid.* holds {outside} at \[5, 1\], .* \d experts, from 0 on"):
            engine(path)
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tid2eid"):
        engine(path)


def test_slots_in_fp8_are_those_that_are_published() -> None:
    """584 bytes of a slot and of a window's token, the vectors of a page before its scales, and 132 of an indexer key."""
    config = read_model_config(all_published()["deepseek-ai/DeepSeek-V4-Flash"].file, quantised=True)
    slots = [spec for spec in config.layer_specs("fp8_e4m3") if isinstance(spec, LatentKV)]
    assert {spec.window for spec in slots} == {None, 128}
    assert {(spec.slot_bytes, spec.vector_bytes, spec.byte_scales) for spec in slots} == {(584, 576, 7)}
    assert {spec.indexer_slot_bytes for spec in slots if spec.compression == 4} == {132}
    assert all(spec.slot_scales_offset(256) == spec.slots(256) * 576 for spec in slots)
    assert {spec.page_bytes(256) for spec in slots} == {256 * 584, 64 * (584 + 132), 2 * 584}


@pytest.mark.days(4)
@pytest.mark.parametrize("mixed", [False, True])
def test_slots_in_fp8_have_scales_of_their_own(models: Any, tmp_path: Path, mixed: bool) -> None:
    """All is read as pages hold it, so chunks, graphs and the reference's backend change nothing. A slot of 8 numbers and 8 rotary ones: 8 + 8 + 16 bytes.

    Indexer keys of 16 numbers are mixed before they are rounded, and queries with them.
    """
    path = make_compressed_checkpoint(tmp_path, index_head_dim=16)[0] if mixed else models("three kinds")[0]
    prompts, found = [prompt(i, n) for i, n in enumerate((5, 90, 33))], []
    with as_on_cuda(), counted_graphs() as graphs:
        for size, options in ((160, {}), (24, {"enforce_eager": True})):
            llm = engine(path, kv_cache_dtype="fp8_e4m3", max_num_seqs=4, max_num_batched_tokens=size, **options)
            found.append([list(output.outputs[0].token_ids) for output in run(llm, prompts)])
    reference = engine(path, kv_cache_dtype="fp8_e4m3")
    found.append([list(output.outputs[0].token_ids) for output in run(reference, prompts)])
    assert found[0] == found[1] == found[2] and graphs.replays
    specs = [piece.spec for group in llm.memory_plan.groups for piece in group.layers]
    slots = {spec.slot_bytes for spec in specs if isinstance(spec, LatentKV)}
    assert slots == {8 + 8 + 8 * 2}


AROUND = {"at once": {}} | CONDITIONS


@pytest.mark.days(4)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("condition", [[*AROUND][number] for number in share_of_the_day(len(AROUND), 7)])
def test_contexts_around_every_boundary(models: Any, recorded: bool, condition: str) -> None:
    """Slots of 4 and of 32, the window of 20, the 7 slots that are chosen at most, and pages: prompts end around each, and 6 tokens pass it."""
    path, reference = models("three kinds")
    lengths = sorted(
        {edge + more for edge in (4, 20, 7 * 4, 32, 64, 128) for more in (-5, -1, 0, 1) if edge + more > 0}
    )
    with as_on_cuda(), counted_graphs() as graphs:
        llm = engine(path, enforce_eager=not recorded, max_num_seqs=12, **AROUND[condition])
        check(reference, run(llm, [prompt(length, length) for length in lengths]))
    assert bool(graphs.replays) == recorded


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_changes_no_bit(models: Any, level: int) -> None:
    path, _ = models("three kinds")
    llm = engine(path, enable_sleep_mode=True)
    texts = [prompt(i, n) for i, n in enumerate((70, 33))]

    def answers() -> list[Any]:
        made = [output.outputs[0] for output in run(llm, texts)]
        return [(list(one.token_ids), [next(iter(entry.values())).logprob for entry in one.logprobs]) for one in made]

    before = answers()
    llm.sleep(level)
    llm.wake_up()
    assert answers() == before


NOTICED = {"nothing": (), "positions": (WINDOW, SPARSE, HEAVY), "a choice": (SPARSE,), "slots' angles": (SPARSE, HEAVY)}
"""What a layer might take once, by the number of tokens, and use again, and in which kinds of layers that is seen."""


@pytest.mark.days(4)
@pytest.mark.parametrize(("planted", "kind"), by_days(NOTICED, [WINDOW, SPARSE, HEAVY]))
def test_graphs_keep_nothing_of_the_step_in_which_they_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, planted: str
) -> None:
    """Of each kind of layer alone."""
    path, _ = make_compressed_checkpoint(
        tmp_path, layer_types=[kind] * 2, num_hidden_layers=2, mlp_layer_types=["moe"] * 2
    )
    texts = [prompt(i, n) for i, n in enumerate((60, 5, 33))]
    first: dict[Any, torch.Tensor] = {}
    attend, choose, turn = (
        paged_vectors.vectors_attention,
        vectors_attention.choose_slots,
        deepseek_v4.Angles.slots_of_all,
    )

    def stale_positions(q: torch.Tensor, window: Any, slots: Any, rows: Any, *more: Any) -> torch.Tensor:
        own = rows.positions_T
        return attend(q, window, slots, replace(rows, positions_T=first.setdefault(len(own), own.clone())), *more)

    def stale_choice(q: torch.Tensor, *more: Any) -> torch.Tensor:
        found = choose(q, *more)
        return first.setdefault(len(q), found.clone()) if len(q) == 4 else found  # of steps that are recorded

    def stale_angles(angles: Any, ratio: int) -> Any:
        found = turn(angles, ratio)
        return first.setdefault((ratio, len(angles._positions)), RopeAngles(*(part.clone() for part in found)))

    def answers(llm: Any) -> list[Any]:
        return [output.error or list(output.outputs[0].token_ids) for output in run(llm, texts)]

    expected = answers(engine(path))
    if planted == "positions":
        monkeypatch.setattr(paged_vectors, "vectors_attention", stale_positions)
    elif planted == "a choice":
        monkeypatch.setattr(vectors_attention, "choose_slots", stale_choice)
    elif planted == "slots' angles":
        monkeypatch.setattr(deepseek_v4.Angles, "slots_of_all", stale_angles)
    with as_on_cuda(), counted_graphs() as graphs:
        found = answers(engine(path, max_num_seqs=4, max_num_batched_tokens=160))
    assert graphs.replays
    assert (found == expected) == (kind not in NOTICED[planted]), found
