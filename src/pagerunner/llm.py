"""LLM: offline inference in this process, with vLLM's interface."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

from pagerunner import limits
from pagerunner.config import EngineArgs, EngineConfig, engine_args
from pagerunner.demo import find_model
from pagerunner.engine.core.executors.places import EarlyRanks
from pagerunner.engine.core.factory import loading_bar
from pagerunner.engine.core.forks import HomeProcess
from pagerunner.engine.core.garbage import seldom_collected
from pagerunner.engine.core.interrupts import HeldInterrupts
from pagerunner.engine.core.messages import StartUp
from pagerunner.engine.frontend.frontend import build_frontend, check_options, check_tokenizer
from pagerunner.engine.frontend.input_processor import (
    POOLING_PARAMS,
    Prompt,
    check_continues,
    own_params,
    shown_text,
    up_to_mark,
    with_marked_end,
)
from pagerunner.engine.startup.hub import fetch_checkpoint
from pagerunner.errors import ConfigError, EngineSleepingError, InvalidRequestError, RequestFailedError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.sched.stats import SchedulerStats
from pagerunner.text.chat_template import plain_messages
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import (
    EngineRequest,
    LoRARequest,
    OutputKind,
    Pooling,
    RequestOutput,
    RequestUpdate,
    SamplingParams,
    show,
)
from pagerunner.types.weights import (
    NO_RPC,
    FinishUpdate,
    StartUpdate,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
    read_request,
)
from pagerunner.vllm_flags import screen_arguments

if TYPE_CHECKING:
    from pagerunner.engine.core.core import EngineCore, SleepMode

Message = dict[str, Any]

_QUEUED_AT_ONCE = 4_096  # tokens of prompts that are read before they are queued: to queue one alone takes 0.03 ms more


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts one by one. A list of integers is one prompt, as in vLLM."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # a wrong one is refused by name with the others
    items: list[Any] = list(prompts)
    return [items] if items and all(type(item) is int for item in items) else items


def _loaded(args: EngineArgs, early: EarlyRanks, use_tqdm: bool) -> tuple[EngineCore, EngineConfig]:
    """The core, and what it was made from. Its phase "import" is what is imported here, torch for the most part."""
    started = time.perf_counter()
    from pagerunner.engine.startup.build import build_from
    from pagerunner.engine.startup.resolve import resolve

    imported = time.perf_counter() - started
    resolved = resolve(args, offline=True)
    if resolved.config.exchange is not None:
        name = "NixlConnector" if resolved.config.exchange.nixl else "PeerConnector"
        raise ConfigError(
            f"{name} is for servers: LLM takes no requests with kv_transfer_params. Use OffloadingConnector."
        )
    with loading_bar(use_tqdm) as progress:
        core = build_from(resolved, progress, early=early)
    seconds = {"import": imported, **core.startup.seconds}
    core.startup = msgspec.structs.replace(core.startup, seconds=seconds)
    return core, resolved.config


class LLM:
    """A model loaded and ready to generate.

    Arguments are the fields of `pagerunner.config.EngineArgs`, which are vLLM's. `model` is a directory, a name on the
    hub, or a demo model inside the package ("demo", "demo-hybrid").

        >>> llm = LLM("Qwen/Qwen3-0.6B", max_model_len="auto")  # or a directory
        >>> [output] = llm.generate("Hello, my name is", SamplingParams(temperature=0))
        >>> output.outputs[0].text

    Raises:
        ConfigError: an argument or a config field is wrong or unsupported.
        CheckpointError: the directory is not a complete checkpoint.
        CapacityError: the memory cannot hold one request of the wanted length.
    """

    def __init__(self, model: str, tokenizer: str | None = None, *, use_tqdm: bool = True, **kwargs: Any) -> None:
        kwargs = screen_arguments(kwargs, EngineArgs.__struct_fields__)
        if isinstance(model, EngineArgs):
            raise ConfigError("LLM takes the fields of EngineArgs by name: LLM(model, max_model_len=4096).")
        args = engine_args(model=find_model(str(model))[0], tokenizer=tokenizer, **kwargs)
        if args.engines > 1:
            raise ConfigError(
                f"data_parallel_size={args.data_parallel_size} is for a server or AsyncEngine, which choose an engine for each request. "
                "LLM is one engine: start one in each of several processes, each with its own CUDA_VISIBLE_DEVICES."
            )
        check_options(args)
        args = check_tokenizer(fetch_checkpoint(args, show_progress=use_tqdm))
        with EarlyRanks(args) as early:
            self._core, self._config = _loaded(args, early, use_tqdm)
        self._frontend = build_frontend(args, self._core.memory_plan.max_model_len)
        self._outputs = self._frontend.outputs
        self._ids = count()
        self._streams: dict[str, deque[RequestOutput]] = {}
        self._worker = 0  # the thread that is changing them
        self._home = HomeProcess("LLM")
        self._halfway = False  # whether an interrupt has left requests and core halfway through a change
        self._arriving: list[RequestUpdate] = []  # the work that `_advance` is doing
        self._lost: set[str] = set()  # streams whose outputs an interrupt has left halfway

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the memory is divided: groups, pages, capacity, and everything that is allocated beside them."""
        return self._core.memory_plan

    @property
    def device(self) -> str:
        """Where the model runs: "cpu" or "cuda"."""
        return self._config.device

    @property
    def dtype(self) -> str:
        """What weights and activations are computed in: "bfloat16", "float16" or "float32"."""
        return self._config.dtype

    @property
    def startup(self) -> StartUp:
        """What the start took: seconds by phase, and on a CUDA device memory by use."""
        return self._core.startup

    def stats(self) -> SchedulerStats:
        """Counters and gauges: requests, pages in use, prefix queries and hits, preemptions."""
        with self._whole():
            return self._core.stats()

    def memory_state(self, team: int = 0) -> dict[str, Any]:
        """Who holds the page memory now, as plain JSON values; of several teams of ranks that of one.

        `groups` list each group's slabs and cached pages, `requests` each running request's pages, as runs [first, count]
        of ids; see `memory/ownership.py`. Between calls of `generate` nothing runs; a `stream` may be looked at midway.
        Raises InvalidRequestError if there is no such team.
        """
        with self._whole():
            state: dict[str, Any] = msgspec.to_builtins(self._core.memory_state(team))
            return state

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError when it was switched off."""
        return self._frontend.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the checkpoint's generation_config.json over the defaults."""
        return own_params(self._frontend.default_sampling_params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the prompts' order.

        Args:
            prompts: a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`, or a list of these.
            sampling_params: one for all, or one per prompt; the checkpoint's defaults when None.
            use_tqdm: show a progress bar.
            priority: with scheduling_policy="priority", one number per prompt; lower runs first.
            lora_request: the adapter to generate with: one for all prompts, or one or None per prompt. It is loaded at first.

        Raises:
            ConfigError: an adapter can't be loaded, or the engine serves none.
            InvalidRequestError: a prompt or its parameters are bad; nothing has run.
            EngineSleepingError: call `wake_up` first.
            EngineDeadError: a step has failed; make a new LLM.
        """
        items = _each(prompts)
        if len(items) > limits.MAX_PROMPTS_PER_CALL * 1_000:
            raise InvalidRequestError(f"{len(items)} prompts in one call are too many.", param="prompts")
        wanted = sampling_params or self._frontend.default_sampling_params
        params = self._one_each("sampling_params", wanted, len(items))
        priorities = self._one_each("priority", priority if priority is not None else 0, len(items))
        adapters = self._load_adapters(self._one_each("lora_request", lora_request, len(items)))
        with seldom_collected():
            return self._run(items, params, priorities, use_tqdm, kind="final_only", adapters=adapters)

    def _load_adapters(self, requests: Sequence[LoRARequest | None]) -> list[str]:
        """The names of these adapters, "" for none, which are loaded unless their names are known."""
        wanted: dict[str, LoRARequest] = {}
        if any(requests):
            with self._whole():
                self._core.poll_adapters()  # a load whose wait was interrupted may have ended
        for one in (one for one in requests if one is not None):
            if not isinstance(one, LoRARequest):
                raise InvalidRequestError(f"lora_request must be a LoRARequest, got {show(one)}.", param="lora_request")
            if (first := wanted.get(one.lora_name)) is not None:
                if one.lora_path not in ("", first.lora_path):
                    raise InvalidRequestError(
                        f"lora_request gives the name {show(one.lora_name)} to two directories, {show(first.lora_path)} and "
                        f"{show(one.lora_path)}; each adapter needs a name of its own.",
                        param="lora_request",
                    )
                continue
            known = self._core.adapters.books.names.get(one.lora_name)
            if known is None or one.load_inplace:
                wanted[one.lora_name] = one
            else:
                known.check(one)
        if wanted:
            with self._whole():
                numbers = self._core.begin_adapters(wanted.values())
            there = False
            while not there:  # an interrupt ends the wait: a directory may never answer
                with self._whole():
                    there = self._core.loaded_adapters(numbers) is not None
        return ["" if one is None else one.lora_name for one in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the checkpoint's chat template.

        Args:
            messages: mappings with `role` and `content`, or a list of such conversations.
            sampling_params, use_tqdm, lora_request: see `generate`.
            add_generation_prompt: end the prompt with the beginning of the assistant's turn.
            continue_final_message: the last message is the beginning of the answer; needs add_generation_prompt=False.
            tools: what may be called, as OpenAI's clients describe it. The answer's text holds the calls as the model writes
                them; only the server reads them.
            chat_template: a Jinja text instead of the checkpoint's.
            chat_template_kwargs: more variables of the template, such as {"enable_thinking": False}.

        Raises:
            InvalidRequestError: the template refuses a conversation, or a prompt or parameter is bad; nothing has run.
        """
        one = isinstance(messages, dict) or bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        variables = chat_template_kwargs or {}
        for name in ("messages", *(("tools",) if tools is not None else ())):
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs may not set {name}, which is an argument of its own.",
                    param="chat_template_kwargs",
                )
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        if chat_template is not None:
            options["chat_template"] = chat_template
        prompts = [self._render(conversation, options, continue_final_message) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[list[float]]:
        """One vector for each prompt, as the checkpoint, or the argument `pooler_config`, says it is pooled.

        Raises:
            ConfigError: neither of them says it.
            InvalidRequestError, RequestFailedError: a prompt is bad, and nothing has run; the engine has made no vector of one.
        """
        pooler = self._frontend.pooler
        if pooler is None:
            raise ConfigError(
                'The model has no modules.json; say how it is pooled: pooler_config={"pooling_type": "LAST"}.'
            )
        items = _each(prompts)
        with seldom_collected():
            params = [POOLING_PARAMS] * len(items)
            outputs = self._run(items, params, [0] * len(items), use_tqdm, pooling=pooler.kind)
        return [pooler.finish(output).tolist() for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt and yield its state whenever it has new tokens; closing the iterator early aborts it.

        With `output_kind="delta"` an output holds only what is new.

        Raises:
            InvalidRequestError: on the first `next`, if the prompt or its parameters are bad.
            EngineSleepingError: on a `next` while the engine sleeps or is paused. After `wake_up` the stream goes on.
        """
        params = sampling_params or self._frontend.default_sampling_params
        return _Stream(self._stream(prompt, params, lora_request))

    def _stream(
        self, prompt: Prompt, params: SamplingParams, lora_request: LoRARequest | None
    ) -> Generator[RequestOutput | EngineSleepingError, None, None]:
        request_id = str(next(self._ids))
        arrived: deque[RequestOutput] = deque()
        finished = False
        try:
            while not finished:
                if request_id in self._lost:
                    raise RequestFailedError("An interrupt has left the output of this stream halfway; ask again.")
                try:
                    if request_id not in self._streams:
                        adapters = self._load_adapters([lora_request])
                        self._submit([request_id], [prompt], [params], [0], adapters=adapters)
                        self._streams[request_id] = arrived
                    if not arrived:
                        self._step()
                except EngineSleepingError as error:
                    yield error
                while arrived:
                    output = arrived.popleft()
                    finished = output.finished
                    yield output
        finally:
            self._streams.pop(request_id, None)
            self._lost.discard(request_id)
            if not finished:
                self._drop([request_id])

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """`stream` for a conversation, rendered by the checkpoint's chat template."""
        return self.stream(self._render(messages, {"add_generation_prompt": True}), sampling_params)

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Free memory until `wake_up`: level 0 pauses, 1 frees the pages, 2 the weights too.

        `mode` says what becomes of suspended streams. "abort" ends them. "wait" finishes them first, those of a paused engine
        too. "keep" goes on with them after waking.

        Raises:
            ConfigError: the engine has no sleep mode, or an argument is wrong.
            EngineSleepingError: the engine sleeps at level 1 or 2, so that "wait" can't finish what is unfinished.
            CapacityError: the weights can't be kept in host memory.
        """
        with self._whole():
            pass  # repair what an interrupt of the last call left, before the core is asked for anything
        self._core.prepare_sleep(level, mode)  # this may wait, and can be interrupted
        while mode == "wait" and self._core.has_work:
            self._step()
        with self._whole():
            try:
                self._advance(self._core.sleep(level, mode))
            finally:
                self._advance(self._core.take_unreported())

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: "weights", "kv_cache", or all (None)."""
        with self._whole():
            pass
        self._core.wake_up(tags)

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Join the group of a trainer, which sends new weights: {"init_info": {"master_address", "master_port", "rank_offset", "world_size"}}.

        The trainer is rank 0 and has a TCPStore at that address; see `docs/rl.md`. Waits until all are there.

        Raises:
            ConfigError: the engine was started without weight_transfer_config.
            InvalidRequestError: a field is missing or wrong, or the address is another machine's.
            RequestFailedError: not all have come in time.
        """
        self._core.change_weights(read_request(request, WeightTransferInitRequest).init_info)

    def start_weight_update(self) -> None:
        """Begin an update of the weights. Nothing runs until its finish."""
        try:
            with self._whole():
                self._core.change_weights(StartUpdate())
        finally:
            with self._whole():
                self._advance(self._core.take_unreported())

    def update_weights(self, request: Any) -> None:
        """Take tensors that the trainer broadcasts meanwhile: {"update_info": {"names", "dtype_names", "shapes", "packed"}}.

        Names, dtypes and shapes are those of a checkpoint, and are checked before the first byte is received.

        Raises:
            InvalidRequestError: one of them isn't the model's. The update has ended, and has changed nothing unless other calls have.
            CheckpointError, RequestFailedError: a number is NaN or infinite, or the trainer is gone. Nothing runs until all weights have been
                sent again, or `sleep(level=2)` and `wake_up` have read the checkpoint.
        """
        self._core.change_weights(read_request(request, WeightTransferUpdateRequest).update_info)

    def finish_weight_update(self) -> None:
        """End the update, and forget cached prompts. Raises InvalidRequestError if tensors are missing, as `update_weights` does."""
        with self._whole():
            self._core.change_weights(FinishUpdate())

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks, which is how many processes a trainer's group has beside the trainer; without `include_dp` of one team."""
        return self._config.num_ranks // (1 if include_dp else self._config.teams)

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        """vLLM's call of any function on its ranks, which is refused. Raises ConfigError that names what is there instead."""
        raise ConfigError(NO_RPC)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt pages. Returns False when some belong to running requests."""
        with self._whole():
            return self._core.reset_prefix_cache()

    def _render(self, messages: Sequence[Message], options: dict[str, Any], goes_on: bool = False) -> Prompt:
        # Here the template runs in the caller's process. A server has it in processes of its own, since one that never ends
        # would cost other clients their answers; here it costs its caller only, whom Ctrl-C helps. It is sandboxed all the
        # same, and nothing of it is computed before it runs.
        tokenizer = self.get_tokenizer()
        check_continues(goes_on, bool(options["add_generation_prompt"]))
        shown = plain_messages(messages)
        text = tokenizer.apply_chat_template(with_marked_end(shown) if goes_on else shown, **options)
        text = up_to_mark(text) if goes_on else text
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    @staticmethod
    def _one_each(name: str, value: Any, length: int) -> list[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [value] * length
        if len(value) != length:
            raise InvalidRequestError(f"{name} has {len(value)} entries for {length} prompts.", param=name)
        return list(value)

    def _submit(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        pooling: Pooling | None = None,
        kind: OutputKind | None = None,
        adapters: Sequence[str] | None = None,
    ) -> None:
        """Queue all prompts. If it raises, some may be queued, and the caller drops them. Pages of the first may come from another memory while the others are read."""
        self._core.check_awake()  # also where it is only paused: no other caller could wake the engine up
        adapters = adapters or [""] * len(prompts)
        batch, tokens = list[tuple[str, Prompt, list[EngineRequest]]](), 0
        for name, prompt, one, priority, lora in zip(request_ids, prompts, params, priorities, adapters, strict=True):
            requests = self._frontend.inputs.process(prompt, one, name, priority, pooling=pooling, lora=lora)
            batch.append((name, prompt, requests))
            tokens += len(requests[0].prompt_token_ids)
            if tokens >= _QUEUED_AT_ONCE or name == request_ids[-1]:
                with self._whole():
                    for known, text, some in batch:
                        self._outputs.add(known, shown_text(text), some, kind)
                        for request in some:
                            self._core.add(request, ids_checked=True)
                batch, tokens = [], 0

    def _drop(self, request_ids: Sequence[str]) -> None:
        with self._whole():
            for request_id in request_ids:
                self._core.abort(self._outputs.abort(request_id))

    def _step(self) -> list[RequestOutput]:
        """Run one step of the core and update the requests. Returns the outputs that no stream waits for."""
        with self._whole():
            return self._advance(self._core.step())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Goes around every change of the requests, here and in the core. Both agree before it and after it.

        Raises RuntimeError in a fork of the process, and while another thread is inside. A Ctrl-C is put off until the end. A second Ctrl-C, or an
        interrupt raised by other means, isn't put off and leaves the work halfway. The next call then repairs it first, and
        only requests of streams survive that.
        """
        self._home.check()
        thread = threading.get_ident()
        if self._worker not in (0, thread) and any(one.ident == self._worker for one in threading.enumerate()):
            raise RuntimeError("An LLM serves one thread at a time, and another one is in a call; use AsyncEngine.")
        with HeldInterrupts():
            self._worker = thread
            try:
                if self._halfway:
                    self._recover()
                self._halfway = True
                try:
                    yield
                except Exception:  # a refusal, or the core is dead and says so
                    self._halfway = False
                    raise
                self._halfway = False
            finally:
                self._worker = 0

    def _recover(self) -> None:
        """Repair what an interrupt has left halfway. Streams go on. Other requests are gone."""
        arriving = {update.request_id for update in self._arriving}
        for request_id in self._outputs.request_ids:
            if request_id not in self._streams:
                self._outputs.abort(request_id)
        going_on = []
        for request_id, arrived in self._streams.items():
            sequences = self._outputs.unfinished(request_id)
            if sequences and arriving.isdisjoint(self._outputs.sequences(request_id)):
                going_on += sequences
            elif not (arrived and arrived[-1].finished):
                self._lost.add(request_id)  # it isn't known how far its text has come
        self._core.recover(going_on)
        self._arriving = []
        self._halfway = False

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool,
        pooling: Pooling | None = None,
        kind: OutputKind | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends. If this call ends earlier, by an interrupt too, the requests end as well."""
        order = [str(next(self._ids)) for _ in prompts]
        with tqdm(total=len(order), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            try:
                self._submit(order, prompts, params, priorities, pooling, kind, adapters)
                return self._outputs_of(order, bar)
            except BaseException:
                self._drop(order)
                raise

    def _outputs_of(self, order: list[str], bar: tqdm) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        waiting = set(order)
        generated = 0
        while waiting:
            for output in self._step():
                if output.finished and output.request_id in waiting:
                    waiting.remove(output.request_id)
                    done[output.request_id] = output
                    generated += sum(len(one.token_ids) for one in output.outputs)
                    rate = generated / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"output: {rate:.1f} tok/s", refresh=False)
                    bar.update()
        return [done[request_id] for request_id in order]

    def _advance(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        self._arriving = updates
        outputs, stopped = self._outputs.process(updates)
        if stopped:
            self._core.abort(stopped)
        rest: list[RequestOutput] = []
        for output in outputs:  # a suspended stream's outputs wait for it while another call runs the engine
            self._streams.get(output.request_id, rest).append(output)
        self._arriving = []
        return rest


class _Stream(Generator[RequestOutput, None, None]):
    """Hands on what a generator yields. It raises the errors among that, and goes on afterwards, as no generator can."""

    def __init__(self, inner: Generator[RequestOutput | EngineSleepingError, None, None]) -> None:
        self._inner = inner

    def send(self, value: None) -> RequestOutput:
        """See Generator.send."""
        return self._output(self._inner.send(value))

    def throw(self, *error: Any) -> RequestOutput:
        """See Generator.throw."""
        return self._output(self._inner.throw(*error))

    @staticmethod
    def _output(got: RequestOutput | EngineSleepingError) -> RequestOutput:
        if isinstance(got, EngineSleepingError):
            raise got
        return got
