"""The kernel of `kernels/latent/vectors_gluon.py` run as Python: which keys a program reads, and what it makes of them. `tests/gpu` runs it on a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.gluon_programs import Launched
from helpers.vectors_cases import Case, in_published_pages, inputs, with_choice
from pagerunner.bench.shapes import SHAPES
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import RecurrentState
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.kernels.latent import vectors_attention as kernels
from pagerunner.ops.kernels.latent import vectors_fp8_gluon, vectors_gluon
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.sparse_latents import held_in_fp8
from pagerunner.ops.vectors_attention import Slots, Window, vectors_attention
from pagerunner.runner.pages import Pages

DECODE, PREFILL = ((300, 1), (3, 1), (0, 1), (63, 1), (129, 1)), ((0, 70), (37, 1), (101, 33))
FULL = Case(DECODE, window=20, heads=64, size=512, dtype=torch.bfloat16)
CASES = {
    "decode, chosen": replace(FULL, top_k=40),
    "decode, all": FULL,
    "decode, window": replace(FULL, ratio=0, window=128),
    "prefill, chosen": replace(FULL, rows=PREFILL, top_k=9, padding=2),
    "prefill, heavy": replace(FULL, rows=PREFILL, ratio=32),
    "drafts": replace(FULL, rows=((0, 3), (40, 4), (18, 1)), stride=4, padding=4, top_k=5),
}


def angles(x, cos, sin, D, P):
    return tuple((part + torch.arange(P)).load().float() for part in (cos, sin))


def turned(x, cos, sin, D):
    own = [part.expand(len(x), 1, -1).contiguous() for part in (cos, -sin)]
    rope_pairs_(x[:, None, -len(cos) :], RopeAngles(*own))
    return x


def pairs_of_codes(words, factors):
    """Words of two numbers, from words of four codes."""
    codes = words.contiguous().view(torch.float8_e4m3fn).unflatten(1, (-1, 4)).bfloat16()
    numbers = codes * (factors & 0xFFFF).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    return numbers.view(torch.int32).unbind(-1)


def power(largest):
    k = (15 - torch.frexp(largest).exponent).clamp(max=100)
    return k.float(), torch.exp2(k.float())


def launched(monkeypatch: pytest.MonkeyPatch, parts: int, fp8: bool = False, **known: Any) -> Launched:
    known |= {"_back": turned, "_angles": angles, "_power": power, "_of_threads": lambda x, like: x[:, None, None]}
    if fp8:
        known |= {"_factors": lambda x: torch.exp2(x.float() - 127).bfloat16(), "_pairs_of_codes": pairs_of_codes}
    found = Launched(vectors_fp8_gluon if fp8 else vectors_gluon, "vectors_kernel", **known)
    monkeypatch.setattr(kernels, "_gluon", {fp8: SimpleNamespace(vectors_kernel=found)}.__getitem__)
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    monkeypatch.setattr(kernels, "_parts", lambda *_: parts)
    return found


def given(case: Case) -> tuple[Any, ...]:
    (q, window, *others), _ = inputs(case)
    held = window.pages if case.block else window.pages.contiguous()
    return q, window._replace(pages=held), *others


@pytest.mark.days(6)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_twins_results(monkeypatch: pytest.MonkeyPatch, name: str, parts: int) -> None:
    torch.manual_seed(3)
    arguments, plain = given(CASES[name]), launched(monkeypatch, parts)
    want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
    assert plain.programs == arguments[0].shape[0] * parts
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.days(12)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_pages_in_fp8(monkeypatch: pytest.MonkeyPatch, name: str, parts: int) -> None:
    torch.manual_seed(3)
    arguments, coded = given(CASES[name]), launched(monkeypatch, parts, True)
    held, numbers = in_published_pages(arguments)
    want, got = vectors_attention.twin(*numbers), kernels.vectors_attention(*held)
    assert coded.programs == arguments[0].shape[0] * parts
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


def scores(arguments: tuple[Any, ...]) -> torch.Tensor:
    """Of slots that tokens see; behind them is no number."""
    _, _, (_, table, _, (q, weights, _, pages, scales, _), _), rows, *_ = arguments
    entries = table[rows.slots_R[rows.row_T.long()].long()].clamp(min=0)
    keys = pages.float()[entries].flatten(1, 2)
    found = (torch.einsum("tji,tni->tjn", q.float(), keys).relu() * weights.unsqueeze(-1)).sum(1)
    found = found if scales is None else found * scales[entries].flatten(1)
    at = torch.arange(1152)
    found = torch.nn.functional.pad(found, (0, 1152))[:, :1152]
    return torch.where(at < (rows.positions_T.unsqueeze(-1) + 1) // 4, found, float("nan"))


@pytest.mark.days(2)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [((700, 1), (3, 1), (0, 1), (163, 1), (165, 1)), ((4400, 1), (1500, 1))])
def test_a_cluster_chooses_slots_itself(monkeypatch: pytest.MonkeyPatch, rows: Any, fp8: bool) -> None:
    """Of some rows a part, and of some all. The choice of other launches is not asked for, and scores are not read before a program's turn."""
    torch.manual_seed(3)
    arguments = with_choice(given(replace(FULL, rows=rows, window=128)), 40, fp8)
    held, numbers = in_published_pages(arguments) if fp8 else (arguments, arguments)
    scored = torch.full((len(rows), 1152), float("nan"))
    launch = launched(monkeypatch, 2, fp8, wait_turn=lambda PDL: scored.copy_(scores(arguments)))
    want = vectors_attention.twin(*numbers)
    monkeypatch.setattr(Slots, "choose", None)
    told, scratch = [], held[2].chosen.scratch
    monkeypatch.setattr(kernels, "run_scores", lambda *_, early: told.append((early, "scored" in scratch)) or scored)
    got = kernels.vectors_attention(*held)
    assert told == [(False, False)] and scratch["scored"], "the step's next layer has its scores early"
    assert launch.programs == 2 * len(rows)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


