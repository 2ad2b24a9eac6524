"""Mixers that two devices hold a half of each: heads, channels and gates that belong together come together.

A device's mixer is made with half of the heads and loaded by the whole one's declarations. What runs between its projections looks at one
head at a time, so a stand-in does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.parts import fill
from helpers.published import all_published
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.shares import Share, divided
from pagerunner.layers.sublayer import Mixer, ResidualStream, StepContext
from pagerunner.models import bamba, deepseek, qwen3_next
from pagerunner.models.checkpoint.loader import materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.rope import RopeAngles

HIDDEN, TOKENS, PREFIX = 32, 6, "mixer."


def config(repository: str, **sizes: int) -> Any:
    found = read_model_config(all_published()[repository].file, quantised=True)
    return replace(found, format=None, hidden_size=HIDDEN, **sizes)


DELTA = {"key_heads": 4, "value_heads": 8, "key_head_dim": 8, "value_head_dim": 4}
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
MAMBA = {"mamba_heads": 8, "mamba_head_dim": 4, "state_size": 8}
LATENT = {"num_heads": 4, "key_dim": 8, "value_dim": 8, "latent_dim": 16}
Case = tuple[Callable[..., Mixer], str, dict[str, int], dict[str, int]]
CASES: dict[str, Case] = {
    "grouped delta rule": (
        qwen3_next.GroupedGatedDeltaNet,
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        DELTA,
        {"key_heads": 2, "value_heads": 4},
    ),
    "delta rule": (qwen3_next.PlainGatedDeltaNet, "Qwen/Qwen3.5-27B", DELTA, {"key_heads": 2, "value_heads": 4}),
    "gated attention": (
        qwen3_next.Attention,
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        HEADS,
        {"num_heads": 4, "num_kv_heads": 1},
    ),
    "one key/value head for both": (
        qwen3_next.Attention,
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {**HEADS, "num_kv_heads": 1},
        {"num_heads": 4},
    ),
    "latents": (deepseek.Attention, "deepseek-ai/DeepSeek-V3", {**LATENT, "query_rank": 24}, {"num_heads": 2}),
    "latents beside queries": (deepseek.Attention, "deepseek-ai/DeepSeek-V2-Lite-Chat", LATENT, {"num_heads": 2}),
    "mamba": (
        bamba.Mamba2Mixer,
        "ibm-ai-platform/Bamba-9B-v2",
        {**MAMBA, "mamba_groups": 2},
        {"mamba_heads": 4, "mamba_groups": 1},
    ),
    "mamba, one group for both": (bamba.Mamba2Mixer, "ibm-ai-platform/Bamba-9B-v2", MAMBA, {"mamba_heads": 4}),
}


def recur(seen: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The recurrence from a state of zeros, whose outputs are also put into `seen`."""

    def run(recurrence: Any, inputs: Any, batch: None) -> torch.Tensor:
        channels, taps = recurrence.conv_weight_CW.shape
        heads = recurrence.decay_log_H.shape[0]
        if hasattr(recurrence, "key_dim"):
            state = (heads, recurrence.key_dim, recurrence.value_dim)
        else:
            state = (heads, recurrence.head_dim, recurrence.state_size)
        out, _ = recurrence.chunks(inputs, (torch.zeros(taps - 1, channels), torch.zeros(state)))
        seen.append(out)
        return out

    return run


def attend(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, batch: None, wanted: None) -> torch.Tensor:
    repeats = q_THd.shape[1] // k_TKd.shape[1]
    return q_THd * k_TKd.repeat_interleave(repeats, 1) + v_TKd.repeat_interleave(repeats, 1)


def attend_latents(q_THD: torch.Tensor, vectors_TL: torch.Tensor, prep: Any, up: Any, batch: None) -> torch.Tensor:
    return up.values((up.absorb(q_THD) * vectors_TL.unsqueeze(1))[..., : up.latent_dim])


def ready(mixer: Any, seen: list[torch.Tensor]) -> Any:
    """The mixer with memory, and with stand-ins for what the runner would bring."""
    materialize(mixer, torch.full((weights_bytes(mixer),), 255, dtype=torch.uint8))
    if hasattr(mixer, "recur"):
        mixer.recur, mixer.takes_groups = recur(seen), lambda batch: False
    else:
        mixer.attend = attend_latents if isinstance(mixer, deepseek.Attention) else attend
    return mixer


@pytest.mark.parametrize("case", CASES)
def test_two_devices_with_half_of_the_heads_are_the_whole_mixer(case: str) -> None:
    torch.manual_seed(0)
    mixer, repository, sizes, half = CASES[case]
    own = config(repository, **sizes)
    seen: list[torch.Tensor] = []
    whole = ready(mixer(own, 0, torch.float32), seen)
    declared = {tensor.name: tensor for tensor in whole.checkpoint(PREFIX)}
    tensors = {name: torch.randn(tensor.sink.shape) / 4 for name, tensor in declared.items()}
    for name, tensor in declared.items():
        tensor.sink.put(tensors[name], lambda target, source: target.copy_(source))
    norm = RMSNorm(HIDDEN, 1e-6, torch.float32)
    norm.weights = {"weight": torch.rand(HIDDEN)}
    rotated = int(own.head_dim * own.rope.partial) if mixer is qwen3_next.Attention else 1
    x = torch.randn(TOKENS, HIDDEN)
    angles = RopeAngles(torch.ones(TOKENS, 1, rotated), torch.zeros(TOKENS, 1, rotated))

    def out(one: Any) -> torch.Tensor:
        return one.o_proj(one.mix(ResidualStream(x), norm, StepContext(angles, None)))

    want, partial = out(whole), []
    for device in range(2):
        part = ready(mixer(replace(own, **half), 0, torch.float32), seen)
        fill(part, PREFIX, Share(whole, divided(declared.values(), 2), device), tensors)
        partial.append(out(part))
    if mixer is bamba.Mamba2Mixer:
        # its norm's mean is over both devices' channels; up to there devices need nothing of each other
        torch.testing.assert_close(torch.cat(seen[1:], 1), seen[0], rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(sum(partial), want, rtol=1e-4, atol=1e-4)
