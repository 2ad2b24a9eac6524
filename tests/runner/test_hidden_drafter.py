"""A drafter that works on hidden states, through the loop: prompts in pieces, drafts that are right, half right and wrong, and pages that end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import EAGLE, add_tensors, deepseek_mtp_weights, eagle_weights, write_drafter
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.draft_harness import DraftHarness, load_drafting
from helpers.draft_references import DeepseekMTP, EagleLayers, Reference
from pagerunner.attention.select import select_backends
from pagerunner.memory.planner import plan_memory
from pagerunner.models.checkpoint.drafters import with_drafter
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.batch import SlotState
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.pages import Pages
from pagerunner.runner.spec import Computed, Verified
from pagerunner.runner.spec.hidden import HiddenDrafter
from pagerunner.runner.staging import Staging
from pagerunner.runner.tables import PageTables
from pagerunner.types import StepRow, TableWrite

SLOTS, DRAFTS, LENGTH = 4, 3, 128


class Engine:
    """A target and its drafter over pages, without a scheduler. Slot 0 holds nothing. Of `short` slots the pages end with the prompt's last one."""

    def __init__(self, config: ModelConfig, short: dict[int, int] | None = None) -> None:
        self.model, specs = load_drafting(config), config.specs("float32")
        self.plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=2**24,
            max_model_len=LENGTH,
            model_max_len=LENGTH,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=LENGTH,
        )
        self.memory = torch.full((self.plan.kv_bytes,), 255, dtype=torch.uint8)
        self.tables = PageTables(self.plan, keep_ends=True)
        self.state = SlotState.empty(SLOTS, "cpu", DRAFTS)
        backends = select_backends(self.plan.groups, "auto", torch.device("cpu"), torch.float32)
        layers = Pages(self.plan, self.memory, poison=False).layers
        self.builder = BatchBuilder(self.plan, self.tables, self.state, layers, backends, 2 * LENGTH)
        self.drafter = HiddenDrafter(
            self.model.drafter, self.builder, self.state, len(config.drafter.layer_specs("float32")), LENGTH
        )  # type: ignore[union-attr]
        self.staging = Staging("cpu", 1)
        (group,) = self.plan.groups
        pages = iter(torch.randperm(self.plan.num_pages(0), generator=torch.Generator().manual_seed(0)).tolist())
        self.pages: dict[int, list[int]] = {}
        for slot in range(SLOTS):
            tokens = (short or {}).get(slot, LENGTH)
            self.pages[slot] = [next(pages) for _ in range(-(-tokens // group.page_tokens))]
        writes = [TableWrite(0, slot, 0, self.plan.table_entries(0, own)) for slot, own in self.pages.items()]
        for place, entry in self.tables.places(writes).items():
            self.tables.all.entries[place] = entry

    @torch.inference_mode()
    def step(self, rows: list[StepRow], choose: Callable[[int, torch.Tensor], list[int]], drafts: int = DRAFTS) -> None:
        """Run rows; `choose` says which tokens a row of a slot gets, from the logits of its places. Then draft."""
        staged = self.staging.stage(rows, {}, [], [])
        batch = self.builder.eager(staged)
        hidden, taken = self.model.run(batch)
        first, slots, places = 0, [], []
        for row in rows:
            tokens = (
                choose(row.slot, self.model.compute_logits(hidden[first : first + row.num_tokens]))
                if row.samples
                else []
            )
            last = len(tokens) - 1 if not row.tokens else row.num_tokens - 1
            start = int(self.state.lengths[row.slot]) if not row.tokens else row.start
            if row.samples:
                slots.append(row.slot)
                places.append(first + (row.num_tokens - 1 if row.tokens else 0))
                self.state.lengths[row.slot], self.state.tokens[row.slot] = start + last + 1, tokens[-1]
                self.state.accepted[row.slot] = len(tokens) - 1
            first += row.num_tokens
        slots_S = torch.tensor(slots, dtype=torch.int64)
        computed = Computed(rows, batch, taken, torch.tensor(places, dtype=torch.int64))
        self.drafter.draft(Verified(slots_S[:, None], slots_S, slots_S) if slots else None, drafts, computed)


def _eagle(directory: Path) -> tuple[ModelConfig, Reference]:
    target = make_checkpoint(directory, "qwen3", num_hidden_layers=8, tokenizer=False)
    weights = eagle_weights(EAGLE)
    config = with_drafter(read_model_config(target), "eagle3", str(write_drafter(directory / "head", EAGLE, weights)))
    own = load_file(target / "model.safetensors")
    return config, EagleLayers(weights, EAGLE, own["model.embed_tokens.weight"], own["lm_head.weight"])


def _module(directory: Path) -> tuple[ModelConfig, Reference]:
    path, _ = make_latent_checkpoint(directory, "deepseek_v3")
    fields = json.loads((path / "config.json").read_text())
    weights = deepseek_mtp_weights(fields)
    add_tensors(path, weights, "model.layers.3.", num_nextn_predict_layers=1)
    own = load_file(path / "model.safetensors")
    reference = DeepseekMTP(weights, fields, own["model.embed_tokens.weight"], own["lm_head.weight"])
    return with_drafter(read_model_config(path), "mtp"), reference


def _wanted(model: Any, config: ModelConfig, reference: Reference, tokens: list[int]) -> list[int]:
    """The reference's drafts behind a sequence, from hidden states that another run of the target leaves."""
    count = len(tokens) - 1
    harness = DraftHarness(model, config, 1, whole=True)
    with torch.inference_mode():
        batch = harness.batch([(0, range(count))], torch.tensor(tokens[:-1]))
        taken = model.run(batch)[1].clone()
    return reference.draft(taken, tokens[1:], DRAFTS)[0]


@pytest.mark.parametrize("make", [_eagle, _module])
def test_drafts_are_the_references_whatever_was_accepted(tmp_path: Path, make: Any) -> None:
    config, reference = make(tmp_path)
    engine = Engine(config)
    generator = torch.Generator().manual_seed(3)
    texts = {
        slot: torch.randint(500, (length,), generator=generator).tolist() for slot, length in ((2, 37), (1, 9), (3, 20))
    }
    plan: dict[int, list[int]] = {}

    def choose(slot: int, logits: torch.Tensor) -> list[int]:
        """The tokens that are planned; of a prompt the most likely one."""
        made = plan.get(slot) or [int(logits[-1].argmax())]
        texts[slot] += made
        return made

    def check(slots: list[int]) -> None:
        for slot in slots:
            assert engine.state.drafts[slot].tolist() == _wanted(engine.model, config, reference, texts[slot]), slot

    def row_of(slot: int, count: int) -> StepRow:
        return StepRow(slot, int(engine.state.lengths[slot]), count, [], True)

    whole = dict(texts)
    engine.step([StepRow(2, 0, 16, whole[2][:17], False), StepRow(1, 0, 9, whole[1][:], True)], choose)
    check([1])
    # a row that generates beside pieces of prompts; its drafts: all right, which adds a token that nobody drafted
    right = engine.state.drafts[1].tolist()
    plan[1] = [*right, 77]
    engine.step(
        [row_of(1, 4), StepRow(2, 16, 21, whole[2][16:], True), StepRow(3, 0, 20, whole[3][:], True)],
        choose,
    )
    check([1, 2, 3])
    # one draft right, none right, two right; then rows without drafts, which leave no gap for the ones after
    drafts = {slot: engine.state.drafts[slot].tolist() for slot in (1, 2, 3)}
    plan.update({1: [drafts[1][0], 5], 2: [6], 3: [*drafts[3][:2], 7]})
    engine.step([row_of(slot, 4) for slot in (1, 2, 3)], choose)
    check([1, 2, 3])
    plan.update({1: [8], 2: [9], 3: [10]})
    engine.step([row_of(slot, 1) for slot in (1, 2, 3)], choose, drafts=0)
    plan.update({1: [11], 2: [12], 3: [13]})
    engine.step([row_of(slot, 1) for slot in (1, 2, 3)], choose)
    check([1, 2, 3])


def test_with_nothing_to_draft_only_keys_and_values_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a head costs little while drafts don't pay: no attention, no output projection and no feed-forward."""
    engine = Engine(_eagle(tmp_path)[0])
    targets, calls = 8, list[str]()

    def counted(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: calls.append(name) or made(*args, **named)

    head, (backend,) = engine.model.drafter.layers[0], engine.builder._backends
    ops = backend.ops._asdict()
    looks = {name: counted("attention", ops[name]) for name in ("paged_attention", "projected_attention")}
    monkeypatch.setattr(type(backend), "ops", backend.ops._replace(**looks))
    monkeypatch.setattr(type(head.mlp), "add_to", counted("feed-forward", type(head.mlp).add_to))
    engine.step([StepRow(1, 0, 9, [*range(9)], True)], lambda slot, logits: [3])
    for drafts in (0, 1, 3):
        calls.clear()
        engine.step([StepRow(1, int(engine.state.lengths[1]), 1, [], True)], lambda slot, logits: [4], drafts)
        assert calls.count("attention") == calls.count("feed-forward") == targets + drafts


def test_nothing_is_written_behind_a_slots_pages(tmp_path: Path) -> None:
    """The table's next entry is what an earlier request has left there: another one's page."""
    config, _ = _eagle(tmp_path)
    engine = Engine(config, short={1: 16})
    group = engine.plan.groups[0]
    (page,), others = engine.pages[1], [page for slot in (0, 2, 3) for page in engine.pages[slot]]
    place = engine.tables.places([TableWrite(0, 1, 1, engine.plan.table_entries(0, others[:1]))])
    for at, entry in place.items():
        if at < engine.tables.all.entries.numel() - engine.tables.all.ends_GN.numel():
            engine.tables.all.entries[at] = entry
    before = engine.memory.clone()
    engine.step([StepRow(1, 0, 15, [7] * 15, True)], lambda slot, logits: [9])
    changed = (engine.memory != before).nonzero().flatten() // group.page_bytes
    assert set(changed.tolist()) == {page}
    # the token at position 15 has a page; those of the passes behind it have none
    ends = engine.plan.page_offsets(0, [page])[0]
    assert ends == page * group.page_bytes
