"""An interrupt, wherever it comes, ends the call it comes in and nothing else: the engine in this process goes on.

Two kinds: real signals at random moments, and a KeyboardInterrupt raised at every line that a step runs, which no signal
handling can put off. After each, a suspended stream and new requests get exactly their tokens, and every page is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pagerunner
from helpers.adapters import random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_directory
from helpers.effort import TEST_DAY, by_days, effort, share_of_the_day
from helpers.patience import LONG
from helpers.recount import recount, recount_adapters
from pagerunner import LLM, LoRARequest, SamplingParams
from pagerunner.engine.core.interrupts import HeldInterrupts
from pagerunner.errors import RequestFailedError
from pagerunner.types import StructuredOutputsParams

SOURCES = str(Path(pagerunner.__file__).parent)
STATEFUL = tuple(os.path.join(SOURCES, room) for room in ("engine", "llm.py", "memory", "runner", "sched"))
TEXT_SIDE = tuple(os.path.join(SOURCES, room) for room in ("llm.py", "engine/frontend"))
PROMPTS = [{"prompt_token_ids": [5 + (number * 7 + index) % 300 for index in range(20)]} for number in range(3)]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 11, "top_k": 40, "top_p": 0.95, "presence_penalty": 0.5},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
}
TOKENS = 4
LAYERS = ["linear_attention", "full_attention"]  # no layer of these is interrupted: only what runs them is


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    made: dict[str, LLM] = {}

    def engine(family: str) -> LLM:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            if family == "qwen3":
                directory = make_checkpoint(directory, family, num_hidden_layers=1)
            else:
                directory = make_hybrid_directory(directory, family, num_hidden_layers=2, layer_types=LAYERS)
            made[family] = LLM(
                str(directory),
                use_tqdm=False,
                max_model_len=64,
                max_num_seqs=4,
                kv_cache_memory_bytes=2**24,
                max_in_flight=2,
                poison_fresh_pages=True,
            )
        return made[family]

    return engine


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def params(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, **SETTINGS[kind], **more)


def generate(llm: LLM, kind: str) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params(kind), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_empty(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.running == stats.waiting == 0
    assert all(group.pages_in_use == 0 for group in stats.groups)
    scheduler = llm._core._scheduler
    recount(scheduler.manager)
    assert sorted(scheduler._state.free_slots) == [0, 1, 2, 3]
    assert llm._outputs.request_ids == []


@contextmanager
def interrupted_at(llm: LLM, step: int, line: int, rooms: tuple[str, ...]) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the `line`-th line, counted from 0, that the `step`-th step runs in `rooms`.

    Yields a list that gets the lines run, as "file:number".
    """
    ran: list[str] = []
    calls = 0
    real = llm._step

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(rooms):
            return None
        if event == "line":
            ran.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(ran) == line + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def step_traced() -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != step:
            return real()
        sys.settrace(trace)
        try:
            return real()
        finally:
            sys.settrace(None)

    llm._step = step_traced  # type: ignore[method-assign]
    try:
        yield ran
    finally:
        sys.settrace(None)
        del llm._step  # type: ignore[method-assign]


def count_lines(llm: LLM, kind: str, step: int, rooms: tuple[str, ...]) -> list[str]:
    stream = llm.stream(PROMPTS[0], params(kind, output_kind="delta"))
    next(stream)
    with interrupted_at(llm, step, -2, rooms) as ran:
        generate(llm, kind)
    stream.close()
    return ran


