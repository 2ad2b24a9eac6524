"""Ranks on two nodes of a Ray cluster: tokens are those of one rank, an actor's end is the engine's, and no process is left.

Without the package ray these tests are skipped; `pip install -e ".[ray,dev]"` brings it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq

from helpers.families import MAKERS
from helpers.patience import patient, until
from helpers.ray_cluster import two_machines
from pagerunner import LLM, SamplingParams, limits
from pagerunner.children import host_ip, settings_of_engine
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine import rank_host
from pagerunner.engine.core.executors import process
from pagerunner.engine.core.executors import ray as places
from pagerunner.engine.core.executors.doors import Doors
from pagerunner.engine.rank import what_it_runs
from pagerunner.engine.startup import cluster
from pagerunner.engine.startup import resolve as resolving
from pagerunner.engine.startup.machine import CudaFacts, DeviceMemory, device_of_rank
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker.ways import Ways
from pagerunner.errors import CapacityError, ConfigError, EngineDeadError

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 48, "device": "cpu"}
SETTINGS: dict[str, Any] = {"model": str(demo_path()), "use_tqdm": False} | LIMITS
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}
PROMPTS = [{"prompt_token_ids": list(range(30, 30 + n))} for n in (5, 20, 40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1, seed=7, max_tokens=16, ignore_eos=True),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the package ray isn't installed (it is an extra)")
    with two_machines() as found:
        yield found


def rank_pids() -> list[int]:
    """Processes of ranks whose parent is an actor, or was one, of this test's cluster: they know this process's mark."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"pagerunner.engine.rank" in command.read_bytes().split(b"\0"):
                if MARK in command.with_name("environ").read_bytes():
                    found.append(int(command.parent.name))
    return found


MARK = f"PAGERUNNER_TEST_MARK={os.getpid()}".encode()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name, _, value = MARK.decode().partition("=")
    monkeypatch.setenv(name, value)
    yield
    until(lambda: not rank_pids())


