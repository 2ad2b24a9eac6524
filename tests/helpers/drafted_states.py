"""Requests whose steps have drafts, before recurrent layers: what was accepted is decided here, at random. The reference takes one token a step.

A request's inputs are made beforehand. Of a step's drafts the accepted ones are the request's next inputs, the others are anything.
So the outputs at accepted tokens, and the state that the page has, must be those of plain decoding, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from helpers.recurrent_cases import Memory, Step, close
from pagerunner.attention import recurrent
from pagerunner.attention.base import PlanInputs
from pagerunner.attention.calls import RecurrentCall, Tensors
from pagerunner.attention.compressed import SlotPooling
from pagerunner.attention.recurrent import GatedDelta, Mamba2
from pagerunner.batch import GroupBatch, StatePages, StepRows, WritePlaces
from pagerunner.memory.memory_plan import LayerSlice
from pagerunner.memory.specs import RecurrentState
from pagerunner.ops.causal_conv import journaled_conv_rows
from pagerunner.ops.gdn import gated_delta_rows
from pagerunner.ops.mamba2 import mamba2_rows
from pagerunner.runner.pages import TORCH_DTYPES, recurrent_view
from pagerunner.types import StateSave

PAGES, SLOTS = 24, 9
DRAFTED = {
    "drafts in places": Step((3, 1, 4, 2), ((0, 0), (0, 1), (1, 1), (1, 2), (2, -1)), (1, 0), 3, (2, 0, 3, 1), 4),
    "drafts beside prompts": Step(
        (4, 1, 9, 75, 3, 2), ((0, 1), (0, 3), (2, 9), (3, 64), (3, 7), (5, 0), (5, 3)), (1, 3), 5, (2, 5, -1, -1, -1, 0)
    ),
    "one token and none": Step((1, 1, 1), (), (1, 1), 3, (3, 0, 1)),
}
"""Steps with drafts: rows of all numbers of them and of accepted ones, saves that rows pass and others, padding."""


def drafted_step(rows: int, drafts: int, *, strided: bool) -> Step:
    """A step of rows that generate, with any numbers of drafts and of accepted ones, padding, and a save in every third row."""
    rng = random.Random(rows + drafts)
    lengths = tuple(rng.randint(1, 1 + drafts) for _ in range(rows))
    accepted = tuple(rng.randint(0, drafts) for _ in range(rows))
    saves = tuple((row, rng.randint(1 - accepted[row], 1)) for row in range(0, rows, 3))
    return Step(lengths, saves, (2, 0) if strided else (2, 5), drafts, accepted, 1 + drafts if strided else 0)


def layers(dtype: str, heads: int = 32) -> dict[str, tuple[Any, RecurrentState]]:
    """Small layers of each kind, with states in `dtype` and inputs in float32.

    torch computes the last few of a tensor's numbers in another way. With 32 heads, and with 96 channels, a row's numbers don't depend
    on how many rows there are. Kernels have no such need.
    """
    torch.manual_seed(5)
    channels = 32 + 2 * heads
    delta = GatedDelta(torch.randn(channels, 4), torch.rand(heads), torch.randn(heads), 2, 8, 2)
    each = torch.rand(heads), torch.randn(heads), torch.randn(heads)
    mamba = Mamba2(torch.randn(channels, 3), torch.randn(channels), *each, 2, 1, 16)
    pooling = SlotPooling((torch.randn(4, 6), torch.randn(4, 4)), overlap=True)
    two, entry = (dtype, dtype), {"entry_dtype": "float32"}
    return {
        "gated delta": (
            delta,
            RecurrentState(((3, channels), (heads, 8, 2)), two, entry=((channels,), (heads,), (heads,)), **entry),
        ),
        "mamba2": (
            mamba,
            RecurrentState(((2, channels), (heads, 2, 16)), two, entry=((channels,), (heads,)), **entry),
        ),
        "slot pooling": (pooling, RecurrentState(((8, 12), (8, 8)), two, entry=((12,), (8,)), **entry)),
    }


@dataclass
class Request:
    """`done` positions are in the page or, the last `accepted` of them, in the journal. `passed`: positions whose states the page has had."""

    inputs: Tensors
    slot: int
    page: int
    prompt: int
    done: int = 0
    accepted: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)  # pages by position
    saved: list[int] = field(default_factory=list)

    @property
    def generates(self) -> bool:
        """Whether its next token was sampled."""
        return self.done >= self.prompt


class Drafted:
    """A layer, its backend and its pages, all of which are NaN until a request takes them."""

    def __init__(
        self, layer: Any, spec: RecurrentState, backend: Any, drafts: int, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.layer, self.backend, self.drafts, self.device = layer, backend, drafts, device
        self.random = random.Random(seed)
        self.spec = replace(spec, journal=drafts)
        self.unit = -(-self.spec.page_bytes(1) // 16) * 16
        group: Any = type("Group", (), {"page_bytes": self.unit, "unit": self.unit})
        self.bytes = torch.full((PAGES, self.unit), 0xFF, dtype=torch.uint8, device=device)
        self.pages: StatePages = recurrent_view(self.bytes.flatten(), group, 0, LayerSlice(0, self.spec, 0))
        self.table = torch.zeros(SLOTS, 1, dtype=torch.int64, device=device)
        self.free, self.slots = list(range(1, PAGES)), list(range(SLOTS))
        self.random.shuffle(self.free)
        self.random.shuffle(self.slots)
        self.tamper: Callable[[Drafted, list[tuple[Request, int]], StepRows], StepRows] = lambda _, __, rows: rows

    def start(self, inputs: Tensors, prompt: int) -> Request:
        """A request with a zeroed page."""
        request = Request(inputs, self.slots.pop(), self.free.pop(), prompt)
        self.bytes[request.page] = 0
        for journal in self.pages.journal:
            journal[request.page] = float("nan")
        self.table[request.slot] = request.page
        return request

    def resume(self, request: Request, position: int) -> Request:
        """A request that begins with the other's snapshot after `position` tokens, and computes one more token of its prompt."""
        found = Request(request.inputs, self.slots.pop(), self.free.pop(), position + 1, position)
        self.bytes[found.page] = self.bytes[request.saves[position]]
        self.table[found.slot] = found.page
        found.outputs = request.outputs[:position]
        return found

    def end(self, request: Request) -> None:
        """The slot and the page are free; the page keeps what it had."""
        self.slots.insert(0, request.slot)
        self.free.insert(0, request.page)

    def move(self, request: Request) -> None:
        """The page moves, as when scattered pages are moved together."""
        target = self.free.pop()
        self.bytes[target] = self.bytes[request.page]
        self.bytes[request.page] = 0xFF
        self.free.insert(0, request.page)
        request.page = target
        self.table[request.slot] = target

    def save(self, request: Request, position: int) -> None:
        """Keep the state after `position` tokens in a page of NaN."""
        request.saves[position] = self.free.pop()
        self.bytes[request.saves[position]] = 0xFF

    def state(self, page: int) -> Tensors:
        """Copies of a page's states."""
        return tuple(states[page].clone() for states in self.pages.states)

    def step(self, work: list[tuple[Request, int]], stride: int = 0, padding: tuple[int, int] = (0, 0)) -> None:
        """Run so many tokens of each request. Of those that generate the first is certain, and it is decided here which drafts are accepted."""
        counts = [count for _, count in work]
        starts = [request.done for request, _ in work]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        slots = [request.slot for request, _ in work]
        rows, real = self._rows(
            work,
            StepRows.of(
                [*counts, *[0] * padding[0]], [*ends, *[0] * padding[0]], [*slots, *[0] * padding[0]], self.device
            ),
            stride,
            padding,
        )
        next_accepted = [self.random.randint(0, count - 1) if request.generates else 0 for request, count in work]
        parts = [torch.randn(rows.num_tokens, *x.shape[1:]).to(x) for x in work[0][0].inputs]
        place = 0
        for (request, count), accepted in zip(work, next_accepted, strict=True):
            true = 1 + accepted if request.generates else count
            for part, x in zip(parts, request.inputs, strict=True):
                part[real[place : place + true]] = x[request.done : request.done + true]
            place += count
        saves = [
            StateSave(row, position, 0, page * self.unit)
            for row, (request, _) in enumerate(work)
            for position, page in request.saves.items()
            if position <= ends[row]
        ]
        rows = self.tamper(self, work, rows)
        inputs = PlanInputs(rows, counts, ends, slots, self.table, 16, None, saves)
        plan = self.backend.plan(inputs, self.backend.new_state(None))
        none = torch.zeros_like(rows.positions_T)
        group = GroupBatch(self.table, WritePlaces(none, none), 16, self.backend, plan)
        out = self.backend.run(RecurrentCall(self.layer, tuple(parts), self.pages, group, rows))
        assert bool(out.isfinite().all()), "padding and rejected drafts have finite outputs"
        place = 0
        for (request, count), accepted in zip(work, next_accepted, strict=True):
            true = 1 + accepted if request.generates else count
            request.outputs += list(out[real[place : place + true]])
            place += count
            certain = request.done + (1 if request.generates else count)
            request.saved += [
                position for position in request.saves if position <= certain and position not in request.saved
            ]
            request.done, request.accepted = request.done + true, accepted

    def _rows(
        self, work: list[tuple[Request, int]], rows: StepRows, stride: int, padding: tuple[int, int]
    ) -> tuple[StepRows, torch.Tensor]:
        total = stride * rows.num_rows if stride else rows.num_tokens + padding[1]
        real = torch.arange(rows.num_tokens, device=self.device)
        if stride:
            real = torch.cat([real[:count] + row * stride for row, (_, count) in enumerate(work)])
        row_T = torch.full((total,), -1, dtype=torch.int32, device=self.device)
        positions_T = torch.zeros(total, dtype=torch.int64, device=self.device)
        row_T[real], positions_T[real] = rows.row_T, rows.positions_T
        accepted = [request.accepted if request.generates else -1 for request, _ in work] + [3] * padding[0]
        start = rows.query_start_R1
        if stride:
            start = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=self.device) * stride
        return replace(
            rows,
            query_start_R1=start,
            row_T=row_T,
            positions_T=positions_T,
            one_token=rows.one_token and not stride and not padding[1],
            accepted_R=torch.tensor(accepted, dtype=torch.int32, device=self.device) if self.drafts else None,
            stride=stride,
        ), real


