"""Loading: weights land where they belong, and anything wrong with the files is an error that names it."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint, make_config, make_weights, write_safetensors
from pagerunner.errors import CapacityError, CheckpointError
from pagerunner.models.checkpoint.loader import (
    ALIGNMENT,
    THREADS,
    Model,
    build_model,
    dummy_weights,
    load_weights,
    materialize,
    weights_bytes,
)
from pagerunner.models.checkpoint.weight_copy import ThreadStagers
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant.sinks import CopySink


def build(path: Path, dtype: str = "float32") -> tuple[Model, torch.Tensor]:
    """A model of the directory with memory full of NaN."""
    model = build_model(read_model_config(path), dtype)  # type: ignore[arg-type]
    region = torch.full((weights_bytes(model),), 255, dtype=torch.uint8)
    materialize(model, region)
    return model, region


def contents(model: Model) -> dict[str, torch.Tensor]:
    """Copies of the weights by the names of a checkpoint's tensors."""
    sinks = {tensor.name: tensor.sink for tensor in model.checkpoint() if not tensor.instead_of}
    return {name: sink.target.clone() for name, sink in sinks.items() if isinstance(sink, CopySink)}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_the_file_is_in_its_place(tmp_path: Path, family: str, shards: int) -> None:
    path = make_checkpoint(tmp_path, family, shards=shards, tokenizer=False)
    model, _ = build(path)
    calls: list[tuple[int, int]] = []
    load_weights(model, path, lambda done, total: calls.append((done, total)))
    want = make_weights(make_config(family))
    found = contents(model)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


