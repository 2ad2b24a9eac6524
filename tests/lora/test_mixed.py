"""Rows with different adapters in one batch, in float32: each as it is alone, and rows without one to the bit as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import AdaptedMixture, pair, products_of, write_adapter
from helpers.checkpoints import make_checkpoint
from helpers.forward import Harness, Sequence, load, prompts
from helpers.graphs import RecordedGraphs
from pagerunner.batch import ForwardBatch
from pagerunner.dist.null import NullComm
from pagerunner.errors import ConfigError
from pagerunner.layers import linear
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import ExpertSizes
from pagerunner.lora.adapter import Adapter, Stack, Targets, read_adapter
from pagerunner.lora.blocks import AdapterTable, Products
from pagerunner.ops.lora import Adapters
from pagerunner.quant.ranked import Summed

RANKS = {0: 4, 1: 20}


PAGES, PAGE = 64, 8192


def put(table: AdapterTable, slot: int, adapter: Adapter) -> None:
    """Bring an adapter to every second page, from the last one on; the other slot has the others."""
    packed = table.products.pack(adapter, 32, torch.float32, table.page)
    pages = range(len(packed.pages))
    table.fill(slot, packed, [(2 * (PAGES - 1 - page) + slot) * PAGE for page in pages], pages)


class Adapted(Harness):
    """A harness whose rows have adapters, by their prompts' first tokens."""

    table: AdapterTable
    slots: dict[int, int]

    def _batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        batch = super()._batch(work)
        own = torch.tensor([self.slots.get(sequence.tokens[0], -1) for sequence, _ in work], dtype=torch.int32)
        rows, table = batch.rows, self.table
        adapters = Adapters.of_rows(own, rows.query_start_R1, rows.row_T, table.slots, table.blocks)
        return replace(batch, adapters=adapters, last_alone=False)


def harness(base: Path, directory: Path, slots: dict[int, int]) -> Adapted:
    """Over a model whose every matrix has an adapter in each slot."""
    model, config = load(base)
    known, products = Targets.of(model), Products.of(model)
    made = Adapted(model, config, dtype=torch.float32, page_tokens=4, num_pages=64)
    made.table = AdapterTable(
        products, torch.zeros(2 * PAGES, PAGE, dtype=torch.uint8).flatten(), PAGE, torch.float32, 2, 32
    )
    made.slots = slots
    products.adapt()
    for slot, rank in RANKS.items():
        tensors: dict[str, torch.Tensor] = {}
        for number, (name, (outputs, inputs)) in enumerate(products.sizes.items()):
            tensors |= pair(name, outputs, inputs, rank, seed=100 * slot + number)
        asked: dict[str, Any] = {"target_modules": list(products.sizes), "r": rank, "lora_alpha": 0.1}
        put(
            made.table,
            slot,
            read_adapter(write_adapter(directory / str(slot), asked, tensors), known, torch.float32, 32),
        )
    return made


@pytest.mark.parametrize("tokens", [1, 5])
def test_adapters_of_experts_are_few_launches(tokens: int) -> None:
    """Slot 1 has products of experts, slot 0 of none. With some 70 launches a layer, a token alone took four times as long as without adapters."""
    torch.manual_seed(tokens)
    mixture, slots, x = AdaptedMixture(ExpertSizes(4, 32, 16), 2), [1, 0, -1, 1, 1][:tokens], torch.randn(tokens, 32)
    out, base, want, adapters = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x), mixture.adapters(slots)
    experts, routes = mixture.mlp.experts, mixture.mlp.router(x)
    adapters.apart()  # once for all layers
    recorded = RecordedGraphs()
    recorded.capture(lambda: (experts.add_then(x, routes, out, adapters=adapters), out)[1:])
    assert recorded.graphs[0].num_launches <= 14
    experts.add_then(x, routes, base)
    mixture.on_cpu(merged=True).add_then(x, routes, want)
    with_experts = torch.tensor(slots) == 1
    torch.testing.assert_close(out[with_experts], want[with_experts], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[~with_experts], base[~with_experts], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(base[with_experts], want[with_experts], atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mixed_batch_is_each_row_alone(tmp_path: Path, family: str) -> None:
    base = make_checkpoint(tmp_path, family, tokenizer=False)
    texts = prompts([5, 9, 3, 18])
    for number, text in enumerate(texts):
        text[0] = number + 7
    slots = {7: 0, 9: 1, 10: 0}  # the second prompt has none
    mixed = harness(base, tmp_path / "a", slots).generate(texts, 4, chunk=11)
    plain_model, config = load(base)
    plain = Harness(plain_model, config, dtype=torch.float32, page_tokens=4, num_pages=64).generate(texts, 4, chunk=11)
    for number, text in enumerate(texts):
        alone = harness(base, tmp_path / f"b{number}", slots).generate([text], 4)[0]
        assert alone.tokens == mixed[number].tokens
        for one, other in zip(alone.logprobs, mixed[number].logprobs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, plain[1].logprobs, mixed[1].logprobs)), (
        "a row without an adapter has the bits of the base"
    )
    assert not torch.allclose(plain[0].logprobs[0], mixed[0].logprobs[0], atol=1e-2)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_adapters_are_what_merged_weights_are(
    tmp_path: Path, joined: bool, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model with B A added to its weights computes the same. A single row's products may add their adapters themselves, as on a GPU.

    `summed`: as if ranks, of which there is one here, added up what divided columns give.
    """
    if joined:
        monkeypatch.setattr(linear, "joins_row", lambda x_TI, weight_OI: x_TI.shape[0] == 1)
    base = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    text = prompts([12])[0]
    text[0] = 7
    adapted = harness(base, tmp_path / "a", {7: 1})
    for layer in adapted.model.modules() if summed else ():
        if isinstance(layer, Linear) and layer.cut is not None and layer.cut.axis == "inputs":
            layer.method = Summed(layer.method, NullComm())
    got = adapted.generate([text], 3)[0]
    model, config = load(base)
    merged = Harness(model, config, dtype=torch.float32, page_tokens=4, num_pages=64)
    products = products_of(read_adapter(tmp_path / "a" / "1", Targets.of(model), torch.float32, 32))
    for name, target in Targets.of(model).matrices.items():
        if name in products:
            rows, before = target.owner.parts, 0  # type: ignore[attr-defined]
            for part, size in rows.items():
                if part == target.part:
                    delta = products[name].b_OR @ products[name].a_RI
                    target.owner.weights["weight"][before : before + size] += delta
                before += size
    want = merged.generate([text], 3)[0]
    assert want.tokens == got.tokens
    for one, other in zip(got.logprobs, want.logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_products_that_no_layer_computes_are_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "llama", tokenizer=False)
    table = harness(base, tmp_path / "a", {}).table
    one = Stack(["model.layers.0.mlp.experts.3.gate_proj"], torch.zeros(1, 4, 64), torch.zeros(1, 64, 4))
    with pytest.raises(ConfigError, match=r"experts\.3\.gate_proj can't have an adapter"):
        put(table, 0, Adapter("", [one]))