def reference(
    layer: Any, spec: RecurrentState, backend: Any, inputs: Tensors, prompt: int, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[Tensors]]:
    """Outputs and states of plain decoding: the prompt in one step, then one token a step, without a journal."""
    plain = Drafted(layer, spec, backend, 0, device=device)
    request = plain.start(inputs, prompt)
    plain.step([(request, prompt)])
    states: list[Tensors] = [()] * prompt + [plain.state(request.page)]
    while request.done < len(inputs[0]):
        plain.step([(request, 1)])
        states.append(plain.state(request.page))
    return request.outputs, states


def run(
    layer: Any,
    spec: RecurrentState,
    backend: Any,
    *,
    drafts: int,
    seed: int,
    tamper: Any = None,
    steps: int = 60,
    length: int = 40,
    device: str = "cpu",
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
) -> None:
    """Requests that come and go, with drafts in most steps; each against its reference. What is found must be the `same`."""
    world = Drafted(layer, spec, backend, drafts, seed, device)
    world.tamper = tamper or world.tamper
    rand = world.random
    torch.manual_seed(seed)
    live: list[tuple[Request, list[torch.Tensor], list[Tensors]]] = []
    for _ in range(steps):
        while len(live) < 4 and rand.random() < 0.7:
            dtype = TORCH_DTYPES[spec.entry_dtype]
            inputs = tuple(torch.randn(length, *shape).to(device, dtype) for shape in spec.entry)
            prompt = rand.choice((1, 2, 5, 8))
            wanted = reference(layer, spec, backend, inputs, prompt, device)
            live.append((world.start(inputs, prompt), *wanted))
            for position in rand.sample(range(prompt, length - drafts), 2):
                world.save(live[-1][0], position)
        work = [
            (request, 1 + rand.randint(0, drafts) if request.generates else request.prompt - request.done)
            for request, *_ in live
        ]
        work = rand.sample(work, rand.randint(1, len(work))) if work else work
        if not work:
            continue
        if all(request.generates for request, _ in work) and rand.random() < 0.6:
            world.step(work, stride=1 + drafts, padding=(rand.randint(0, 2), 0))
        else:
            world.step(work, padding=rand.choice(((0, 0), (1, 3))))
        for request, outputs, states in list(live):
            for position, (found, want) in enumerate(zip(request.outputs, outputs, strict=False)):
                counts = not isinstance(layer, SlotPooling) or (position + 1) % len(layer.biases[0]) == 0
                assert same(found, want) or not counts, f"the outputs at {position}"
            for position, page in request.saves.items():
                held = world.state(page)
                assert all(bool(part.isnan().all()) for part in held) != (position in request.saved), (
                    "a state is saved when the page passes it"
                )
                if position in request.saved:
                    assert all(map(same, held, states[position])), f"the state saved at {position}"
            if request.generates and request.done - request.accepted > request.prompt:
                held = world.state(request.page)
                assert all(map(same, held, states[request.done - request.accepted])), "the state that the page has"
            if rand.random() < 0.2:
                world.move(request)
            if request.saved and len(live) < 5 and rand.random() < 0.1:
                live.append((world.resume(request, rand.choice(request.saved)), outputs, states))
            if request.done > length - 1 - drafts or rand.random() < 0.02:
                live = [one for one in live if one[0] is not request]
                for page in request.saves.values():
                    world.free.insert(0, page)
                world.end(request)