def tokens(llm: LLM) -> list[Any]:
    return [
        list(output.outputs[0].token_ids)
        for params in PARAMS
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


def test_tokens_of_two_machines_are_those_of_one_rank_and_a_killed_actor_ends_the_engine(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A node has one CPU, so the two ranks of a layer are on two nodes."""
    alone = tokens(LLM(**SETTINGS))
    llm = LLM(**SETTINGS, **RAY, tensor_parallel_size=2, enable_sleep_mode=True)
    assert "tensor_parallel_size goes across machines" in caplog.text
    assert tokens(llm) == alone and len(rank_pids()) == 2
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm) == alone
    nodes = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    table = ray.util.placement_group_table()
    (used,) = [one["bundles_to_node_id"] for one in table.values() if one["state"] == "CREATED"]
    assert set(used.values()) == nodes and len(nodes) == 2

    executor: Any = llm._core._executor
    os.kill(executor._ranks.watch._processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^Rank 1 of 2 (is gone with its Ray actor|has lost)"):
        for _ in range(100):
            tokens(llm)
    until(lambda: not rank_pids())
    del llm, executor
    until(lambda: not [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"])


def test_stages_are_placed_and_a_killed_rank_is_named(ray: Any) -> None:
    llm = LLM(**SETTINGS, **RAY, pipeline_parallel_size=2)
    assert tokens(llm) == tokens(LLM(**SETTINGS))
    os.kill(rank_pids()[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^Rank [01] of 2 was ended by SIGKILL"):
        for _ in range(100):
            tokens(llm)


def test_teams_are_placed_and_a_killed_rank_ends_both(ray: Any, tmp_path: Path) -> None:
    settings = SETTINGS | {"model": str(MAKERS["qwen3_moe"](tmp_path)), "skip_tokenizer_init": True}
    llm = LLM(**settings, **RAY, data_parallel_size=2, enable_expert_parallel=True)
    assert tokens(llm) == tokens(LLM(**settings))
    assert [one.prompt_tokens_total > 0 for one in llm.stats().teams] == [True, True]
    os.kill(rank_pids()[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^Rank [01] of 2 was ended by SIGKILL"):
        for _ in range(100):
            tokens(llm)


def test_what_can_not_be_placed_is_a_sentence(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RANK_SECONDS", 0.3)
    with pytest.raises(
        CapacityError,
        match=r"Ray hasn't placed 4 ranks .* in 3 seconds .*: free are 2 of the cluster's 2 CPUs \(127\.0\.0\.1 has 1, 127\.0\.0\.1 has 1\)\.",
    ):
        LLM(**SETTINGS, **RAY, tensor_parallel_size=2, pipeline_parallel_size=2)
    monkeypatch.undo()
    monkeypatch.setattr(places, "machine", lambda: "another one")
    with pytest.raises(
        ConfigError, match=r"rank 0 of 2 on another machine, .* 127\.0\.0\.1 only; PAGERUNNER_HOST_IP in"
    ):
        LLM(**SETTINGS, **RAY, tensor_parallel_size=2)


def test_gpus_that_ray_counts_and_torch_does_not_see_are_refused_with_the_machine(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of the tests count a GPU each, and there is none."""
    here = r"^127\.0\.0\.1, a machine of the Ray cluster: device=\"cuda\" can't be used: torch sees no CUDA device"
    with pytest.raises(ConfigError, match=here):
        LLM(**SETTINGS | RAY | {"device": "cuda"}, tensor_parallel_size=2)
    llm = LLM(**SETTINGS | RAY | {"device": "auto"}, tensor_parallel_size=2)
    assert llm.device == "cpu" and tokens(llm) == tokens(LLM(**SETTINGS))
    args = EngineArgs(model="x", tensor_parallel_size=3, **RAY)
    with pytest.raises(ConfigError, match=r"^3 ranks take a GPU each, and free are 2 of the cluster's 2 GPUs \(127"):
        cluster.check_cluster(args)
    assert [line.split(";")[0] for line in cluster.machines()] == ["127.0.0.1: 1 CPUs, 1 GPUs"] * 2
    assert all("; pagerunner 0" in line and "torch 2" in line for line in cluster.machines())


def test_ranks_on_gpus_are_placed_where_ray_counts_some(ray: Any, caplog: pytest.LogCaptureFixture) -> None:
    config: Any = SimpleNamespace(tensor_parallel_size=2, num_ranks=2, device="cuda")
    held = places.RayPlaces(config, 60.0)
    try:
        assert "No machine of the cluster has 2 GPUs: tensor_parallel_size goes across machines." in caplog.text
        assert [place.gpus for place in held._places] == [["0"], ["0"]]
        assert len({place.node for place in held._places}) == 2
        until(lambda: not ray.available_resources().get("GPU"))
        with pytest.raises(CapacityError, match=r"in 0\.5 seconds .*: free are 0 of the cluster's 2 GPUs"):
            places.RayPlaces(config, 0.5)
    finally:
        held.close()


def test_an_interrupt_right_after_a_placement_group_was_made_gives_its_cpus_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[object] = []

    def interrupted() -> dict[str, float]:
        raise KeyboardInterrupt

    util = SimpleNamespace(placement_group=lambda bundles, strategy: "group", remove_placement_group=removed.append)
    fake = SimpleNamespace(nodes=list, util=util, available_resources=interrupted, is_initialized=lambda: True)
    monkeypatch.setattr(places, "connected", lambda: fake)
    config: Any = SimpleNamespace(tensor_parallel_size=2, num_ranks=2, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        places.RayPlaces(config, 1.0)
    assert removed == ["group"]


def test_ray_serve_answers_from_two_machines(ray: Any) -> None:
    """The example of docs/ray.md."""
    from ray import serve

    import ray_serve

    settings = {key: value for key, value in SETTINGS.items() if key != "use_tqdm"} | RAY | {"tensor_parallel_size": 2}
    handle = serve.run(ray_serve.Completions.bind(**settings), name="pagerunner", route_prefix="/")
    try:
        answer = handle.answer.remote({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}).result(
            timeout_s=60
        )
        params = SamplingParams(temperature=0, max_tokens=12)
        (alone,) = LLM(**SETTINGS).generate("Once upon a time", params, use_tqdm=False)
        assert answer["choices"][0]["text"] == alone.outputs[0].text
    finally:
        serve.shutdown()


# Without Ray


def test_without_ray_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'backend="ray" needs the package ray: pip install "pagerunner\[ray\]"\.$'):
        LLM(**SETTINGS, **RAY, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"distributed_executor_backend": "ray"}, 'backend="ray" is for several ranks, and .* is 1; "mp"'),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            'backend="uni" is for one rank, and .* is 2; "mp"',
        ),
        ({"distributed_executor_backend": "mpi"}, "must be one of mp, ray, uni, got 'mpi'"),
    ],
)
def test_backends_that_do_not_fit_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="x", **asked)


