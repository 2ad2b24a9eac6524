"""Adapters on the device: kernels, graphs whose adapters change, and tokens of merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import AdaptedMixture, merged_checkpoint, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.device import DEVICE, counted_graphs, device_llm
from pagerunner import LoRARequest, SamplingParams
from pagerunner.layers.moe import ExpertSizes
from pagerunner.ops import lora
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.lora import Adapters, Blocks, Fused, joins_product
from pagerunner.ops.norm import rms_norm
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.routing import Routes

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 512, "max_model_len": 256}
PROMPTS = [[7, 8, 9, 10 + n] * 6 for n in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 2000])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, [4096, 1024, 1024]), (12288, [4096]), (72, [136, 24])])
def test_the_kernels_add_what_the_twins_do(dtype: torch.dtype, tokens: int, inputs: int, outputs: list[int]) -> None:
    """Ranks 16, 40 and 3 mixed with rows that have no adapter, whose bits stay."""
    torch.manual_seed(tokens)
    slots, most = 4, 3
    size = 16 * (inputs + max(outputs))
    pool = torch.randn(slots * len(outputs) * most * size, dtype=torch.float32).mul_(0.05).to(dtype).to(DEVICE)
    places = torch.full((slots, len(outputs), most, 2), -1, dtype=torch.int64)
    for slot, blocks in ((0, 1), (1, 3), (3, 1)):
        for part in range(len(outputs)):
            for block in range(blocks):
                at = ((slot * len(outputs) + part) * most + block) * size
                places[slot, part, block] = torch.tensor([at, at + 16 * inputs])
    own = torch.randint(-1, 4, (tokens,), dtype=torch.int32)
    own[own == 2] = 1
    x, y = torch.randn(tokens, inputs).to(dtype).to(DEVICE), torch.randn(tokens, sum(outputs)).to(dtype).to(DEVICE)
    start = torch.arange(tokens + 1, dtype=torch.int32)

    def add(device: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        blocks = Blocks(pool.to(device), places.to(device))
        adapters = Adapters.of_rows(own.to(device), start.to(device), start[:-1].to(device), slots, blocks)
        adapters.add_(x, Fused.of(0, outputs, device), y)
        return y

    got = add(DEVICE, x, y.clone()).cpu()
    want = add("cpu", x.cpu().float(), y.cpu().float()) if dtype is torch.float32 else add("cpu", x.cpu(), y.cpu())
    torch.testing.assert_close(
        got.float(),
        want.float(),
        rtol=2e-2 if dtype is torch.bfloat16 else 1e-3,
        atol=2e-2 if dtype is torch.bfloat16 else 1e-3,
    )
    assert torch.equal(got[own < 0], y.cpu()[own < 0])


@pytest.mark.parametrize(
    ("inputs", "outputs", "gated"),
    [
        (4096, [4096, 1024, 1024], False),
        (12288, [4096], False),
        (4096, [12288, 12288], False),
        (4096, [12288, 12288], True),  # a gate has two products
    ],
)
def test_one_row_has_its_adapter_in_its_own_product(inputs: int, outputs: list[int], gated: bool) -> None:
    """The sums of one launch and of two; and a row without an adapter has the bits of the layer's own product."""
    torch.manual_seed(inputs)
    size = 16 * (inputs + max(outputs))
    pool = (torch.randn(len(outputs) * size, device=DEVICE) * 0.05).bfloat16()
    at = torch.arange(len(outputs), device=DEVICE) * size
    blocks = Blocks(pool, torch.stack([at, at + 16 * inputs], 1).view(1, len(outputs), 1, 2))
    x = torch.randn(1, inputs, device=DEVICE).bfloat16()
    weight = (torch.randn(sum(outputs), inputs, device=DEVICE) * 0.02).bfloat16()
    norm, layer = Norm(torch.rand(inputs, device=DEVICE).bfloat16(), 1e-6), Fused.of(0, outputs, DEVICE)
    start, row = (
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )

    def made(slot: int) -> torch.Tensor:
        own = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
        adapters = Adapters.of_rows(own, start, row, 1, blocks)
        out = x.new_empty(1, outputs[0] if gated else sum(outputs))
        return adapters.row(layer, x, weight, None, out, norm, gated=gated)

    assert torch.equal(made(-1), norm_linear_silu(x, norm, weight) if gated else norm_linear(x, norm, weight))
    want = norm_linear(x, norm, weight)
    own = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    Adapters.of_rows(own, start, row, 1, blocks).add_(norm(x), layer, want)
    want = silu_and_mul(want) if gated else want
    torch.testing.assert_close(made(0).float(), want.float(), rtol=3e-2, atol=3e-2)