def test_weights_live_in_the_region_and_nowhere_else(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, vocab_size=1013)
    model, region = build(path)
    first, last = region.data_ptr(), region.data_ptr() + region.nbytes
    spans = []
    for module in model.modules():
        for tensor in module.weights.values():
            assert (tensor.data_ptr() - first) % ALIGNMENT == 0
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    spans.sort()
    assert first <= spans[0][0] and spans[-1][1] <= last
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_reloading_in_place_and_moving_to_another_region(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    model, region = build(path)
    load_weights(model, path)
    want = contents(model)
    region.fill_(255)
    load_weights(model, path)
    assert all(torch.equal(tensor, want[name]) for name, tensor in contents(model).items())
    moved = region.clone()
    region.fill_(255)
    materialize(model, moved)
    assert all(torch.equal(tensor, want[name]) for name, tensor in contents(model).items())


def test_a_model_has_no_memory_before_it_is_materialized(tmp_path: Path) -> None:
    model = build_model(read_model_config(make_checkpoint(tmp_path, "llama", tokenizer=False)), "float32")
    assert all(tensor.is_meta for tensor in contents(model).values())


def test_files_are_converted_to_the_models_dtype(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    model, _ = build(path, "bfloat16")
    load_weights(model, path)
    want = make_weights(make_config("llama"))
    assert all(torch.equal(tensor, want[name].bfloat16()) for name, tensor in contents(model).items())


def test_dummy_weights_are_seeded_and_fill_everything(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", tokenizer=False)
    found = []
    for seed in (1, 1, 2):
        model, _ = build(path, "bfloat16")
        dummy_weights(model, seed)
        found.append(contents(model))
    assert all(bool(torch.isfinite(x).all()) for x in found[0].values())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["lm_head.weight"], found[2]["lm_head.weight"])
    assert abs(float(found[0]["model.norm.weight"].float().mean()) - 1) < 0.05


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    weights = {**load_file(path / "model.safetensors"), **change}
    save_file({n: t for n, t in weights.items() if t is not None}, path / "model.safetensors")
    return path


def refusal(path: Path) -> str:
    model, _ = build(path)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, path)
    return str(caught.value)


def test_faulty_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def fresh() -> Path:
        return make_checkpoint(tmp_path, "llama", tokenizer=False)

    assert name in refusal(rewrite(fresh(), {name: None}))
    message = refusal(rewrite(fresh(), {name: torch.zeros(96, 65)}))
    assert name in message and "[96, 65]" in message and "[96, 64]" in message
    assert "model.layers.0.extra" in refusal(rewrite(fresh(), {"model.layers.0.extra": torch.zeros(3)}))
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert bias in refusal(rewrite(fresh(), {bias: torch.zeros(64)}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_codes_are_never_taken_for_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    codes = (
        torch.ones(96, 64, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.ones(96, 64, dtype=dtype)
    )
    message = refusal(rewrite(make_checkpoint(tmp_path, "llama", tokenizer=False), {name: codes}))
    assert name in message and str(dtype).removeprefix("torch.") in message and "asks for floats" in message


def test_old_checkpoints_may_carry_rotary_frequencies(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    rewrite(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_weights(build(path)[0], path)


def test_a_tied_checkpoint_may_repeat_the_embedding_but_not_contradict_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(path, {"lm_head.weight": embedding.clone()})
    load_weights(build(path)[0], path)
    message = refusal(rewrite(path, {"lm_head.weight": embedding + 1}))
    assert "lm_head.weight" in message and "tie_word_embeddings" in message


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-100], whole[:5], b"", b"\xff" * 64):
        file.write_bytes(broken)
        assert "model.safetensors is not a complete safetensors file" in refusal(path)
    file.unlink()
    assert "no model.safetensors" in refusal(path)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert "pytorch_model.bin is a pickle" in refusal(path)


def test_faulty_indexes_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, shards=3)
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    second = path / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.unlink()
    assert second.name in refusal(path)
    second.write_bytes(content)
    moved = json.loads(good)
    moved["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(moved))
    assert "lacks the tensor model.norm.weight" in refusal(path)
    moved["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(moved))
    assert "../elsewhere.safetensors" in refusal(path)
    index.write_text(good[:50])
    assert "index.json is not valid JSON" in refusal(path)
    index.write_text("{}")
    assert "weight_map" in refusal(path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, shards=2)
    first = path / "model-00001-of-00002.safetensors"
    second = path / "model-00002-of-00002.safetensors"
    name = sorted(load_file(first))[0]
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    assert name in refusal(path)


def test_shards_and_single_files_hold_the_same(tmp_path: Path) -> None:
    weights = make_weights(make_config("llama"))
    write_safetensors(tmp_path, weights, shards=4)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert names == weights.keys()


def test_copies_run_side_by_side_and_few_are_begun_ahead(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", shards=3, tokenizer=False)
    model, _ = build(path)
    together, most, threads, lock = [0], [0], set(), threading.Lock()

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
            threads.add(threading.get_ident())
        time.sleep(0.005)
        target.copy_(source)
        with lock:
            together[0] -= 1

    load_weights(model, path, copy=slow)
    assert 1 < most[0] <= THREADS and len(threads) <= THREADS and threading.get_ident() not in threads
    want = make_weights(make_config("llama"))
    assert all(torch.equal(tensor, want[name]) for name, tensor in contents(model).items())


def test_a_copy_that_fails_ends_the_load_and_leaves_no_thread(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    model, _ = build(path)

    def broken(target: torch.Tensor, source: torch.Tensor) -> None:
        raise CapacityError("the device is full")

    with pytest.raises(CapacityError, match="the device is full"):
        load_weights(model, path, copy=broken)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_a_load_on_a_cpu_leaves_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "stream", started)
    monkeypatch.setattr(torch.cuda, "current_stream", started)
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    load_weights(build(path)[0], path)


def test_the_rate_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    model, _ = build(path)
    with caplog.at_level(logging.INFO):
        load_weights(model, path)
    assert any(record.getMessage().endswith("iB/s.") for record in caplog.records)


def test_every_thread_has_page_locked_buffers_of_its_own(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", shards=2, tokenizer=False)
    model, _ = build(path)
    load_weights(model, path, copy=ThreadStagers(torch.device("cpu")))
    want = make_weights(make_config("llama"))
    assert all(torch.equal(tensor, want[name]) for name, tensor in contents(model).items())