def try_line(llm: LLM, kind: str, step: int, line: int, rooms: tuple[str, ...], expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], params(kind, output_kind="delta"))
    tokens = list(next(stream).outputs[0].token_ids)
    with interrupted_at(llm, step, line, rooms) as ran:
        try:
            generate(llm, kind)
        except KeyboardInterrupt:
            pass
        else:
            assert len(ran) <= line  # a few lines depend on what is cached
    where = ran[-1]
    try:
        rest = list(stream)
    except RequestFailedError:  # text is made here: how far the stream's has come can't be known, and it says so
        assert where.startswith(TEXT_SIDE), where
    else:
        tokens += [token for output in rest for token in output.outputs[0].token_ids]
        assert tokens == expected[0], where
    check_empty(llm)
    assert generate(llm, kind) == expected, where
    check_empty(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where


CASES = [
    (family, kind, step)
    for family, kind in (("qwen3", "greedy"), ("qwen3", "sampled"), ("qwen3", "scored"), ("qwen3_next", "greedy"))
    for step in (0, 2)  # with prompts, and decoding alone
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_an_interrupt_at_any_line_of_a_step_ends_the_call_and_nothing_else(
    engines: Callable[[str], LLM], case: int
) -> None:
    """Each case tries this day's share of the lines that a step runs; `make test-thorough` tries all."""
    family, kind, step = CASES[case]
    llm = engines(family)
    expected = generate(llm, kind)
    ran = count_lines(llm, kind, step, STATEFUL)
    assert len(ran) > 300
    for line in share_of_the_day(len(ran), 24 * len(CASES), case):
        try:
            try_line(llm, kind, step, line, STATEFUL, expected)
        except BaseException as error:
            error.add_note(
                f"The interrupt came at line {line} of {len(ran)}. PAGERUNNER_TEST_DAY={TEST_DAY} repeats it."
            )
            raise


def test_an_interrupt_at_any_line_of_the_work_on_adapters_ends_the_call_and_nothing_else(tmp_path: Path) -> None:
    """Three adapters take turns in one slot. Lines of each step of the call that brings them there, some on each day."""
    rooms = tuple(os.path.join(SOURCES, one) for one in ("engine/core/adapters.py", "sched/adapters.py"))
    base = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    loras = [LoRARequest(f"n{n}", 1, str(random_adapter(base, tmp_path / str(n), rank=2, seed=n))) for n in range(3)]
    llm = LLM(
        str(base), use_tqdm=False, max_model_len=64, max_num_seqs=4, enable_lora=True, max_lora_rank=8, block_size=32
    )

    def answers() -> list[list[int]]:
        outputs = llm.generate(PROMPTS, params("greedy"), use_tqdm=False, lora_request=loras)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected, lines = answers(), list[tuple[int, int]]()
    assert answers() == expected
    for step in range(10):
        with interrupted_at(llm, step, -2, rooms) as ran:
            answers()
        lines += [(step, line) for line in range(len(ran))]
    assert len(lines) > 300
    for step, line in map(lines.__getitem__, share_of_the_day(len(lines), 72)):
        with interrupted_at(llm, step, line, rooms) as ran, contextlib.suppress(KeyboardInterrupt):
            answers()
        assert answers() == expected, ran[-1]
        recount_adapters(llm._core.adapters.books, [])
        check_empty(llm)


def send_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_in_main_thread() -> None:
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))


def interrupted_work(work: Callable[[], object], interrupt: Callable[[], None], moments: list[float]) -> int:
    """Work again and again until `interrupt` was called at all the moments (seconds from the begin); how many arrived."""
    begin = threading.Event()

    def run() -> None:
        begin.wait()
        for pause in moments:
            time.sleep(pause)
            interrupt()

    thread = threading.Thread(target=run)
    thread.start()
    arrived = 0
    while True:
        try:
            begin.set()
            while thread.is_alive():
                work()
            for _ in range(20):  # one that was raised by other means than a signal may still be on its way
                time.sleep(0.001)
            return arrived
        except KeyboardInterrupt:
            arrived += 1


@pytest.mark.parametrize(("interrupt", "times"), by_days([send_ctrl_c, raise_in_main_thread], [1, 2]))
def test_interrupts_at_random_moments(engines: Callable[[str], LLM], interrupt: Callable[[], None], times: int) -> None:
    llm = engines("qwen3")
    expected = generate(llm, "sampled")
    moments = random.Random(7)
    long = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)

    def read_stream() -> None:
        for _ in llm.stream(PROMPTS[1], long):
            pass

    for trial in range(effort(4, 24)):
        held = llm.stream(PROMPTS[0], params("sampled", output_kind="delta"))
        tokens = list(next(held).outputs[0].token_ids)
        work = read_stream if trial % 2 else lambda: llm.generate(PROMPTS, long, use_tqdm=False)
        assert interrupted_work(work, interrupt, [moments.uniform(0.004, 0.05) for _ in range(times)]) > 0
        with contextlib.suppress(RequestFailedError):  # it says so when an interrupt came while its text was made
            tokens += [token for output in held for token in output.outputs[0].token_ids]
            assert tokens == expected[0]
        gc.collect()  # generators that the interrupt has left
        check_empty(llm)
        assert generate(llm, "sampled") == expected


