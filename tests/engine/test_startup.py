"""Coming up on a card: what is measured becomes pages, within the card's share; shown with a fake driver on the CPU."""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.fake_driver import FakeDriver, fake_card
from pagerunner.bench.workloads import write_model
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.base import Started
from pagerunner.engine.startup import measure
from pagerunner.engine.startup import resolve as resolving
from pagerunner.engine.startup.build import build_from, build_on
from pagerunner.engine.startup.machine import CudaFacts, DeviceMemory, device_memory, resolve_device
from pagerunner.engine.startup.measure import MemoryFacts, StartMeter, final_plan
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker import card as card_of_worker
from pagerunner.engine.worker.build import kernels_name
from pagerunner.engine.worker.worker import LoadedWorker, load_worker
from pagerunner.errors import CapacityError, ConfigError, EngineSleepingError
from pagerunner.types import EngineRequest, SamplingParams

MIB = 2**20
CARD = DeviceMemory(total=64 * MIB, free=60 * MIB)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("startup"), "qwen3"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    """A machine with a small card, whose driver hands out all of it."""
    monkeypatch.setattr(measure, "DRIVER_BYTES", 0)
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: "cpu" if asked == "cpu" else "cuda")
    monkeypatch.setattr(resolving, "device_memory", lambda **_: CARD)
    return CARD


def on_card(checkpoint: str, **wanted: object) -> tuple[Resolved, FakeDriver]:
    """A resolved configuration for the card, to be run on the CPU over a fake driver."""
    # Steps of 256 tokens: a start tries its largest step, and a card's usual one takes the CPU seconds.
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "dtype": "float32",
        "enable_sleep_mode": True,
        **wanted,
    }
    resolved = resolve(EngineArgs(model=checkpoint, **settings))  # type: ignore[arg-type]
    driver = FakeDriver(CARD.total)
    driver.others = CARD.total - CARD.free
    return replace(resolved, config=msgspec.structs.replace(resolved.config, device="cpu")), driver


def generate(core: EngineCore, prompt: list[int], count: int = 12) -> list[int]:
    core.add(
        EngineRequest(
            request_id="r",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
            seed=0,
            max_tokens=count,
        )
    )
    tokens: list[int] = []
    while core.has_work:
        for update in core.step():
            tokens += update.new_token_ids
    return tokens


def test_defaults_on_a_card_are_the_checkpoints_dtype_large_steps_and_two_in_flight(
    card: DeviceMemory, checkpoint: str
) -> None:
    config = resolve(EngineArgs(model=checkpoint, max_num_seqs=4)).config
    assert (config.device, config.max_num_batched_tokens, config.max_in_flight) == ("cuda", 8192, 2)
    assert config.dtype == resolve(EngineArgs(model=checkpoint, max_num_seqs=4)).model.dtype


@pytest.mark.parametrize(
    ("shape", "gib", "offline", "settings", "tokens"),
    [
        ("qwen3-30b-a3b", 80, True, {"quantization": "fp8", "activation_quantization": "none"}, 16_384),
        ("qwen3-30b-a3b", 80, False, {"quantization": "fp8", "activation_quantization": "none"}, 8_192),
        ("qwen3-30b-a3b", 64, True, {"quantization": "fp8", "activation_quantization": "none"}, 8_192),
        ("qwen3-30b-a3b", 80, True, {"quantization": "fp8", "activation_quantization": "none", "gpu_memory_utilization": 0.6}, 8_192),
        ("qwen3-30b-a3b", 80, True, {}, 8_192),
        ("qwen3-8b", 80, True, {"quantization": "fp8", "activation_quantization": "none"}, 8_192),
        ("qwen3-30b-a3b", 80, True, {"quantization": "fp8", "activation_quantization": "none", "max_num_batched_tokens": 512}, 512),
    ],
)  # fmt: skip
def test_offline_steps_are_larger_where_experts_are_unpacked_and_there_is_room(
    card: DeviceMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    gib: int,
    offline: bool,
    settings: dict[str, object],
    tokens: int,
) -> None:
    monkeypatch.setattr(resolving, "device_memory", lambda **_: DeviceMemory(gib * 2**30, gib * 2**30))
    args = EngineArgs(model=str(write_model(shape, tmp_path)), max_num_seqs=4, max_model_len=4096, **settings)  # type: ignore[arg-type]
    assert resolve(args, offline=offline).config.max_num_batched_tokens == tokens