def test_by_tcp_only_the_ranks_own_keys_are_let_in(tmp_path: Path) -> None:
    mine, other = zmq.curve_keypair(), zmq.curve_keypair()
    doors = Doors(tmp_path, "127.0.0.1", [mine[0].decode()])
    held = doors.context.socket(zmq.PULL)
    doors.bind(held, "reports")
    ways = doors.ways()
    assert ways.addresses["reports"].startswith("tcp://127.0.0.1:") and list(tmp_path.iterdir()) == []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for keys, word in ((other, b"a stranger's"), (mine, b"a rank's")):
        known = Ways(
            addresses=ways.addresses, core_key=ways.core_key, public_key=keys[0].decode(), secret_key=keys[1].decode()
        )
        socket = context.socket(zmq.PUSH)
        socket.linger = 0  # nobody takes what a stranger sends
        known.connect(socket, "reports")
        socket.send(word)
    plain = context.socket(zmq.PUSH)
    plain.linger = 0
    plain.connect(ways.addresses["reports"])
    plain.send(b"nobody's")
    assert held.poll(patient(10) * 1000) and held.recv() == b"a rank's" and not held.poll(500)
    context.destroy(0)
    doors.close()
    assert held.closed


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    doors = Doors(tmp_path, "203.0.113.9")
    with pytest.raises(ConfigError, match=r"^PAGERUNNER_HOST_IP=203\.0\.113\.9: this machine can't listen there"):
        doors.bind(doors.context.socket(zmq.PULL), "reports")
    doors.close()


def test_only_settings_travel_to_other_machines() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "PAGERUNNER_API_KEY": "s",
        "PAGERUNNER_HOST_IP": "10.0.0.1",
        "HOME": "/x",
        "A": "b",
    }
    assert settings_of_engine(environ) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(("core", "rank"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "10.0.0.2")])
def test_a_rank_listens_on_loopback_where_the_core_does(core: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10.0.0.2 is what `ray start` had in its environment."""
    seen: dict[str, str] = {}
    monkeypatch.setenv("PAGERUNNER_HOST_IP", "10.0.0.2")
    ended = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(rank_host, "start", lambda module, environment, **how: seen.update(environment) or ended)
    assert rank_host.RankHost().run(b'{"ways": {}}', {"NCCL_DEBUG": "INFO"}, core, "3,1") == 0
    assert host_ip(seen) == rank
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["NCCL_DEBUG"], seen["NCCL_NVLS_ENABLE"]) == ("3,1", "INFO", "0")
    assert seen.get("NCCL_SOCKET_IFNAME") == ("lo" if rank == "127.0.0.1" else None), "no interface has 10.0.0.2 here"


def test_what_fails_at_the_end_of_actors_leaves_no_socket() -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name))

    places_that_fail: Any = SimpleNamespace(close=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        process._end(os.getpid(), part("watch"), part("sockets"), places_that_fail, part("doors"))
    assert closed == ["sockets", "watch", "doors"]


def test_waiting_for_a_rank_leaves_its_actor() -> None:
    ended = object()
    ray: Any = SimpleNamespace(is_initialized=lambda: True, get=lambda found, timeout: 3 if found is ended else None)
    assert places.RayRank(ray, None, 1, ended).wait(1.0) == 3


class FakeRay:
    """What RayPlaces and cluster_device ask of Ray; `gpus` are those of the machines."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=OSError)

    def __init__(self, gpus: list[int], answer: Any = None) -> None:
        self._gpus, self._answer = gpus, answer
        self.cancelled: list[Any] = []
        self.options: dict[str, Any] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeManagerAddress": f"10.0.0.{at}", "Resources": {"GPU": count}}
            for at, count in enumerate(self._gpus, 1)
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": sum(self._gpus)}

    available_resources = cluster_resources

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda: function)

    def get(self, asked: Any, timeout: float) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def cancel(self, asked: Any) -> None:
        self.cancelled.append(asked)


