"""LLM: offline inference in this process, with vLLM's interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
from tqdm import tqdm

from pagerunner import limits
from pagerunner.config import engine_args
from pagerunner.engine.core.core import SleepMode
from pagerunner.engine.core.garbage import seldom_collected
from pagerunner.engine.core.messages import StartUp
from pagerunner.engine.frontend.frontend import build_frontend
from pagerunner.engine.frontend.input_processor import POOLING_PARAMS
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.hub import fetch_checkpoint
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.memory.planner import MemoryPlan
from pagerunner.sched.stats import SchedulerStats
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import OutputKind, Pooling, RequestOutput, RequestUpdate, SamplingParams

Prompt = str | dict[str, Any]
Message = dict[str, Any]


class LLM:
    """A model loaded and ready to generate.

    Arguments are the fields of `pagerunner.config.EngineArgs`, which are vLLM's.

        >>> llm = LLM("Qwen/Qwen3-0.6B", max_model_len="auto")  # or a directory
        >>> [output] = llm.generate("Hello, my name is", SamplingParams(temperature=0))
        >>> output.outputs[0].text

    Raises:
        ConfigError: an argument or a config field is wrong or unsupported.
        CheckpointError: the directory is not a complete checkpoint.
        CapacityError: the memory cannot hold one request of the wanted length.
    """

    def __init__(self, model: str, tokenizer: str | None = None, *, use_tqdm: bool = True, **kwargs: Any) -> None:
        args = fetch_checkpoint(engine_args(model=str(model), tokenizer=tokenizer, **kwargs), show_progress=use_tqdm)
        resolved = resolve(args)
        with _loading_bar(use_tqdm) as progress:
            self._core = build_from(resolved, progress)
        self._config = resolved.config
        self._frontend = build_frontend(args, self._core.memory_plan.max_model_len)
        self._outputs = self._frontend.outputs
        self._ids = count()
        self._streams: dict[str, deque[RequestOutput]] = {}

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
        return self._core.stats()

    def memory_state(self) -> dict[str, Any]:
        """Who holds the page memory now, as plain JSON values.

        `groups` list each group's slabs and cached pages, `requests` each running request's pages, as runs [first, count]
        of ids; see `memory/ownership.py`. Between calls of `generate` nothing runs; a `stream` may be looked at midway.
        """
        state: dict[str, Any] = msgspec.to_builtins(self._core.memory_state())
        return state

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError when it was switched off."""
        return self._frontend.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the checkpoint's generation_config.json over the defaults."""
        return self._frontend.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the prompts' order.

        Args:
            prompts: a string, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`, or a list of these.
            sampling_params: one for all, or one per prompt; the checkpoint's defaults when None.
            use_tqdm: show a progress bar.
            priority: with scheduling_policy="priority", one number per prompt; lower runs first.

        Raises:
            InvalidRequestError: a prompt or its parameters are bad; nothing has run.
            EngineSleepingError: call `wake_up` first.
            EngineDeadError: a step has failed; make a new LLM.
        """
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        if any(isinstance(item, int) for item in items):
            raise InvalidRequestError('Token ids are passed as {"prompt_token_ids": [...]}.', param="prompts")
        if len(items) > limits.MAX_PROMPTS_PER_CALL * 1_000:
            raise InvalidRequestError(f"{len(items)} prompts in one call are too many.", param="prompts")
        params = self._one_each(
            "sampling_params", sampling_params or self._frontend.default_sampling_params, len(items)
        )
        priorities = self._one_each("priority", priority if priority is not None else 0, len(items))
        with seldom_collected():
            return self._run(self._submit(items, params, priorities, kind="final_only"), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the checkpoint's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self._render(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[list[float]]:
        """One vector for each prompt, as the checkpoint, or the argument `pooler_config`, says it is pooled.

        Raises:
            ConfigError: neither says it.
            InvalidRequestError: a prompt is bad; nothing has run.
        """
        pooler = self._frontend.pooler
        if pooler is None:
            raise ConfigError(
                'The model has no modules.json; say how it is pooled: pooler_config={"pooling_type": "LAST"}.'
            )
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        with seldom_collected():
            order = self._submit(items, [POOLING_PARAMS] * len(items), [0] * len(items), pooler.kind)
            outputs = self._run(order, use_tqdm)
        return [pooler.finish(output.pooled or ()).tolist() for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt and yield its state whenever it has new tokens; closing the iterator early aborts it.

        With `output_kind="delta"` an output holds only what is new.

        Raises:
            InvalidRequestError: on the first `next`, if the prompt or its parameters are bad.
        """
        [request_id] = self._submit([prompt], [sampling_params or self._frontend.default_sampling_params], [0])
        arrived = self._streams[request_id] = deque()
        finished = False
        try:
            while not finished:
                if not arrived:
                    self._advance(self._core.step())
                while arrived:
                    output = arrived.popleft()
                    finished = output.finished
                    yield output
        finally:
            del self._streams[request_id]
            if not finished:
                self._drop([request_id])

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """`stream` for a conversation, rendered by the checkpoint's chat template."""
        return self.stream(self._render(messages, add_generation_prompt=True), sampling_params)

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Free memory until `wake_up`: level 0 pauses, 1 frees the pages, 2 the weights too."""
        self._advance(self._core.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: "weights", "kv_cache", or all (None)."""
        self._core.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt pages. Returns False when some belong to running requests."""
        return self._core.reset_prefix_cache()

    def _render(self, messages: Sequence[Message], **options: Any) -> Prompt:
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(list(messages), **options)
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    @staticmethod
    def _one_each(name: str, value: Any, length: int) -> list[Any]:
        if not isinstance(value, Sequence):
            return [value] * length
        if len(value) != length:
            raise InvalidRequestError(f"{name} has {len(value)} entries for {length} prompts.", param=name)
        return list(value)

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        pooling: Pooling | None = None,
        kind: OutputKind | None = None,
    ) -> list[str]:
        """Queue every prompt or none; returns the request ids in order."""
        batches = []
        for prompt, one_params, one_priority in zip(prompts, params, priorities, strict=True):
            request_id = str(next(self._ids))
            process = self._frontend.inputs.process
            batches.append((request_id, prompt, process(prompt, one_params, request_id, one_priority, pooling=pooling)))
        added: list[str] = []
        try:
            for request_id, prompt, requests in batches:
                text = prompt if isinstance(prompt, str) else prompt.get("prompt")
                self._outputs.add(request_id, text, requests, kind)
                added.append(request_id)
                for request in requests:
                    self._core.add(request)
        except BaseException:
            self._drop(added)
            raise
        return added

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._core.abort(self._outputs.abort(request_id))

    def _run(self, order: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(order), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True)
        generated = 0
        try:
            while len(done) < len(order):
                outputs = self._advance(self._core.step())
                for output in outputs:
                    if output.finished:
                        done[output.request_id] = output
                        generated += sum(len(one.token_ids) for one in output.outputs)
                        rate = generated / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"output: {rate:.1f} tok/s", refresh=False)
                        bar.update()
        except BaseException:
            self._drop([request_id for request_id in order if request_id not in done])
            raise
        finally:
            bar.close()
        return [done[request_id] for request_id in order]

    def _advance(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        outputs, stopped = self._outputs.process(updates)
        if stopped:
            self._core.abort(stopped)
        rest: list[RequestOutput] = []
        for output in outputs:  # a suspended stream's outputs wait for it while another call runs the engine
            self._streams.get(output.request_id, rest).append(output)
        return rest


@contextmanager
def _loading_bar(show: bool) -> Iterator[Callable[[int, int], None]]:
    bar = tqdm(desc="Loading weights", unit="B", unit_scale=True, disable=None if show else True, leave=False)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        bar.close()
