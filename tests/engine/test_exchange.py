"""Prompts computed on one engine and continued on another: tokens are those of one engine, whatever becomes of the pages on their way."""

from __future__ import annotations

import gc
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.effort import TEST_DAY, by_days, effort
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import LONG, until
from helpers.ports import free_port
from helpers.recount import recount, recount_pool
from pagerunner import LLM
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup import build
from pagerunner.engine.startup.build import build_core
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.tiers import below, nixl, page_server, peers
from pagerunner.tiers import exchange as exchange_module
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams
from pagerunner.types.kv_transfer import KVTransferParams

pytest.importorskip("transformers")

# full, window, chunks, recurrent state of two kinds, latents, latents with an indexer, compressed
KINDS = ("qwen3", "gpt_oss", "llama4_text", "qwen3_next", "bamba", "deepseek_v2", "deepseek_v32", "deepseek_v4")
PROMPT = [(7 * i) % 490 + 4 for i in range(150)]
OTHER = [(11 * i) % 490 + 4 for i in range(150)]
LEND = KVTransferParams(do_remote_decode=True)
SIZES = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
_numbers = itertools.count()
try:
    nixl.check_installed()
    INSTALLED = True
except ConfigError:
    INSTALLED = False
needs_nixl = pytest.mark.skipif(not INSTALLED, reason='NIXL isn\'t installed: pip install "pagerunner[nixl]"')


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


