"""Exact-match scores of a model on the tasks. A fault in paged memory shows here as a fall of recall."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pagerunner.errors import ConfigError, RequestFailedError
from pagerunner.eval.tasks import ASSISTANT, BOS, END, RECALL_DISTANCES, TASKS, USER, Example, make_examples
from pagerunner.types import RequestOutput, SamplingParams


class Generator(Protocol):
    """What an evaluation needs of `LLM`."""

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run the prompts to their end and return their outputs in order."""

    def chat(self, messages: Any, sampling_params: Any = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """The same for conversations, through the model's chat template."""


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """Exact matches of one task; recall has one score per distance (tokens between facts and question)."""

    task: str
    distance: int | None
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of exact matches."""
        return self.correct / self.total

    @property
    def name(self) -> str:
        """`recall @ 512`, or the task's name."""
        return self.task if self.distance is None else f"{self.task} @ {self.distance}"


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The scores in the order they ran, and the seconds they took."""

    model: str
    scores: list[TaskScore]
    seconds: float

    def accuracy(self, task: str, distance: int | None = None) -> float:
        """Accuracy of a task; of recall over all distances unless one is named.

        Raises:
            ValueError: no such task ran.
        """
        rows = [s for s in self.scores if s.task == task and (distance is None or s.distance == distance)]
        if not rows:
            raise ValueError(f"no score of task {task!r} at distance {distance!r}")
        return sum(s.correct for s in rows) / sum(s.total for s in rows)

    def text(self) -> str:
        """The table for a person."""
        width = max(len("task"), *(len(score.name) for score in self.scores))
        lines = [f"{'task':<{width}}  accuracy  correct"]
        lines += [f"{s.name:<{width}}  {s.accuracy:>8.3f}  {s.correct} of {s.total}" for s in self.scores]
        return "\n".join([*lines, f"{self.model}, {self.seconds:.1f} s"])

    def as_json(self) -> str:
        """One JSON object; each score carries its accuracy."""
        rows = [{**msgspec.structs.asdict(score), "accuracy": score.accuracy} for score in self.scores]
        return msgspec.json.encode({"model": self.model, "seconds": self.seconds, "scores": rows}).decode()


def evaluate(
    llm: Generator,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    count: int = 50,
    seed: int = 0,
    distances: Sequence[int] = RECALL_DISTANCES,
    as_chat: bool = False,
    use_tqdm: bool = False,
    model: str = "model",
) -> EvalReport:
    """Score `count` examples of each task (of recall, at each distance), decoded greedily.

    The prompts are marked up for the demo model; `as_chat` sends their questions through the model's own template.
    An answer counts if the text is exactly the expected one and the model ended its turn itself.

    Raises:
        ConfigError: no task is named, one is unknown or the count isn't positive.
        RequestFailedError: an example failed, which is no wrong answer.
    """
    if not tasks:
        raise ConfigError(f"no task is named; there are {', '.join(TASKS)}.")
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ConfigError(f"unknown task {unknown[0]!r}; there are {', '.join(TASKS)}.")
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}.")
    started = time.perf_counter()
    scores = []
    for task in tasks:
        for distance in distances if task == "recall" else (None,):
            examples = make_examples(task, count, seed, distance)
            correct = sum(_answer(llm, examples, as_chat, use_tqdm))
            scores.append(TaskScore(task=task, distance=distance, correct=correct, total=count))
    return EvalReport(model=model, scores=scores, seconds=time.perf_counter() - started)


def _answer(llm: Generator, examples: Sequence[Example], as_chat: bool, use_tqdm: bool) -> list[bool]:
    params = [SamplingParams(temperature=0.0, max_tokens=len(example.answer) + 16) for example in examples]
    if as_chat:
        messages = [[{"role": "user", "content": question(example)}] for example in examples]
        outputs = llm.chat(messages, params, use_tqdm=use_tqdm)
    else:
        outputs = llm.generate([example.prompt for example in examples], params, use_tqdm=use_tqdm)
    if error := next((output.error for output in outputs if output.error), None):
        raise RequestFailedError(f"An answer can't be scored: {error}")
    return [
        output.outputs[0].finish_reason == "stop" and output.outputs[0].text.strip() == example.answer
        for example, output in zip(examples, outputs, strict=True)
    ]


def question(example: Example) -> str:
    """The user's message inside an example's marked-up prompt."""
    return example.prompt.removeprefix(BOS + USER).removesuffix(END + ASSISTANT)