@pytest.mark.parametrize("utilization", [0.3, 0.9, 1.0])
def test_pages_take_what_is_left_of_the_share_and_never_more_than_is_free(
    card: DeviceMemory, checkpoint: str, utilization: float
) -> None:
    resolved, driver = on_card(checkpoint, gpu_memory_utilization=utilization)
    core = build_from(resolved, card=fake_card(driver))
    plan = core.memory_plan
    granularity = driver.granularity
    most = min(CARD.free, int(CARD.total * utilization))
    estimated = resolved.plan.other_bytes - dict(plan.other)["weights"]  # tables and such, which the fake doesn't hold
    least = most - estimated - plan.groups[0].page_bytes
    assert least < driver.used <= most + granularity
    assert driver.used - granularity < plan.kv_bytes + dict(plan.other)["weights"] <= driver.used
    assert core.startup.memory["free"] == driver.memory()[0]
    assert {"config", "weights", "pages"} <= core.startup.seconds.keys()


def test_what_the_driver_needs_for_itself_is_left_to_it(
    card: DeviceMemory, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "DRIVER_BYTES", 8 * MIB)
    resolved, driver = on_card(checkpoint, gpu_memory_utilization=1.0)
    core = build_from(resolved, card=fake_card(driver))
    page = core.memory_plan.groups[0].page_bytes
    assert 8 * MIB - driver.granularity <= driver.memory()[0] < 8 * MIB + page + driver.granularity


def test_tokens_over_mapped_memory_are_those_of_the_cpu(card: DeviceMemory, checkpoint: str) -> None:
    prompt = list(range(40, 90))
    expected = generate(build_from(resolve(EngineArgs(model=checkpoint, device="cpu"), 256 * MIB)), prompt)
    resolved, driver = on_card(checkpoint)
    assert generate(build_from(resolved, card=fake_card(driver)), prompt) == expected


def test_an_automatic_length_follows_what_is_really_free(card: DeviceMemory, checkpoint: str) -> None:
    resolved, driver = on_card(checkpoint, max_model_len="auto", gpu_memory_utilization=1.0)
    roomy = build_from(resolved, card=fake_card(driver)).memory_plan
    resolved, driver = on_card(checkpoint, max_model_len="auto", gpu_memory_utilization=1.0)
    weights = dict(resolved.plan.other)["weights"]
    # another process came meanwhile
    driver.others = CARD.total - weights - 24 * resolved.plan.groups[0].page_bytes - 4096
    core = build_from(resolved, card=fake_card(driver))
    assert (roomy.max_model_len, core.memory_plan.max_model_len) == (2048, 24 * 16)


def test_a_given_length_that_does_not_fit_in_the_end_names_the_longest(card: DeviceMemory, checkpoint: str) -> None:
    resolved, driver = on_card(checkpoint, gpu_memory_utilization=1.0)
    weights = dict(resolved.plan.other)["weights"]
    driver.others = CARD.total - weights - 24 * resolved.plan.groups[0].page_bytes - 4096
    with pytest.raises(CapacityError, match="longest length that fits is"):
        build_from(resolved, card=fake_card(driver))


@pytest.mark.parametrize("fixed", [{"num_gpu_blocks_override": 200}, {"kv_cache_memory_bytes": 8 * MIB}])
def test_pages_asked_for_by_number_or_bytes_are_exactly_these(
    card: DeviceMemory, checkpoint: str, fixed: dict[str, int]
) -> None:
    resolved, driver = on_card(checkpoint, gpu_memory_utilization=0.1, **fixed)
    plan = build_from(resolved, card=fake_card(driver)).memory_plan
    assert plan.num_slabs == resolved.plan.num_slabs
    assert plan.num_gpu_blocks == 200 or 8 * MIB - plan.slab_bytes < plan.kv_bytes <= 8 * MIB
    resolved, driver = on_card(checkpoint, **fixed)
    driver.others = CARD.total - dict(resolved.plan.other)["weights"] - MIB
    with pytest.raises(CapacityError, match="pages asked for"):
        build_from(resolved, card=fake_card(driver))


