"""Scores count exact matches and nothing else."""

from __future__ import annotations

import json

import pytest

from pagerunner.errors import ConfigError
from pagerunner.eval.runner import evaluate, question
from pagerunner.eval.tasks import make_examples
from pagerunner.types import CompletionOutput, RequestOutput


class Knowing:
    """Answers from the examples' own key; `spoil` turns an answer into the text and finish reason given."""

    def __init__(self, spoil=lambda index, answer: (answer, "stop")):
        self.spoil = spoil
        self.asked = []

    def _outputs(self, prompts, examples):
        outputs = []
        for index, prompt in enumerate(prompts):
            text, reason = self.spoil(index, examples[prompt].answer)
            completion = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=reason)
            outputs.append(
                RequestOutput(request_id="0", prompt=prompt, prompt_token_ids=[], outputs=[completion], finished=True)
            )
        return outputs

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        self.asked += prompts
        return self._outputs(prompts, {example.prompt: example for example in known()})

    def chat(self, messages, sampling_params=None, use_tqdm=True):
        questions = [conversation[-1]["content"] for conversation in messages]
        self.asked += questions
        return self._outputs(questions, {question(example): example for example in known()})


def known():
    for task in ("addition", "sorting", "sentences"):
        yield from make_examples(task, 10, 0)
    for distance in (64, 256):
        yield from make_examples("recall", 10, 0, distance)


def score(llm, **kwargs):
    return evaluate(llm, count=10, distances=(64, 256), **kwargs)


def test_right_answers_score_one():
    report = score(Knowing())
    names = ["recall @ 64", "recall @ 256", "addition", "sorting", "sentences"]
    assert [s.name for s in report.scores] == names
    assert all(s.accuracy == 1.0 for s in report.scores)
    assert report.accuracy("recall") == report.accuracy("recall", 64) == 1.0


def test_a_wrong_character_or_a_missing_end_counts_as_wrong():
    report = score(Knowing(lambda index, answer: (answer + "x", "stop") if index < 3 else (answer, "stop")))
    assert report.accuracy("addition") == 0.7
    report = score(Knowing(lambda index, answer: (answer, "length" if index < 4 else "stop")))
    assert report.accuracy("sorting") == 0.6


def test_chat_sends_the_bare_question():
    llm = Knowing()
    assert score(llm, as_chat=True).accuracy("addition") == 1.0
    assert llm.asked and not any("<|" in text for text in llm.asked)


def test_reports_print_and_encode():
    report = score(Knowing(), model="demo")
    assert "recall @ 256     1.000  10 of 10" in report.text()
    decoded = json.loads(report.as_json())
    assert decoded["model"] == "demo" and decoded["scores"][0]["accuracy"] == 1.0


def test_bad_arguments():
    with pytest.raises(ConfigError, match="unknown task 'singing'"):
        evaluate(Knowing(), tasks=["singing"])
    with pytest.raises(ConfigError, match="count must be at least 1"):
        evaluate(Knowing(), count=0)
    with pytest.raises(ValueError, match="no score of task"):
        score(Knowing(), tasks=["addition"]).accuracy("recall")