def test_words_of_one_row_are_those_of_its_turn() -> None:
    """144 products in a graph tell each other `A x` in the same words. A program that took older ones would have another product's."""
    torch.manual_seed(0)
    inputs, products = 1024, 144
    size = 16 * 2 * inputs
    pool = (torch.randn(products * size, device=DEVICE) * 0.3).bfloat16()
    at = torch.arange(products, device=DEVICE) * size
    blocks = Blocks(pool, torch.stack([at, at + 16 * inputs], 1).view(1, products, 1, 2))
    weight = torch.zeros(inputs, inputs, device=DEVICE).bfloat16()
    x = torch.randn(1, inputs, device=DEVICE).bfloat16()
    start, row = torch.arange(2, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    layers = [Fused.of(number, [inputs], DEVICE) for number in range(products)]
    out = x.new_empty(products, inputs)

    def step() -> None:
        adapters = Adapters.of_rows(row, start, row, 1, blocks)
        for number, layer in enumerate(layers):
            adapters.row(layer, x, weight, None, out[number : number + 1])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        x.normal_()
        out.zero_()
        graph.replay()
        a, b = pool.view(products, 2, -1)[:, 0].view(products, 16, inputs), pool.view(products, 2, -1)[:, 1]
        want = torch.einsum(
            "pr,pro->po", (a.float() @ x[0].float()).bfloat16().float(), b.view(products, 16, -1).float()
        )
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("tokens", [9, 33, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs", "flags"),
    [
        (4096, [4096, 1024, 1024], {}),
        (4096, [4096], {"add": True}),
        (4096, [12288, 12288], {"gated": True}),
        (12288, [4096], {"add": True}),
    ],
)
@pytest.mark.parametrize("count", [1, 8, 64])
def test_several_rows_have_their_adapters_in_their_own_product(
    tokens: int, inputs: int, outputs: list[int], flags: dict[str, bool], count: int
) -> None:
    """`A x` beside the product and behind it; bits of rows without an adapter; the same bits in each of 20 replays."""
    torch.manual_seed(tokens)
    size = 16 * (inputs + max(outputs))
    pool = (torch.randn(len(outputs) * count * size, device=DEVICE) * 0.05).bfloat16()
    at = torch.randperm(len(outputs) * count, device=DEVICE).view(count, -1) * size
    blocks = Blocks(pool, torch.stack([at, at + 16 * inputs], 2).view(count, len(outputs), 1, 2))
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    weight = (torch.randn(sum(outputs), inputs, device=DEVICE) * 0.02).bfloat16()
    own = torch.randint(-1, count, (tokens,), device=DEVICE, dtype=torch.int32)
    own[0], own[1], layer = 0, -1, Fused.of(0, outputs, DEVICE)
    start = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE)
    assert joins_product(x, weight)
    old = torch.randn(tokens, sum(outputs), device=DEVICE).bfloat16()
    out = old.clone()

    def made() -> torch.Tensor:
        adapters = Adapters.of_rows(own, start, start[:-1], count, blocks)
        out.copy_(old)
        return adapters.product(layer, rounded(x), weight, None, out, **flags)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        """A kernel before the product, whose output has to be there."""
        return rms_norm(x, weight[0, :inputs] * 0 + 1, 1e-6)

    first = made().clone()
    y = linear(rounded(x), weight)
    Adapters.of_rows(own, start, start[:-1], count, blocks).add_(rounded(x), layer, y)
    y = silu_and_mul(y) if "gated" in flags else y
    want = old + y if "add" in flags else y
    torch.testing.assert_close(first.float(), want.float(), rtol=3e-2, atol=5e-2)
    base = old.clone()
    if "add" in flags:
        linear_add_(rounded(x), weight, base)
    else:
        base = norm_linear_silu(rounded(x), None, weight) if "gated" in flags else linear(rounded(x), weight)
    assert torch.equal(first[own < 0], base[own < 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = made()
    for _ in range(20):
        again.zero_()
        graph.replay()
        assert torch.equal(again, first)


@pytest.mark.parametrize("gated", [False, True])
def test_several_rows_have_bits_of_their_own(gated: bool) -> None:
    """Whatever the others have, and whichever place among its adapter's tokens a row has. Some have the same adapter as it, all, or none."""
    torch.manual_seed(0)
    tokens, inputs, outputs, count = 64, 4096, [4096, 4096], 8
    size = 16 * 2 * inputs
    pool = (torch.randn(2 * count * size, device=DEVICE) * 0.05).bfloat16()
    at = torch.arange(2 * count, device=DEVICE).view(count, 2) * size
    blocks, layer = (
        Blocks(pool, torch.stack([at, at + 16 * inputs], 2).view(count, 2, 1, 2)),
        Fused.of(0, outputs, DEVICE),
    )
    weight = (torch.randn(sum(outputs), inputs, device=DEVICE) * 0.02).bfloat16()
    start = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE)
    mine, found = torch.randn(inputs, device=DEVICE).bfloat16(), []
    for others in (torch.full((tokens,), -1), torch.full((tokens,), 3), torch.arange(tokens) % count):
        x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
        x[37], others[37] = mine, 3
        own = others.int().to(DEVICE)
        adapters = Adapters.of_rows(own, start, start[:-1], count, blocks)
        out = x.new_empty(tokens, sum(outputs))
        found.append(adapters.product(layer, x, weight, None, out, gated=gated)[37].clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_prompts_have_tiles_multiplied_together() -> None:
    """Adapters that meet in a program, tokens without one, an adapter without one of the products."""
    torch.manual_seed(0)
    inputs, outputs, slots = 1088, [512, 512], 4
    size = 16 * (inputs + 512)
    at = torch.randperm(2 * 2 * slots).view(slots, 2, 2) * size
    places = torch.stack([at, at + 16 * inputs], 3)
    places[1, 1], places[2, :, 1:] = -1, -1
    pool = (torch.randn(4 * slots * size) * 0.05).bfloat16()
    lens, own = [1000, 300, 1500, 1, 33, 800], torch.tensor([2, -1, 0, 1, 2, 3], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    row_T = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(torch.tensor(lens))
    x, y = torch.randn(len(row_T), inputs).bfloat16(), torch.randn(len(row_T), 1024).bfloat16()
    made = []
    for device in ("cpu", DEVICE):
        given = [one.to(device) for one in (own, starts, row_T)]
        adapters = Adapters.of_rows(*given, slots, Blocks(pool.to(device), places.to(device)))
        layer, added = Fused.of(0, outputs, device), y.to(device, copy=True)
        adapters.add_(x.to(device), layer, added)
        made += [added.cpu(), adapters.gated(x.to(device), layer, y.to(device, copy=True)).cpu()]
    for one, other in zip(made[:2], made[2:], strict=True):
        torch.testing.assert_close(other, one, rtol=3e-2, atol=8e-2)
    assert torch.equal(made[2][1000:1300], y[1000:1300])


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_tokens_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    """Four adapters and none in two slots, so graphs are replayed with adapters that change."""
    base = (make_checkpoint if family in ("llama", "qwen3") else make_window_checkpoint)(tmp_path, family)
    adapters = [
        LoRARequest(f"a{n}", 1, str(random_adapter(base, tmp_path / f"a{n}", rank=(4, 16, 3, 9)[n], seed=n)))
        for n in range(4)
    ]
    wanted = [None, *adapters, adapters[0]] * 2
    with counted_graphs() as graphs:
        llm = device_llm(base, enable_lora=True, max_loras=2, **OPTIONS)
        mixed = llm.generate(PROMPTS, GREEDY, False, lora_request=wanted)
        assert any(key.adapters for key in graphs.replays)
        graphs.replays.clear()
        none = llm.generate(PROMPTS, GREEDY, False)
        assert graphs.replays and not any(key.adapters for key in graphs.replays)
    plain = device_llm(base, **OPTIONS).generate(PROMPTS, GREEDY, False)
    assert [one.outputs[0].token_ids for one in none] == [one.outputs[0].token_ids for one in plain]
    for adapter in adapters:
        merged = merged_checkpoint(base, Path(adapter.lora_path), tmp_path / f"m{adapter.lora_name}")
        alone = device_llm(merged, **OPTIONS).generate(PROMPTS, GREEDY, False)
        for one, got, want in zip(wanted, mixed, alone, strict=True):
            if one is adapter:
                assert got.outputs[0].token_ids == want.outputs[0].token_ids
    for one, got, want in zip(wanted, mixed, plain, strict=True):
        if one is None:
            assert got.outputs[0].token_ids == want.outputs[0].token_ids


@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 128, 300])
@pytest.mark.parametrize("sizes", [ExpertSizes(32, 256, 128), ExpertSizes(5, 72, 40)])
def test_experts_have_the_adapters_of_their_tokens(tokens: int, sizes: ExpertSizes) -> None:
    """A token alone, up to 1,024 pairs of tokens and experts, and more. Every third row's adapter has products of experts."""
    torch.manual_seed(tokens)
    mixture = AdaptedMixture(sizes, 4, torch.bfloat16, DEVICE)
    x = torch.randn(tokens, sizes.features, device=DEVICE).bfloat16()
    routes = mixture.mlp.router(x)
    found = Routes(routes.weights_TA.cpu(), routes.experts_TA.cpu())
    base, merged = torch.zeros(2, tokens, sizes.features).unbind()
    for want, adapted in ((base, False), (merged, True)):
        mixture.on_cpu(merged=adapted).add_then(x.float().cpu(), found, want)
    for first in (1, 0, -1):
        slots = [(first, 1, 0)[row % 3] for row in range(tokens)]
        out = torch.zeros_like(x)
        rest = mixture.mlp.experts.add_then(x, routes, out, adapters=mixture.adapters(slots))
        if isinstance(rest, PairSums):
            out += rest.total()
        want = torch.where(torch.tensor(slots).unsqueeze(1) == 1, merged, base)
        torch.testing.assert_close(out.float().cpu(), want, rtol=0.03, atol=0.03)
    assert (merged - base).abs().max() > 0.2


def test_sleep_and_loading_beside_steps(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "qwen3")
    adapters = [
        LoRARequest(f"a{n}", 1, str(random_adapter(base, tmp_path / f"a{n}", rank=8, seed=n))) for n in range(6)
    ]
    llm = device_llm(base, enable_lora=True, max_loras=2, max_cpu_loras=2, enable_sleep_mode=True, **OPTIONS)
    wanted = adapters * 2
    first = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, False, lora_request=wanted)]
    llm.sleep(1)
    llm.wake_up()
    assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, False, lora_request=wanted)] == first


def test_sums_have_one_order() -> None:
    """A row's bits don't depend on the rows beside it, up to the spread of pieces over programs and beyond."""
    torch.manual_seed(0)
    inputs, outputs, slots = 4096, [1024], 2
    pool = torch.randn(2 * 16 * (inputs + 1024), device=DEVICE).bfloat16()
    places = torch.tensor(
        [[[[0, 16 * inputs]]], [[[16 * (inputs + 1024), 16 * (inputs + 1024) + 16 * inputs]]]], device=DEVICE
    )
    blocks, layer = Blocks(pool, places), Fused.of(0, outputs, DEVICE)
    x = torch.randn(2048, inputs, device=DEVICE).bfloat16()

    def add(count: int) -> torch.Tensor:
        own = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        own[1::2] = 1
        start = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
        y = torch.zeros(count, 1024, device=DEVICE).bfloat16()
        Adapters.of_rows(own, start, start[:-1], slots, blocks).add_(x[:count], layer, y)
        return y

    alone = add(1)
    for count in (2, 16, 64, 600, 2048):
        assert torch.equal(add(count)[:1], alone)
    assert lora.most_tiles(2048, slots) > lora.SPREAD_TILES