def test_more_bytes_of_pages_than_there_are_free_are_refused_before_anything_is_loaded(
    card: DeviceMemory, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = r"kv_cache_memory_bytes={} asks for .* GiB of pages, but of the 0.06 GiB there are, .*; lower it to (\d+)\."
    with pytest.raises(CapacityError, match=asks.format(2**50)) as caught:
        resolve(EngineArgs(model=checkpoint, kv_cache_memory_bytes=2**50))
    most = int(str(caught.value).split()[-1].rstrip("."))
    assert CARD.free * 0.9 < most < CARD.free
    resolve(EngineArgs(model=checkpoint, kv_cache_memory_bytes=most))


def test_a_cpu_without_the_memory_asked_for_says_what_to_lower(checkpoint: str) -> None:
    resolved = resolve(EngineArgs(model=checkpoint, device="cpu", kv_cache_memory_bytes=2**50))
    with pytest.raises(CapacityError, match=r"1024\.00 TiB of host memory .* pages .*lower kv_cache_memory_bytes"):
        build_from(resolved)


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(card: DeviceMemory, checkpoint: str) -> None:
    with pytest.raises(CapacityError, match=r"weights .*gpu_memory_utilization=0.01 .*60.00 MiB of which are free"):
        resolve(EngineArgs(model=checkpoint, gpu_memory_utilization=0.01))


def test_what_is_not_pages_may_leave_no_room(card: DeviceMemory, checkpoint: str) -> None:
    plan = resolve(EngineArgs(model=checkpoint, max_num_seqs=4)).plan
    with pytest.raises(CapacityError, match=r"0.9 of the device's 64.00 MiB .*64.00 MiB of graphs.*no room for pages"):
        final_plan(plan, [facts_of(0, {"graphs": 64 * MIB}, free=0)], 0.9, fixed=False, auto=False)


def facts_of(rank: int, taken: dict[str, int], free: int) -> MemoryFacts:
    return MemoryFacts(rank=rank, total=CARD.total, free=free, taken={**taken, "pages": 0})


@pytest.mark.parametrize("fullest", [0, 1, 2])
@pytest.mark.parametrize("why", ["graphs", "another process"])
def test_several_ranks_get_one_plan_for_the_fullest_of_their_devices(
    card: DeviceMemory, checkpoint: str, fullest: int, why: str
) -> None:
    resolved, _ = on_card(checkpoint, gpu_memory_utilization=1.0, max_model_len=256)
    ranks = [facts_of(rank, {"weights": MIB}, 60 * MIB) for rank in range(3)]
    if why == "graphs":
        ranks[fullest] = facts_of(fullest, {"weights": MIB, "graphs": 20 * MIB}, 60 * MIB)
    else:
        ranks[fullest] = facts_of(fullest, {"weights": MIB}, 40 * MIB)
    settings = {"fixed": False, "auto": False}
    plan = final_plan(resolved.plan, ranks, 1.0, **settings)
    assert plan == final_plan(resolved.plan, [ranks[fullest]], 1.0, **settings)
    assert plan.kv_bytes < final_plan(resolved.plan, [ranks[fullest - 1]], 1.0, **settings).kv_bytes
    assert ("graphs", 20 * MIB) in plan.other or why != "graphs"


def test_an_error_of_several_ranks_names_the_rank(card: DeviceMemory, checkpoint: str) -> None:
    resolved, _ = on_card(checkpoint, max_model_len=256)
    ranks = [facts_of(0, {}, 50 * MIB), facts_of(1, {"graphs": 64 * MIB}, 0)]
    with pytest.raises(CapacityError, match=r"^Rank 1 of 2: gpu_memory_utilization.*64.00 MiB of graphs"):
        final_plan(resolved.plan, ranks, 0.9, fixed=False, auto=False)
    with pytest.raises(CapacityError, match=r"^Rank 1 of 2: The pages asked for"):
        final_plan(resolved.plan, ranks, 0.9, fixed=True, auto=False)
    with pytest.raises(CapacityError, match=r"^gpu_memory_utilization"):
        final_plan(resolved.plan, ranks[1:], 0.9, fixed=False, auto=False)


class TwoRanks:
    """Two workers with devices of their own; the first one runs the steps."""

    def __init__(self, workers: list[LoadedWorker]) -> None:
        self.workers = workers
        travelled = [msgspec.msgpack.encode(facts) for worker in workers for facts in worker.facts]
        self.facts = [msgspec.msgpack.decode(facts, type=MemoryFacts) for facts in travelled]

    def take_pages(self, num_bytes: int) -> Started:
        return [worker.take_pages(num_bytes) for worker in self.workers][0]

    def close(self) -> None:
        pass


def test_ranks_with_unequal_devices_map_equally_many_pages(card: DeviceMemory, checkpoint: str) -> None:
    resolved, first = on_card(checkpoint, gpu_memory_utilization=1.0)
    second = FakeDriver(CARD.total)
    second.others = first.others + 16 * MIB
    workers = [load_worker(resolved, card=fake_card(driver)) for driver in (first, second)]
    core = build_on(resolved, TwoRanks(workers))
    alone = build_from(resolved, card=fake_card(second_alone := FakeDriver(CARD.total)))
    assert second_alone.used > second.used
    assert [worker.arena.mapped_bytes() for worker in workers] == [workers[1].arena.mapped_bytes()] * 2
    assert core.memory_plan.kv_bytes <= workers[0].arena.mapped_bytes()["kv"] < alone.memory_plan.kv_bytes
    assert second.memory()[0] < first.memory()[0] - 15 * MIB
    assert generate(core, list(range(40, 90))) == generate(alone, list(range(40, 90)))


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other API call"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def test_running_out_of_memory_in_a_phase_is_a_sentence_with_the_numbers() -> None:
    driver = FakeDriver(8 * MIB)
    driver.others = MIB
    meter = StartMeter(driver)
    with meter.phase("weights"):
        driver.create(2 * MIB)
    with meter.phase("tables"):
        driver.others = 0
    assert meter.taken == {"weights": 2 * MIB, "tables": -MIB}
    numbers = r"'capture' \(.*\): 6.00 MiB of the device's 8.00 MiB are free.* taken weights 2.00 MiB before"
    for error in OUT_OF_MEMORY:
        with pytest.raises(CapacityError, match=numbers) as caught, meter.phase("capture", "graphs"):
            raise error
        assert f"({str(error).splitlines()[0]})" in str(caught.value)
    with pytest.raises(RuntimeError, match="illegal"), meter.phase("capture", "graphs"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_device_too_full_to_begin_with_is_a_sentence_with_the_numbers(
    checkpoint: str, card: DeviceMemory, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(card_of_worker, "CudaDriver", full)
    with pytest.raises(CapacityError, match=r"before anything is loaded \(.*\): 60.00 MiB of .* 64.00 MiB were free"):
        build_from(resolve(EngineArgs(model=checkpoint)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=64 * MIB))
    with pytest.raises(CapacityError, match=r"64.00 MiB are used up.*CUDA_VISIBLE_DEVICES"):
        device_memory()


class AskedDriver:
    """The calls of `cuda.bindings.driver` that a look at a device takes."""

    CUresult = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2})

    def __init__(self, status: int) -> None:
        self.calls: list[str] = []
        self._status = self.CUresult(status)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*args: object) -> tuple[Any, ...]:
            self.calls.append(name)
            if name == "cuMemGetInfo":
                return self._status, 3 * MIB, 64 * MIB
            return (0, "context") if name == "cuDevicePrimaryCtxRetain" else (0, *args[:1])

        return call