@pytest.fixture(autouse=True)
def own_secret(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


class Engine:
    """A core that is stepped by hand."""

    def __init__(self, path: str, role: str | None, extra: dict[str, Any] | None = None, **options: Any) -> None:
        transfer: dict[str, Any] = {}
        if role is not None:
            config = {
                "kv_connector": options.pop("connector", "PeerConnector"),
                "kv_role": role,
                "kv_port": free_port(),
                "kv_load_failure_policy": options.pop("kv_load_failure_policy", "recompute"),
            }
            transfer = {
                "kv_transfer_config": {**config, "kv_connector_extra_config": extra or {}},
                "kv_offloading_size": 0.04,
            }
        args = {"device": "cpu", "kv_cache_memory_bytes": 3_000_000, "poison_fresh_pages": True, **SIZES, **options}
        self.core: EngineCore = build_core(EngineArgs(model=path, **args, **transfer))
        self.updates: dict[str, list[RequestUpdate]] = {}

    def add(
        self, prompt: list[int], params: KVTransferParams | None = None, tokens: int = 6, salt: str = "", lora: str = ""
    ) -> str:
        name = f"r{next(_numbers)}"
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.core.add(
            EngineRequest(
                request_id=name, prompt_token_ids=prompt, params=sampling, seed=0, max_tokens=tokens, kv_transfer=params,
                cache_salt=salt, lora=lora,
            )
        )  # fmt: skip
        return name

    def take(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            self.updates.setdefault(update.request_id, []).append(update)

    def step(self) -> None:
        if self.core.has_work:
            self.take(self.core.step())

    def last(self, name: str) -> RequestUpdate:
        """A request's last update, after all steps that it needs."""
        until(lambda: self.step() or self.ended(name))
        return self.updates[name][-1]

    def ended(self, name: str) -> bool:
        return any(update.finish_reason for update in self.updates.get(name, ()))

    def tokens(self, name: str) -> list[int]:
        assert self.last(name).finish_reason == "length"
        return [token for update in self.updates[name] for token in update.new_token_ids]

    def found(self, name: str) -> int:
        """Tokens of the prompt that weren't computed."""
        self.last(name)
        return max(update.num_cached_tokens for update in self.updates[name])

    def lend(self, prompt: list[int], salt: str = "", lora: str = "") -> KVTransferParams | None:
        """Where a prompt's pages are lent, after it was computed."""
        update = self.last(self.add(prompt, LEND, tokens=1, salt=salt, lora=lora))
        assert update.finish_reason == "length" and len(update.new_token_ids) == 1
        return update.kv_transfer_params

    def close(self) -> None:
        """Nothing is held any more."""
        core = self.core
        while core.has_work:
            self.step()
        if core._exchange is not None:
            core._stop_exchange("end")
            assert not core._exchange.busy and not len(core._exchange.loans)
        scheduler = core._scheduler
        recount(scheduler.manager)
        assert not any(scheduler.manager.pool.used)
        if scheduler.tiers is not None:
            recount_pool(scheduler.tiers.host.pool)
            assert not any(scheduler.tiers.host.pool.used)


@pytest.fixture
def make(checkpoint: Callable[[str], str]):
    made: list[Engine] = []

    def one(role: str | None, family: str = "qwen3", **options: Any) -> Engine:
        made.append(Engine(checkpoint(family), role, **options))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("family", "dtype"), by_days(KINDS, ("auto", "fp8", "bfloat16")))
def test_tokens_are_those_of_one_engine(make, family: str, dtype: str) -> None:
    alone, prefill, decode = (make(role, family, kv_cache_dtype=dtype) for role in (None, "kv_producer", "kv_consumer"))
    wanted = [alone.tokens(alone.add(prompt)) for prompt in (PROMPT, OTHER)]
    params = [prefill.lend(prompt) for prompt in (PROMPT, OTHER)]
    assert all(params)
    names = [decode.add(prompt, lent) for prompt, lent in zip((PROMPT, OTHER), params, strict=True)]
    assert [decode.tokens(name) for name in names] == wanted
    for name, lent in zip(names, params, strict=True):
        assert decode.found(name) == lent.remote_num_tokens > 60
    until(lambda: not len(prefill.core._exchange.loans))


@pytest.fixture
def pair(make) -> tuple[Engine, Engine, list[int]]:
    """An engine that lends, one that pulls, and the tokens of PROMPT."""
    prefill, decode = make("kv_both"), make("kv_both")
    return prefill, decode, prefill.tokens(prefill.add(PROMPT))


def test_the_answer_says_where_the_pages_are_in_vllms_words(pair) -> None:
    prefill, decode, _ = pair
    lent = prefill.lend(PROMPT)
    assert lent.do_remote_prefill and not lent.do_remote_decode
    assert (lent.remote_host, lent.tp_size, lent.remote_num_tokens) == ("127.0.0.1", 1, 144)
    assert len(lent.remote_lease) == len(lent.remote_boot_id) == 32 and lent.remote_request_id in prefill.updates
    assert prefill.lend(PROMPT[:10]) is None, "no page of it is full"


def test_loans_leave_half_of_host_memory(pair, monkeypatch) -> None:
    prefill, _, _ = pair
    page = prefill.core.memory_plan.groups[0].page_bytes
    monkeypatch.setattr(exchange_module, "MOST_LENT", 8.5 * page / prefill.core._exchange._tiers.host.num_bytes)
    assert prefill.lend(PROMPT) and prefill.lend(OTHER) is None
    prefill.core._exchange.loans.end_all("released")
    assert prefill.lend(OTHER)


def test_prompts_share_pages_only_with_the_same_salt(pair) -> None:
    prefill, decode, wanted = pair
    lent = prefill.lend(PROMPT, salt="a")
    name = decode.add(PROMPT, lent, salt="b")
    assert decode.tokens(name) == wanted and decode.found(name) == 0
    name = decode.add(PROMPT, prefill.lend(PROMPT, salt="a"), salt="a")
    assert decode.tokens(name) == wanted and decode.found(name) == 144


def test_what_is_there_already_is_not_pulled_again(pair) -> None:
    prefill, decode, wanted = pair
    decode.tokens(decode.add(PROMPT[:100]))
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted and decode.found(name) == 144
    page = decode.core.memory_plan.groups[0].page_bytes
    assert decode.core._exchange._peers.bytes_read == (144 - 96) // 16 * page
    update = decode.updates[name][0]
    assert (update.num_cached_tokens, update.num_external_computed_tokens) == (144, 48)
    assert decode.core.stats().prefix_hits_total == 96 and decode.core.stats().tier.hits_total == 48
    name = decode.add(PROMPT)
    decode.tokens(name)
    assert decode.updates[name][0].num_external_computed_tokens == 0, "the device has them"


def test_an_expired_loan_and_an_engine_that_is_gone_mean_computing(pair) -> None:
    prefill, decode, wanted = pair
    lent = prefill.lend(PROMPT)
    prefill.core._exchange.loans.end_all("expired")
    name = decode.add(PROMPT, lent)
    assert decode.tokens(name) == wanted and decode.found(name) == 0
    decode.core.reset_prefix_cache()
    lent = prefill.lend(OTHER)
    prefill.core._stop_exchange("end")
    name = decode.add(OTHER, lent)
    assert decode.found(name) == 0
    assert decode.tokens(name) == prefill.tokens(prefill.add(OTHER))


def test_a_wrong_page_is_computed(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, wanted = pair
    monkeypatch.setattr("pagerunner.tiers.loans.Loan.checksum", lambda self, name: bytes(32))
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted and decode.found(name) == 0


def test_a_pull_that_takes_too_long_is_given_up(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, wanted = pair
    monkeypatch.setattr(below, "LEAST_PATIENCE", 0.05)
    monkeypatch.setattr(peers, "_pull", lambda line, *_: line.receive_into(memoryview(bytearray(1)), 1e18))
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted and decode.found(name) == 0


def held_pull(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pulls wait for this before they begin."""
    go, real = threading.Event(), peers._pull
    monkeypatch.setattr(peers, "_pull", lambda *given: go.wait(LONG) and real(*given))
    return go


def test_what_comes_after_a_reset_is_not_found(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, wanted = pair
    go = held_pull(monkeypatch)
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    until(lambda: decode.step() or decode.core._exchange._arrivals.num_reads)
    decode.core.reset_prefix_cache()
    go.set()
    assert decode.tokens(name) == wanted and decode.found(name) == 0


def test_pulls_have_a_share_of_host_memory(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, wanted = pair
    page, host = decode.core.memory_plan.groups[0].page_bytes, decode.core._exchange._tiers.host
    monkeypatch.setattr(below, "MOST_READ", 10 * page / host.num_bytes)
    go = held_pull(monkeypatch)
    first = decode.add(PROMPT, prefill.lend(PROMPT))
    until(lambda: decode.step() or decode.core._exchange._arrivals.num_reads)
    second = decode.add(OTHER, prefill.lend(OTHER))
    until(lambda: decode.step() or decode.core._exchange._pulls[2].known)
    for _ in range(5):
        decode.step()
    assert decode.core._exchange._arrivals.num_reads == 1 and not decode.ended(second), "there is room for one"
    go.set()
    assert decode.tokens(first) == wanted and decode.found(first) == decode.found(second) == 144


def test_a_request_that_cannot_be_queued_any_more_ends_alone(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, wanted = pair
    go = held_pull(monkeypatch)
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    held = decode.core._exchange._pulls[1].requests[0]
    for again in (held, msgspec.structs.replace(held, kv_transfer=None)):
        with pytest.raises(InvalidRequestError, match="is already in use"):
            decode.core.add(again)
    scheduler = decode.core._scheduler

    def refuse(request: EngineRequest) -> None:
        raise InvalidRequestError("It can't be guided.", "structured_outputs")

    with monkeypatch.context() as refusing:
        refusing.setattr(scheduler, "add", refuse)
        refusing.setattr(prefill.core._scheduler, "add", refuse)
        with pytest.raises(InvalidRequestError, match="guided"):
            prefill.add(PROMPT, LEND)
        assert not prefill.core._exchange._to_lend
        go.set()
        last = decode.last(name)
    assert (last.finish_reason, last.error, last.param) == ("error", "It can't be guided.", "structured_outputs")
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted


def test_loans_expire_though_nobody_connects(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server.PageServer, "_accept", lambda *_: None)
    prefill = make("kv_producer")
    assert prefill.lend(PROMPT)
    loans = prefill.core._exchange.loans
    monkeypatch.setattr(loans, "_clock", lambda: time.monotonic() + 40)
    loans.tick()  # a thread does
    assert loans.num_expired == 1 and not len(loans)
    in_use = [group["in_use"] for group in msgspec.to_builtins(prefill.core.memory_state())["host"]["groups"]]
    assert not any(in_use), "an idle engine makes no step that would take them back"


def test_requests_are_aborted_wherever_they_are(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, _ = pair
    lent = prefill.lend(PROMPT)
    monkeypatch.setattr(peers, "_pull", lambda line, *_: line.receive_into(memoryview(bytearray(1)), 1e18))
    name = decode.add(PROMPT, lent)
    until(lambda: decode.step() or decode.core._exchange._arrivals.num_reads)
    decode.take(decode.core.abort([name]))
    assert decode.last(name).finish_reason == "abort"
    until(lambda: not len(prefill.core._exchange.loans))
    monkeypatch.setattr(exchange_module.Exchange, "_lend", lambda self, answer: pytest.fail("it was aborted"))
    monkeypatch.setattr("pagerunner.tiers.policy.Tiering.storing", lambda *_: True)
    name = prefill.add(OTHER, LEND, tokens=1)
    until(lambda: prefill.step() or prefill.core._exchange._answers)
    prefill.take(prefill.core.abort([name]))
    assert prefill.last(name).finish_reason == "abort"


@needs_nixl
def test_by_nixl_it_is_the_same(make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    Path(secret).write_bytes(bytes(range(32)))
    Path(secret).chmod(0o600)
    prefill, decode, plain = (
        make("kv_both", connector=connector, enable_sleep_mode=True, extra={"secret_file": secret})
        for connector in ("NixlConnector", "NixlConnector", "PeerConnector")
    )
    wanted = prefill.tokens(prefill.add(PROMPT))
    reads: list[int] = []
    real = nixl.Reader.read
    monkeypatch.setattr(
        nixl.Reader, "read", lambda self, agent, at, *rest: reads.append(len(at)) or real(self, agent, at, *rest)
    )
    for lender, times in ((prefill, 1), (prefill, 2), (plain, 2)):  # from one without NIXL over TCP
        name = decode.add(PROMPT, lender.lend(PROMPT))
        assert decode.tokens(name) == wanted and decode.found(name) == 144
        assert reads == [9] * times
        decode.core.reset_prefix_cache()
        prefill.core.sleep(1)
        prefill.core.wake_up()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_sleep_ends_loans_and_pulls(make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    prefill, decode = (make("kv_both", enable_sleep_mode=True) for _ in range(2))
    wanted = prefill.tokens(prefill.add(PROMPT))
    lent, later = prefill.lend(PROMPT), prefill.lend(OTHER)
    prefill.take(prefill.core.sleep(1, mode))
    assert not len(prefill.core._exchange.loans)
    name = decode.add(PROMPT, lent)
    assert decode.tokens(name) == wanted and decode.found(name) == 0
    prefill.core.wake_up()
    name = decode.add(OTHER, later)
    assert decode.found(name) == 0, "the loan ended with the sleep"

    decode.core.reset_prefix_cache()
    with monkeypatch.context() as slow:
        slow.setattr(peers, "_pull", lambda line, *_: line.receive_into(memoryview(bytearray(1)), 1e18))
        name = decode.add(PROMPT, prefill.lend(PROMPT))
        until(lambda: decode.step() or decode.core._exchange._arrivals.num_reads)
        decode.take(decode.core.sleep(1, mode))
    decode.core.wake_up()
    if mode == "keep":
        assert decode.tokens(name) == wanted
    else:
        assert decode.last(name).finish_reason == "abort"
    decode.core.reset_prefix_cache()
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted and decode.found(name) == 144, "both lend and pull again"


def test_pages_of_weights_that_have_changed_since_are_refused(make, caplog: pytest.LogCaptureFixture) -> None:
    """In place, as a trainer's come: in the same directory and after as many changes, yet not the same ones."""
    lender, taker, alone = (make(role, enable_sleep_mode=True) for role in ("kv_producer", "kv_consumer", None))
    for engine, factor in ((lender, 1.5), (taker, 0.5), (alone, 0.5)):
        model = engine.core._executor._weights._model
        module = next(module for module in model.modules() if "weight" in module.weights)
        module.weights["weight"].mul_(factor)
        engine.core._executor._weights.lost()  # as after a change
        engine.core.sleep(1)
        engine.core.wake_up()
    wanted = alone.tokens(alone.add(PROMPT))
    name = taker.add(PROMPT, lender.lend(PROMPT))
    assert taker.tokens(name) == wanted and not taker.found(name)
    assert "weights" in caplog.text


def test_an_engine_that_has_ended_lets_its_port_and_memory_go(checkpoint) -> None:
    engine = Engine(checkpoint("qwen3"), "kv_both")
    assert engine.lend(PROMPT)
    server = engine.core._exchange._server
    del engine
    gc.collect()
    assert server._listener is None and not len(server._loans)
    with socket.create_server(server.address):
        pass


def test_engines_of_other_pages_are_refused_by_name(pair, make, caplog: pytest.LogCaptureFixture) -> None:
    prefill, _, wanted = pair
    other = make("kv_consumer", kv_cache_dtype="fp8")
    other.tokens(other.add(PROMPT, prefill.lend(PROMPT)))
    assert "kv_cache_dtype is float32 there and fp8_e4m3 here" in caplog.text
    caplog.clear()
    other = make("kv_consumer", block_size=32)
    name = other.add(PROMPT, prefill.lend(PROMPT))
    assert other.tokens(name) == wanted and other.found(name) == 0
    assert "group 0 tokens of a page is 16 there and 32 here" in caplog.text


def test_requests_are_refused_that_this_engine_cannot_serve(make) -> None:
    plain, prefill, decode = make(None), make("kv_producer"), make("kv_consumer", extra={"peers": ["127.0.0.2"]})
    lent = prefill.lend(PROMPT)
    for engine, params, sentence in [
        (plain, LEND, "neither lends nor pulls pages; start it with a kv_transfer_config"),
        (prefill, lent, "this engine pulls no pages: its kv_role is kv_producer"),
        (decode, LEND, "this engine lends no pages: its kv_role is kv_consumer"),
        (decode, lent, "isn't among the peers"),
    ]:
        with pytest.raises(InvalidRequestError, match=sentence):
            engine.add(PROMPT, params)
    with pytest.raises(InvalidRequestError, match="The prompt has 300 tokens"):
        make("kv_consumer").add([5] * 300, lent)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"do_remote_prefill": True}, "lacks remote_host"),
        ({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, "remote_lease must be 32 hex"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "one request can't have both"),
    ],
)
def test_params_that_contradict_themselves(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        KVTransferParams(**fields)


def test_random_faults_under_load_change_no_token(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, _ = pair
    draw = random.Random(TEST_DAY)
    prompts = [[draw.randrange(4, 490) for _ in range(draw.randrange(20, 200))] for _ in range(6)]
    wanted = [prefill.tokens(prefill.add(prompt)) for prompt in prompts]
    monkeypatch.setattr("pagerunner.tiers.peers.PULL_BYTES", 20_000)
    asked: list[tuple[int, str]] = []
    left = effort(40, 400)
    lending: dict[str, int] = {}
    waiting: list[tuple[int, KVTransferParams]] = []

    def go() -> bool:
        nonlocal left
        for engine in (prefill, decode):
            engine.step()
        for name in [name for name in lending if prefill.ended(name)]:
            update, number = prefill.updates[name][-1], lending.pop(name)
            if update.kv_transfer_params:
                waiting.append((number, update.kv_transfer_params))
        match draw.randrange(40) if left else 40:
            case what if what < 12 and len(lending) < 4:
                number = draw.randrange(len(prompts))
                lending[prefill.add(prompts[number], LEND, tokens=1)] = number
                left -= 1
            case what if what < 24 and waiting:
                number, lent = waiting.pop(draw.randrange(len(waiting)))
                asked.append((number, decode.add(prompts[number], lent)))
            case 30 if len(prefill.core._exchange._lent):
                prefill.core._exchange.loans.release(draw.choice(list(prefill.core._exchange._lent)), "expired")
            case 31:
                draw.choice([prefill, decode]).core.reset_prefix_cache()
            case 32:
                for engine in (prefill, decode)[:: draw.choice([-1, 1])][:1]:
                    engine.take(engine.core._stop_exchange("sleep"))
                    engine.core._exchange.open()
            case 33 if asked:
                number, name = asked.pop(draw.randrange(len(asked)))
                decode.take(decode.core.abort([name]))
        done = not left and not lending and not waiting
        if not left and waiting:
            number, lent = waiting.pop()
            asked.append((number, decode.add(prompts[number], lent)))
        return done and all(decode.ended(name) for _, name in asked)

    deadline = time.monotonic() + LONG
    while not go():
        assert time.monotonic() < deadline
    assert all(decode.tokens(name) == wanted[number] for number, name in asked)
    assert sum(decode.found(name) > 0 for _, name in asked) > len(asked) // 4, "some pages come all the same"


def test_nixl_needs_a_secret(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_api", lambda: None)
    asked = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="read all of the host memory for pages: give secret_file"):
        build_core(EngineArgs(model=checkpoint("qwen3"), kv_offloading_size=0.04, kv_transfer_config=asked))


@pytest.mark.parametrize("fault", ["the port is taken", "the secret is short"])
def test_an_address_and_a_secret_are_tried_before_the_model_is_loaded(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(build, "build_from", lambda *_, **__: pytest.fail("it is loaded"))
    (tmp_path / "secret").write_bytes(bytes(32 if fault == "the port is taken" else 31))
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        extra = {"secret_file": str(tmp_path / "secret")}
        asked = {
            "kv_connector": "PeerConnector",
            "kv_role": "kv_both",
            "kv_port": port,
            "kv_connector_extra_config": extra,
        }
        sentence = (
            f"kv_port={port}: this machine can't listen there" if fault == "the port is taken" else "has 31 bytes"
        )
        with pytest.raises(ConfigError, match=sentence):
            build_core(EngineArgs(model=checkpoint("qwen3"), kv_offloading_size=0.04, kv_transfer_config=asked))


def test_nixl_alone_is_told_all_that_it_lacks(checkpoint) -> None:
    asked = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match=r"(?s)cpu_bytes_to_use.*and secret_file"):
        build_core(EngineArgs(model=checkpoint("qwen3"), kv_transfer_config=asked))


def test_nixl_has_the_same_fields(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_WHEELS", ("no_such_nixl",))
    asked = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": 15_000, "kv_ip": "127.0.0.1"}
    with pytest.raises(ConfigError, match="NixlConnector needs NIXL"):
        build_core(EngineArgs(model=checkpoint("qwen3"), kv_offloading_size=0.04, kv_transfer_config=asked))


def test_offline_engines_have_no_requests_that_could_be_exchanged(checkpoint) -> None:
    asked = {"kv_connector": "PeerConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="PeerConnector is for servers"):
        LLM(checkpoint("qwen3"), device="cpu", kv_offloading_size=0.04, kv_transfer_config=asked)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        ({"kv_role": "prefill"}, {}, "kv_role of PeerConnector must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_ip": "10.0.0.1"}, {}, "kv_ip='10.0.0.1' is open to other machines: give secret_file"),
        ({"kv_ip": "localhost"}, {}, "kv_ip='localhost' in kv_transfer_config must be the IP address"),
        ({"kv_ip": "0.0.0.0"}, {}, "kv_ip='0.0.0.0' in kv_transfer_config must be the IP address"),
        ({"kv_ip": "10.0.0.0/24"}, {}, "kv_ip='10.0.0.0/24' in kv_transfer_config must be the IP address"),
        ({"kv_port": 0}, {}, r"kv_port in kv_transfer_config must be in \[1, 65535\], got 0"),
        ({"kv_connector_extra_config": {"peer": []}}, {}, "PeerConnector knows .*peers"),
        ({"kv_connector_extra_config": {"kv_lease_duration": 0}}, {}, "kv_lease_duration"),
        ({}, {"data_parallel_size": 2}, "one engine without teams: data_parallel_size=2 must be 1"),
        ({}, {"kv_offloading_size": None}, "PeerConnector takes pages to host memory"),
        ({"kv_connector_extra_config": {"backends": ["UCX"]}}, {}, "goes with NixlConnector alone"),
    ],
)
def test_configurations_are_refused(checkpoint, config: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    asked = {"kv_connector": "PeerConnector", "kv_role": "kv_both", **config}
    with pytest.raises(ConfigError, match=sentence):
        build_core(
            EngineArgs(
                model=checkpoint("qwen3"),
                device="cpu",
                **{"kv_offloading_size": 0.04, **SIZES, **options},
                kv_transfer_config=asked,
            )
        )