CARD = CudaFacts("NVIDIA H100", (9, 0), triton=True, bindings=True)
ROOM = DeviceMemory(80 * 2**30, 79 * 2**30)


@pytest.mark.parametrize(
    ("gpus", "asked", "answer", "found"),
    [
        ([1, 1], "auto", ("10.0.0.2", CARD, ROOM), ("cuda", ROOM)),
        ([1, 1], "cuda", ("10.0.0.2", CARD, ROOM), ("cuda", ROOM)),
        ([0, 0], "auto", None, ("cpu", None)),
        ([1], "auto", ("10.0.0.1", CudaFacts("Old", (7, 5)), None), ("cpu", None)),
        (
            [1],
            "cuda",
            ("10.0.0.1", CudaFacts("X", (9, 0)), None),
            r"^10\.0\.0\.1, a machine of the Ray cluster: device=\"cuda\" can't be used: the package triton",
        ),
        (
            [2, 0],
            "cuda",
            TimeoutError(),
            r"^Ray has had no GPU for a rank in 300 seconds .*: free are 2 of the cluster's 2 GPUs \(10\.0\.0\.1 has 2, 10\.0\.0\.2 has 0\)\.",
        ),
        (
            [2],
            "cuda",
            OSError("No module named 'pagerunner'"),
            r"pagerunner must be installed on all of them\. No module",
        ),
    ],
)
def test_the_device_is_that_of_a_machine_of_the_cluster(
    gpus: list[int], asked: str, answer: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(gpus, answer)
    monkeypatch.setattr(cluster, "connected", lambda: fake)
    if isinstance(found, str):
        with pytest.raises((ConfigError, CapacityError), match=found):
            cluster.cluster_device(asked)
    else:
        assert cluster.cluster_device(asked) == found
    assert len(fake.cancelled) == isinstance(answer, TimeoutError)
    assert fake.options.get("num_gpus") == (None if answer is None else 1)


def test_a_core_without_a_device_plans_for_those_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "connected", lambda: FakeRay([2], ("10.0.0.1", CARD, ROOM)))
    args = EngineArgs(model=str(demo_path()), tensor_parallel_size=2, **RAY)
    resolved = resolve(args)
    assert (resolved.config.device, resolved.card, resolved.config.dtype) == ("cuda", ROOM, "bfloat16")
    # a rank looks at its own machine's, and plans for the same memory
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: asked)
    ranks = resolve(msgspec.structs.replace(args, device="cuda"), available=ROOM)
    assert ranks.plan == resolved.plan and what_it_runs(ranks) == what_it_runs(resolved)
    monkeypatch.setenv("PAGERUNNER_RANKS_SHARE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r'DEVICES is 1, and distributed_executor_backend="ray" gives each rank a'):
        resolve(args)


@pytest.mark.parametrize("nodes", ["abab", "abcb", "aabb", "bcabca", "abbbab"])
def test_ranks_of_a_machine_follow_each_other_and_have_a_device_each(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each machine ranks see the devices of all its ranks, in the same order, and take different ones."""
    given = [rank_host.Place("m", f"10.0.0.{node}", "key", 1, node, [str(at)]) for at, node in enumerate(nodes)]
    held = places.RayPlaces.__new__(places.RayPlaces)
    started: list[tuple[int, str]] = []

    def actor(at: int) -> Any:
        return SimpleNamespace(run=SimpleNamespace(remote=lambda *asked: started.append((at, asked[3]))))

    held._ray, held.host = None, "10.0.0.9"
    held._actors, held._places = places.neighbours([actor(at) for at in range(len(nodes))], given)
    monkeypatch.setattr(places.msgspec.json, "encode", lambda launch: b"")
    taken = []
    for rank in range(len(nodes)):
        held.start(SimpleNamespace(rank=rank))  # type: ignore[arg-type]
        (at, gpus) = started[-1]
        visible = gpus.split(",")
        assert visible == [str(own) for own, node in enumerate(nodes) if node == nodes[at]], "Ray's own, and no others"
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: len(visible))
        taken.append(visible[device_of_rank(rank)])
    assert sorted(taken) == sorted(str(at) for at in range(len(nodes)))
    order = [nodes[at] for at, _ in started]
    assert all(order[at] not in order[at + 2 :] or order[at] == order[at + 1] for at in range(len(order) - 1))