@pytest.mark.parametrize("status", [0, 2])
def test_a_core_of_several_ranks_asks_for_memory_and_leaves_the_device(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = AskedDriver(status)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("torch would keep its context"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=64 * MIB))
    if status:
        with pytest.raises(CapacityError, match=r"64.00 MiB are used up.*OUT_OF_MEMORY"):
            device_memory(of_ranks=True)
    else:
        assert device_memory(of_ranks=True) == DeviceMemory(64 * MIB, 3 * MIB)
    assert driver.calls[2] == "cuDevicePrimaryCtxRetain" and driver.calls[-1] == "cuDevicePrimaryCtxRelease"


GOOD = CudaFacts("NVIDIA H200", (9, 0), triton=True, bindings=True)


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        (CudaFacts(None, reason="no device or driver"), "no CUDA device"),
        (replace(GOOD, name="Tesla V100", capability=(7, 0)), "V100 has compute capability 7.0, and at least 8.0"),
        (replace(GOOD, triton=False), "triton"),
        (replace(GOOD, bindings=False), "cuda-bindings"),
    ],
)
def test_what_a_card_lacks_is_said_with_what_works_without_it(facts: CudaFacts, missing: str) -> None:
    tell: Callable[[], CudaFacts] = lambda: facts  # noqa: E731
    with pytest.raises(ConfigError, match=missing) as caught:
        resolve_device("cuda", tell)
    assert 'device="cpu" works' in str(caught.value)
    assert resolve_device("auto", tell) == "cpu"


