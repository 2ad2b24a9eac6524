"""An engine's drafter that is a model: what is planned for it, and what its ranks load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import EAGLE, eagle_weights, write_drafter
from pagerunner.config import engine_args
from pagerunner.engine.startup import speculation
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker.worker import load_worker
from pagerunner.errors import ConfigError
from pagerunner.memory.report import plan_table

LIMITS = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 2**24,
    "device": "cpu",
    "skip_tokenizer_init": True,
}


@pytest.fixture(autouse=True)
def _works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speculation.WORKS, "eagle3", None)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=8, tokenizer=False)
    return str(target), str(
        write_drafter(tmp_path / "head", EAGLE | {"max_position_embeddings": 1024}, eagle_weights(EAGLE))
    )


def drafting(head: str) -> dict[str, object]:
    return {"speculative_config": {"method": "eagle3", "model": head, "num_speculative_tokens": 3}}


def test_the_drafters_layer_and_weights_are_in_the_plan(paths: tuple[str, str]) -> None:
    target, head = paths
    plain = resolve(engine_args(model=target, **LIMITS)).plan
    found = resolve(engine_args(model=target, **LIMITS, **drafting(head)))
    assert sum(len(group.layers) for group in plain.groups) == 8
    assert sum(len(group.layers) for group in found.plan.groups) == 9
    size = dict(found.plan.other)["weights of the drafter"]
    model = found.model.drafter
    assert model is not None and model.path == head
    tensors = [tensor.nbytes for name, tensor in eagle_weights(EAGLE).items() if name != "t2d"]
    assert 0 <= size - sum(tensors) < 2**14  # panels and places are rounded up
    assert dict(found.plan.other)["weights"] == dict(plain.other)["weights"]
    assert "weights of the drafter" in plan_table(found.plan)


def test_a_drafter_shorter_than_the_engine_is_refused(paths: tuple[str, str]) -> None:
    target, head = paths
    with pytest.raises(ConfigError, match="max_model_len=2048 is more than the 1024 positions of the drafter"):
        resolve(engine_args(model=target, **LIMITS | {"max_model_len": 2048}, **drafting(head)))


def test_the_drafter_is_in_the_region_of_the_weights_and_is_read_again(paths: tuple[str, str]) -> None:
    """So sleep frees it, and a wake brings it back."""
    target, head = paths
    resolved = resolve(engine_args(model=target, **LIMITS, **drafting(head)))
    worker = load_worker(resolved)
    other = dict(resolved.plan.other)
    assert worker.weights.nbytes == other["weights"] + other["weights of the drafter"]
    own = load_file(Path(head) / "model.safetensors")
    norm = worker.model.drafter.layers[0].hidden_norm.weights
    assert torch.equal(norm["weight"], own["midlayer.hidden_norm.weight"])
    digest = worker.weights_digest()
    worker.weights.zero_()
    assert not norm["weight"].any()
    worker.reload()
    assert torch.equal(norm["weight"], own["midlayer.hidden_norm.weight"])
    assert worker.weights_digest() == digest


def test_random_weights_need_only_a_config(paths: tuple[str, str]) -> None:
    target, head = paths
    (Path(head) / "model.safetensors").unlink()
    worker = load_worker(resolve(engine_args(model=target, load_format="dummy", **LIMITS, **drafting(head))))
    drafter = worker.model.drafter
    assert drafter.to_target(torch.arange(96)).max() < 512
    assert drafter.layers[0].self_attn.qkv_proj.weights["weight"].std() > 0.01