def test_other_launches_choose_where_a_cluster_does_not() -> None:
    case = replace(FULL, rows=((700, 1), (1500, 1)), window=128)
    q, window, slots, rows, *_ = with_choice(given(case), 40, False)

    def taken(q: Any = q, window: Any = window, slots: Any = slots, rows: Any = rows, **choice: Any) -> bool:
        return kernels.takes_choice(q, window, slots._replace(chosen=slots.chosen._replace(**choice)), rows)

    table = slots.table_SW
    most = table.shape[1] * slots.pages.shape[1]
    assert taken() and taken(rows=replace(rows, max_seq_len=9)) and taken(top_k=most - 1), (
        "the step's rows may be short"
    )
    assert taken(slots=slots._replace(table_SW=table.repeat(1, 4096 // most)))
    assert not kernels.takes_choice(q, window, slots._replace(chosen=None), rows)
    for reason, change in {
        "too many slots": {"slots": slots._replace(table_SW=table.repeat(1, 4096 // most + 1))},
        "nothing to choose": {"top_k": most},
        "fewer tokens than the window has": {"top_k": 31},
        "a window of other tiles": {"window": window._replace(size=192)},
        "several tokens of a row": {"rows": replace(rows, one_token=False)},
        "two blocks of heads": {"q": q.repeat(1, 2, 1)},
    }.items():
        assert not taken(**change), reason


def test_no_number_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query whose keys are divided among programs."""
    arguments, plain = given(replace(FULL, rows=((63, 1), (9, 1)), ratio=0)), launched(monkeypatch, 2)
    arguments[0][0] = float("nan")
    got = kernels.vectors_attention(*arguments)
    assert plain.programs == 4 and got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_chosen_is_read_in_its_turn(monkeypatch: pytest.MonkeyPatch, parts: int, fp8: bool) -> None:
    """A kernel that begins early finds other numbers until then: of a row whose window has two tiles or more, and of a short one."""
    case = replace(FULL, rows=((400, 1), (90, 1)), window=150, top_k=60)
    arguments = given(case)
    (q, window, slots, *others), numbers = in_published_pages(arguments) if fp8 else (arguments, arguments)
    right = slots.chosen.clone()
    launched(
        monkeypatch,
        parts,
        fp8,
        start_next=lambda PDL: slots.chosen.copy_(torch.where(right >= 0, (right + 7) % 20, right)),
        wait_turn=lambda PDL: slots.chosen.copy_(right),
    )
    want = vectors_attention.twin(*numbers)
    got = kernels.vectors_attention(q, window, slots._replace(early=True), *others)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


@pytest.mark.parametrize(("tokens", "parts"), [(1, 10), (32, 4), (33, 2), (44, 2), (66, 2), (67, 1)])
def test_many_tokens_have_two_parts_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int, parts: int) -> None:
    """Of 640 keys on a device of 132 multiprocessors."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    assert kernels._parts(tokens, 64, 640, kernels.GLUON_TILES, torch.device("cuda")) == parts


@pytest.mark.parametrize("heads", [16, 32, 80])
def test_a_tile_with_fewer_heads(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """What a rank of several has, and a second block that isn't full."""
    torch.manual_seed(3)
    case = replace(FULL, rows=((200, 1), (3, 1)), heads=heads, top_k=40)
    for parts in (1, 3):
        arguments, plain = given(case), launched(monkeypatch, parts)
        want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
        assert plain.programs == 2 * parts * -(-heads // 64)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "rows", "by_gluon"), [(32, ((0, 3),), True), (16, ((0, 3),), False), (16, ((5, 1), (9, 1)), True), (16, ((5, 1),) * 3, False)])  # fmt: skip
@pytest.mark.parametrize("fp8", [False, True])
def test_few_heads_of_many_tokens_go_by_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, heads: int, rows: Any, by_gluon: bool, fp8: bool
) -> None:
    """With numbers in pages: prompts, and large batches. Kernels that aren't there are asked for and nothing else."""
    monkeypatch.setattr(kernels, "MANY_TOKENS", 3)
    arguments, asked = given(replace(FULL, rows=rows, heads=heads, ratio=0)), []
    launched(monkeypatch, 1, fp8)
    for name in ("_launch_gluon", "_attend_kernel"):
        monkeypatch.setattr(kernels, name, Asked(name, asked))
    kernels.vectors_attention(*in_published_pages(arguments)[0] if fp8 else arguments)
    assert asked == ["_launch_gluon" if by_gluon or fp8 else "_attend_kernel"]


class Asked(dict):  # type: ignore[type-arg]
    """Notes that it is called, as a function or with a grid."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def __call__(self, *_: Any, **__: Any) -> None:
        self.asked.append(self.name)

    def __getitem__(self, grid: Any) -> Asked:
        return self


def test_what_does_not_fit_goes_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that begin 8 bytes into a line, few heads, elements of other numbers, float32, and pages in fp8 that copies can't bring."""
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    (q, window, slots, *_), _ = inputs(FULL)
    assert not kernels.by_gluon(q, window, slots)
    q, window, slots, *_ = given(FULL)
    assert kernels.by_gluon(q, window, slots) and kernels.by_gluon(q, window, None)
    held, _ = in_published_pages((q, window, slots))
    assert kernels.by_gluon(*held) and kernels.by_gluon(*held[:2], None)
    assert not kernels.by_gluon(q, held[1], slots), "pages of both kinds"
    for change in ({"heads": 8}, {"size": 256}, {"dtype": torch.float32}, {"block": 56}):
        q, window, slots, *_ = given(replace(FULL, **change))
        assert not kernels.by_gluon(q, window, slots), change


@pytest.mark.parametrize("pages", ["bfloat16", "fp8_e4m3"])
def test_the_pages_of_a_published_model_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: str) -> None:
    """Windows and slots of every layer of DeepSeek-V4-Flash, as an engine lays them out."""
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["deepseek-v4-flash-8e"]))
    specs = read_model_config(tmp_path).layer_specs(pages)
    plan = plan_memory(
        specs, page_tokens=64, budget_bytes=1 << 26, max_model_len=256, model_max_len=256, max_num_seqs=1, max_num_batched_tokens=64
    )  # fmt: skip
    layers = Pages(plan, torch.zeros(plan.kv_bytes, dtype=torch.uint8), poison=False).layers
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    kinds = set()
    for spec, layer in zip(specs, layers, strict=True):
        if isinstance(spec, RecurrentState):
            continue
        coded = held_in_fp8(layer.coded if spec.window else layer)
        held = coded[0] if coded else layer.k.squeeze(2) if spec.window else layer.latent
        if spec.window:
            window = Window(q[:, 0], held, torch.zeros(1, 1), spec.window)
        slots = None if spec.window else Slots(held, torch.zeros(1, 1), spec.compression, None)
        assert kernels.by_gluon(q, window, slots), spec
        kinds.add((spec.window, spec.compression, bool(coded)))
    assert kinds == {(128, 1, bool(coded)), (None, 4, bool(coded)), (None, 128, bool(coded))}