def test_a_card_that_lacks_nothing_is_taken_unless_the_cpu_is_asked_for() -> None:
    assert [resolve_device(asked, lambda: GOOD) for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_on_a_card_frees_what_it_says_and_answers_the_same_after_waking(
    card: DeviceMemory, checkpoint: str, level: int
) -> None:
    prompt = list(range(40, 90))
    resolved, driver = on_card(checkpoint)
    core = build_from(resolved, card=fake_card(driver))
    expected, awake = generate(core, prompt), driver.used
    for _ in range(2):
        core.sleep(level)
        assert driver.used == (awake if level == 0 else 0)
        core.wake_up()
        assert (driver.used, core.is_sleeping) == (awake, False)
        assert generate(core, prompt) == expected


def test_an_engine_whose_memory_was_taken_while_it_slept_wakes_when_it_is_back(
    card: DeviceMemory, checkpoint: str
) -> None:
    prompt = list(range(40, 90))
    resolved, driver = on_card(checkpoint)
    core = build_from(resolved, card=fake_card(driver))
    expected = generate(core, prompt)
    core.sleep(1)
    driver.others += 20 * MIB
    for _ in range(2):
        with pytest.raises(CapacityError, match="wanted for pages.* wake_up can be tried again"):
            core.wake_up()
        assert core.is_sleeping
    with pytest.raises(EngineSleepingError):
        generate(core, prompt)
    driver.others -= 20 * MIB
    core.wake_up()
    assert generate(core, prompt) == expected


def test_where_a_model_lies_does_not_decide_which_kernels_it_needs(tmp_path: Path) -> None:
    names = set()
    for folder in ("a", "b"):
        shutil.copytree(demo_path(), tmp_path / folder)
        resolved = resolve(EngineArgs(model=str(tmp_path / folder), device="cpu", max_model_len=128))
        names.add(kernels_name(resolved))
    assert len(names) == 1


def test_who_makes_the_sums_of_ranks_decides_which_kernels_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with NCCL compiles no kernels of peers, and must not say of the next one, which has none of NCCL, that all are there."""
    settings: dict[str, Any] = {
        "model": str(demo_path()),
        "device": "cpu",
        "max_model_len": 128,
        "tensor_parallel_size": 2,
    }
    names = [kernels_name(resolve(EngineArgs(**settings, disable_custom_all_reduce=nccl))) for nccl in (False, True)]
    monkeypatch.setenv("PAGERUNNER_RANKS_SHARE_DEVICES", "1")
    names.append(kernels_name(resolve(EngineArgs(**settings))))
    assert len(set(names)) == 3
