"""New weights from a trainer on another device, and the memory for pieces of them: taken from the device, given back to it, and refused with numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.device import MIB, needs_cuda
from helpers.trainer import sender_to
from pagerunner import LLM, SamplingParams
from pagerunner.dist import transfer
from pagerunner.dist.transfer import TransferGroup
from pagerunner.errors import CapacityError


@needs_cuda
def test_the_device_has_its_memory_back_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TCPStore", lambda *given, **options: SimpleNamespace(check=lambda keys: True))
    monkeypatch.setattr(transfer, "nccl_group", lambda *_: None)
    rank = TransferGroup("127.0.0.1", 1, 1, 2, "nccl", torch.device("cuda", torch.cuda.current_device()), 20)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    rank.reserve(256 * MIB)
    assert torch.cuda.memory_reserved() >= before + 256 * MIB
    with pytest.raises(CapacityError, match=r"takes 1024\.00 TiB, and the device has [\d.]+ GiB\. Send smaller pieces"):
        rank.reserve(2**50)
    rank.release()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("packed", [True, False])
def test_a_trainer_on_another_device_sends_weights_by_nccl(packed: bool, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    paths = [make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", seed=seed, **wide) for seed in range(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def engine(path: Path) -> LLM:
        return LLM(
            str(path), use_tqdm=False, max_model_len=256, kv_cache_memory_bytes=2**26, weight_transfer_config={"backend": "nccl"}
        )  # fmt: skip

    def tokens(llm: LLM) -> list[int]:
        [output] = llm.generate({"prompt_token_ids": [*range(20, 60)]}, params, use_tqdm=False)
        return output.outputs[0].token_ids

    wanted, llm = tokens(engine(paths[1])), engine(paths[0])
    assert tokens(llm) != wanted
    torch.cuda.set_device(1)  # the trainer's
    try:
        sender_to(llm, "nccl").send(load_file(paths[1] / "model.safetensors").items(), packed=packed)
    finally:
        torch.cuda.set_device(0)
    assert tokens(llm) == wanted