def compare_drafts(
    layer: Any,
    spec: RecurrentState,
    step: Step,
    dtype: torch.dtype,
    device: str,
    tolerance: float,
    kept: torch.dtype = torch.float32,
) -> None:
    """The kernels of a layer against their twins, in a step with drafts: outputs, states, saves, and journals bit by bit.

    The convolution's state is in float16, the other in `kept`, inputs are in `dtype`.
    """
    torch.manual_seed(1)
    sizes = [size for (size,) in spec.entry]
    inputs = (
        torch.randn(step.tokens, sum(sizes) + 5).to(device, dtype)[:, 5:].split(sizes, -1)
    )  # as slices of one projection
    shapes = [*spec.shapes, *((step.drafts, *shape) for shape in spec.entry)]
    dtypes = [torch.float16, kept, *[dtype] * len(inputs)]
    outs, memories = [], [Memory(step, shapes, dtypes, device) for _ in range(2)]
    for memory, version in zip(memories, ("kernel", "twin"), strict=True):
        pages = StatePages(0, tuple(memory.states[:2]), tuple(memory.states[2:]))
        with pytest.MonkeyPatch.context() as patch:
            for op in (journaled_conv_rows, gated_delta_rows, mamba2_rows):
                patch.setattr(recurrent, op.__name__, getattr(op, version))
            outs.append(layer.rows(inputs, pages, memory.rows))
    assert bool(outs[0].isfinite().all())
    close(outs[0][step.real], outs[1][step.real], tolerance)
    for at, (found, want) in enumerate(zip(memories[0].states, memories[1].states, strict=True)):
        assert torch.equal(found.isnan(), want.isnan())
        close(found.nan_to_num(), want.nan_to_num(), 0 if at > 1 else tolerance)