def test_after_ctrl_c_the_prefix_cache_is_what_it_was(engines: Callable[[str], LLM]) -> None:
    llm = engines("qwen3")
    prompt = {"prompt_token_ids": list(range(100, 148))}
    llm.generate(prompt, params("greedy"), use_tqdm=False)
    assert interrupted_work(lambda: llm.generate(PROMPTS, params("greedy"), use_tqdm=False), send_ctrl_c, [0.02]) == 1
    [output] = llm.generate(prompt, params("greedy"), use_tqdm=False)
    assert output.num_cached_tokens == 32


def test_counts_go_on_after_an_interrupt(engines: Callable[[str], LLM]) -> None:
    llm = engines("qwen3")
    generate(llm, "greedy")
    before = llm.stats()
    with interrupted_at(llm, 1, 100, STATEFUL), pytest.raises(KeyboardInterrupt):
        generate(llm, "greedy")
    generate(llm, "greedy")
    after = llm.stats()
    for name in ("prefix_queries_total", "prefix_hits_total", "steps_total", "generation_tokens_total"):
        assert getattr(after, name) > getattr(before, name) or name == "prefix_hits_total"
    assert after.prefix_hits_total >= before.prefix_hits_total


def test_a_held_interrupt_calls_the_handler_that_was_set_at_the_end_and_a_second_one_at_once() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append("handler"))
    try:
        ours = signal.getsignal(signal.SIGINT)
        with HeldInterrupts():
            send_ctrl_c()
            calls.append("work")
        assert calls == ["work", "handler"]
        assert signal.getsignal(signal.SIGINT) is ours
        with HeldInterrupts():
            send_ctrl_c()
            send_ctrl_c()
            calls.append("more work")
        assert calls[2:] == ["handler", "more work"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with HeldInterrupts():
            send_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_threads_at_once_are_refused_and_the_first_goes_on(engines: Callable[[str], LLM]) -> None:
    llm = engines("qwen3")
    expected = generate(llm, "greedy")
    found: list[list[list[int]]] = []
    inside, go_on = threading.Event(), threading.Event()
    run = llm._core._executor.run

    def slow_run(plan: Any) -> Any:
        inside.set()
        assert go_on.wait(LONG)
        return run(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._core._executor, "run", slow_run)
        thread = threading.Thread(target=lambda: found.append(generate(llm, "greedy")))
        thread.start()
        assert inside.wait(LONG)
        with pytest.raises(RuntimeError, match="one thread at a time"):
            generate(llm, "greedy")
        go_on.set()
        thread.join()
    assert found == [expected]
    check_empty(llm)


def test_in_another_thread_there_is_nothing_to_hold(engines: Callable[[str], LLM]) -> None:
    llm = engines("qwen3")
    expected = generate(llm, "greedy")
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(generate(llm, "greedy")))
    thread.start()
    thread.join()
    assert found == [expected]


def test_an_interrupt_leaves_no_grammar_that_seems_waited_for() -> None:
    """A grammar that no request waits for any more is not compiled. So the books of who waits must survive an interrupt."""

    def guided(regex: str) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex=regex), output_kind="delta"
        )

    llm = LLM("demo", use_tqdm=False, max_model_len=64, kv_cache_memory_bytes=2**24)
    waiting = llm._core._scheduler._state.guided._make_guide._waiting  # type: ignore[union-attr]
    stream = llm.stream("Hello", guided("[a-z]{9}"))
    tokens = list(next(stream).outputs[0].token_ids)
    [kept] = waiting
    for _ in range(2):
        interrupted = Interrupted(llm._core._scheduler)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hi", guided("[0-9]{9}"), use_tqdm=False)
        assert interrupted.calls == 1 and dict(waiting) == {kept: 1}
    tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert not waiting
    [whole] = llm.generate("Hello", guided("[a-z]{9}"), use_tqdm=False)
    assert tokens == list(whole.outputs[0].token_ids) and not waiting


class Interrupted:
    """Interrupts a scheduler in its next commit."""

    def __init__(self, scheduler: Any) -> None:
        self.calls = 0
        scheduler.commit = self.commit

    def commit(self, *_: object) -> None:
        self.calls += 1
        raise KeyboardInterrupt
