"""Updates to outputs: kinds, stop strings, endings, log-probabilities, several sequences."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.engine.frontend.drafts import DraftLog
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.errors import InvalidRequestError
from pagerunner.types import OutputKind, RequestOutput, RequestUpdate, SamplingParams, SpeculativeMetrics, TokenLogprobs
from text.tokenizers_for_tests import tokenizer

EOS = 1
TEXT = "the fox and the dog; don't stop"


def start(params: SamplingParams, text: bool = True, request_id: str = "r") -> OutputProcessor:
    one = OutputProcessor(tokenizer("byte_level") if text else None, clock=lambda: 5.0)
    add(one, params, request_id, text)
    return one


def add(one: OutputProcessor, params: SamplingParams, request_id: str, text: bool = True) -> None:
    backend = tokenizer("byte_level") if text else None
    inputs = InputProcessor(backend, vocab_size=400, max_model_len=1000, eos_token_ids=(EOS,))
    one.add(request_id, "shown prompt", inputs.process([5, 6], params, request_id))


def encode(text: str = TEXT) -> list[int]:
    return tokenizer("byte_level").encode(text)


def update(*tokens: int, to: str = "r", **fields: object) -> RequestUpdate:
    return RequestUpdate(request_id=to, new_token_ids=list(tokens), **fields)


def feed(one: OutputProcessor, tokens: list[int], **last: object) -> tuple[list[RequestOutput], list[str]]:
    """One token per update; `last` goes into the last one."""
    outputs: list[RequestOutput] = []
    aborts: list[str] = []
    for place, token in enumerate(tokens):
        found, ended = one.process([update(token, **(last if place == len(tokens) - 1 else {}))])
        outputs += found
        aborts += ended
    return outputs, aborts


def test_cumulative_shows_everything_so_far() -> None:
    outputs, aborts = feed(start(SamplingParams()), encode(), finish_reason="length")
    assert aborts == [] and len(outputs) == len(encode())
    for count, output in enumerate(outputs, 1):
        completion = output.outputs[0]
        assert completion.token_ids == encode()[:count]
        assert completion.text == tokenizer("byte_level").decode(encode()[:count])
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "shown prompt", [5, 6])
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length" and outputs[-1].outputs[0].finished()


def test_deltas_add_up() -> None:
    outputs, _ = feed(
        start(SamplingParams(output_kind="delta", stop="zzz")), encode("zz 😀 zz"), finish_reason="length"
    )
    assert "".join(o.outputs[0].text for o in outputs) == "zz 😀 zz"
    assert [t for o in outputs for t in o.outputs[0].token_ids] == encode("zz 😀 zz")
    assert outputs[0].outputs[0].text == ""


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_final_only_comes_once(stop: tuple[str, ...]) -> None:
    [output], _ = feed(start(SamplingParams(output_kind="final_only", stop=stop)), encode(), finish_reason="length")
    assert output.finished and (output.outputs[0].text, output.outputs[0].token_ids) == (TEXT, encode())


@pytest.mark.parametrize("wanted", ["cumulative", "delta"])
def test_another_kind_than_the_requests_own(wanted: OutputKind) -> None:
    backend = tokenizer("byte_level")
    one, inputs = (
        OutputProcessor(backend),
        InputProcessor(backend, vocab_size=400, max_model_len=1000, eos_token_ids=()),
    )
    one.add("r", None, inputs.process([5, 6], SamplingParams(output_kind=wanted), "r"), "final_only")
    before = backend.num_decodes
    [output], _ = feed(one, encode(), finish_reason="length")
    assert output.finished and (output.outputs[0].text, output.outputs[0].token_ids) == (TEXT, encode())
    assert backend.num_decodes == before + 1


def test_final_only_without_stop_strings_decodes_once() -> None:
    before = tokenizer("byte_level").num_decodes
    feed(start(SamplingParams(output_kind="final_only")), encode(), finish_reason="length")
    assert tokenizer("byte_level").num_decodes == before + 1


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(kind: str, include: bool) -> None:
    params = SamplingParams(stop=["the dog"], include_stop_str_in_output=include, output_kind=kind)
    one = start(params)
    outputs, aborts = feed(one, encode())
    text = "".join(o.outputs[0].text for o in outputs) if kind == "delta" else outputs[-1].outputs[0].text
    last = outputs[-1].outputs[0]
    assert text == ("the fox and the dog" if include else "the fox and ")
    assert (last.finish_reason, last.stop_reason, outputs[-1].finished) == ("stop", "the dog", True)
    assert aborts == ["r"]
    kept = [t for o in outputs for t in o.outputs[0].token_ids] if kind == "delta" else last.token_ids
    assert tokenizer("byte_level").decode(kept) == "the fox and the dog"
    assert one.process([update(9), update(9, finish_reason="abort")]) == ([], [])
    assert one.request_ids == []


def test_nothing_of_a_stop_string_leaks() -> None:
    outputs, _ = feed(start(SamplingParams(stop=["and the cat", "dog;"])), encode())
    shown = [o.outputs[0].text for o in outputs]
    assert shown[-1] == "the fox and the "
    assert all(shown[-1].startswith(text) for text in shown)


def test_tokens_after_a_stop_string_in_one_update_are_dropped() -> None:
    ids = encode("a fox! b c")
    entries = [TokenLogprobs(t, -1.0, 1, [], []) for t in ids]
    outputs, aborts = start(SamplingParams(stop="fox!", logprobs=0)).process([update(*ids, logprobs=entries)])
    completion = outputs[0].outputs[0]
    assert completion.text == "a " and aborts == ["r"]
    assert tokenizer("byte_level").decode(completion.token_ids) == "a fox!"
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob == -len(completion.token_ids)


def test_a_stop_string_beats_the_length_and_needs_no_abort() -> None:
    outputs, aborts = feed(start(SamplingParams(stop="stop")), encode(), finish_reason="length")
    assert outputs[-1].outputs[0].finish_reason == "stop" and outputs[-1].outputs[0].stop_reason == "stop"
    assert outputs[-1].outputs[0].text == TEXT.removesuffix("stop") and aborts == []


def test_min_tokens_defers_stop_strings() -> None:
    ids = encode("a b a b a b")  # b is token 3, 7 and 11
    assert len(ids) == 11
    for min_tokens, shown in ((2, "a "), (3, "a b a "), (6, "a b a "), (7, "a b a b a ")):
        outputs, aborts = feed(start(SamplingParams(stop="b", min_tokens=min_tokens)), ids)
        assert outputs[-1].outputs[0].text == shown and aborts == ["r"]
    outputs, aborts = feed(start(SamplingParams(stop="b", min_tokens=11)), ids, finish_reason="length")
    assert outputs[-1].outputs[0].text == "a b a b a b" and outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["cumulative", "final_only"])
@pytest.mark.parametrize(("token", "reason"), [(EOS, None), (7, 7)])
@pytest.mark.parametrize("keep", [False, True])
def test_the_token_that_stops_is_counted_but_not_shown(kind: str, token: int, reason: int | None, keep: bool) -> None:
    params = SamplingParams(
        stop_token_ids=[7], skip_special_tokens=False, include_stop_str_in_output=keep, output_kind=kind
    )
    outputs, _ = feed(start(params), [*encode("fox"), token], finish_reason="stop", stop_reason=reason)
    completion = outputs[-1].outputs[0]
    assert completion.token_ids == [*encode("fox"), token]
    assert completion.text == ("fox" + tokenizer("byte_level").decode([token], False) if keep else "fox")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


def test_special_tokens_are_skipped_unless_asked() -> None:
    ids = [*encode("fox"), 2, *encode("dog")]
    for skip, text in ((True, "foxdog"), (False, "fox<pad>dog")):
        outputs, _ = feed(start(SamplingParams(skip_special_tokens=skip)), ids, finish_reason="length")
        assert outputs[-1].outputs[0].text == text


def test_held_text_comes_out_at_the_end() -> None:
    ids = encode("fox 😀")[:-1]
    outputs, _ = feed(start(SamplingParams(stop="x 😀")), ids, finish_reason="length")
    assert outputs[-1].outputs[0].text == "fox \ufffd"
    assert outputs[-2].outputs[0].text == "fo"


@pytest.mark.parametrize("text", [True, False])
def test_without_detokenising(text: bool) -> None:
    outputs, _ = feed(start(SamplingParams(detokenize=False, logprobs=0), text), [9, 10], finish_reason="length")
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].token_ids) == ("", [9, 10])


def test_logprobs() -> None:
    the, dog = encode("the")[0], encode(" dog")[0]
    first = TokenLogprobs(the, -0.5, 2, [dog, the], [-0.25, -0.5])
    second = TokenLogprobs(dog, -3.0, 9, [the], [-0.125])
    one = start(SamplingParams(logprobs=2))
    one.process([update(the, logprobs=[first])])
    [output], _ = one.process([update(dog, logprobs=[second])])
    completion = output.outputs[0]
    assert completion.cumulative_logprob == -3.5
    found = [[(t, e.logprob, e.rank, e.decoded_token) for t, e in at.items()] for at in completion.logprobs or []]
    assert found == [
        [(the, -0.5, 2, "the"), (dog, -0.25, 1, tokenizer("byte_level").decode([dog]))],
        [(dog, -3.0, 9, tokenizer("byte_level").decode([dog])), (the, -0.125, 1, "the")],
    ]


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_logprobs_of_a_delta_are_its_own(kind: str) -> None:
    one = start(SamplingParams(logprobs=0, output_kind=kind))
    counts = []
    for token in (5, 6, 7):
        [output], _ = one.process([update(token, logprobs=[TokenLogprobs(token, -1.0, 1, [], [])])])
        counts.append([list(at) for at in output.outputs[0].logprobs or []])
    assert counts == ([[[5]], [[6]], [[7]]] if kind == "delta" else [[[5]], [[5], [6]], [[5], [6], [7]]])


def test_prompt_logprobs_begin_with_none_and_may_come_in_parts() -> None:
    entries = [TokenLogprobs(t, -float(t), 1, [], []) for t in (6, 7, 8)]
    one = start(SamplingParams(prompt_logprobs=0))
    one.process([update(prompt_logprobs=[None, entries[0]])])
    [output], _ = one.process([update(9, prompt_logprobs=entries[1:], num_cached_tokens=16)])
    assert [at and {t: e.logprob for t, e in at.items()} for at in output.prompt_logprobs or []] == [
        None, {6: -6.0}, {7: -7.0}, {8: -8.0},
    ]  # fmt: skip
    assert output.num_cached_tokens == 16
    assert start(SamplingParams()).process([update(9)])[0][0].prompt_logprobs is None


def test_prompt_logprobs_come_once_in_deltas() -> None:
    one = start(SamplingParams(prompt_logprobs=0, output_kind="delta"))
    entry = TokenLogprobs(6, -1.0, 1, [], [])
    first = one.process([update(9, prompt_logprobs=[entry])])[0][0]
    second = one.process([update(9)])[0][0]
    assert first.prompt_logprobs is not None and second.prompt_logprobs is None


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_several_sequences_are_one_request(kind: str) -> None:
    one = start(SamplingParams(n=3, output_kind=kind))
    first, _ = one.process([update(9, to="r_2"), update(10, to="r_0")])
    second, _ = one.process([update(11, to="r_0", finish_reason="length"), update(9, to="r_1", finish_reason="length")])
    third, _ = one.process([update(12, to="r_2", finish_reason="length")])
    assert one.request_ids == []
    shown = [
        [[(c.index, c.token_ids, c.finish_reason) for c in o.outputs] for o in part] for part in (first, second, third)
    ]
    final = [(0, [10, 11], "length"), (1, [9], "length"), (2, [9, 12], "length")]
    if kind == "final_only":
        assert shown == [[], [], [final]]
    elif kind == "cumulative":
        assert shown[0] == [[(0, [10], None), (1, [], None), (2, [9], None)]]
        assert shown[2] == [final]
    else:
        assert shown == [
            [[(0, [10], None), (2, [9], None)]],
            [[(0, [11], "length"), (1, [9], "length")]],
            [[(2, [12], "length")]],
        ]
    assert [o.finished for o in first + second + third] == ([True] if kind == "final_only" else [False, False, True])


def test_a_stop_string_ends_one_of_several_sequences() -> None:
    one = start(SamplingParams(n=2, stop="fox"))
    outputs, aborts = one.process([update(*encode("the fox"), to="r_1")])
    assert aborts == ["r_1"] and not outputs[0].finished
    outputs, aborts = one.process([update(9, to="r_1"), update(9, to="r_0", finish_reason="length")])
    assert aborts == [] and outputs[0].finished
    assert [c.finish_reason for c in outputs[0].outputs] == ["length", "stop"]


def test_abort_forgets_the_request() -> None:
    one = start(SamplingParams(n=3))
    one.process([update(9, to="r_1", finish_reason="length")])
    assert one.abort("r") == ["r_0", "r_2"]
    assert one.abort("r") == [] and one.abort("unknown") == []
    assert one.process([update(9, to="r_0")]) == ([], [])
    add(one, SamplingParams(), "r")


def test_an_id_in_use_is_refused() -> None:
    one = start(SamplingParams())
    with pytest.raises(InvalidRequestError, match="'r' is running"):
        add(one, SamplingParams(), "r")


def test_requests_do_not_mix() -> None:
    one = start(SamplingParams())
    add(one, SamplingParams(output_kind="delta"), "s")
    outputs, _ = one.process([update(*encode("fox")), update(*encode("dog"), to="s"), update(9, to="unknown")])
    assert [(o.request_id, o.outputs[0].text) for o in outputs] == [("r", "fox"), ("s", "dog")]


def test_errors_and_aborts_by_the_engine_are_passed_on() -> None:
    [output], _ = start(SamplingParams()).process([update(finish_reason="error", error="The logits hold NaN.")])
    assert (output.outputs[0].finish_reason, output.error, output.finished) == ("error", "The logits hold NaN.", True)
    [output], _ = start(SamplingParams(stop="fox")).process([update(*encode("the f"), finish_reason="abort")])
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "the f")


def test_metrics() -> None:
    one = start(SamplingParams())
    [first], _ = one.process([update(9)])
    [last], _ = one.process([update(9, finish_reason="length")])
    assert first.metrics is not None and (first.metrics.first_token_time, first.metrics.finished_time) == (5.0, None)
    assert last.metrics is not None and last.metrics.finished_time == 5.0 and last.metrics.arrival_time > 0


@settings(max_examples=effort(33, 200), deadline=None)
@given(
    text=st.text("ab😀 ", max_size=25),
    stops=st.lists(st.text("ab😀", min_size=1, max_size=3), max_size=3),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    include=st.booleans(),
)
def test_every_output_kind_ends_with_the_same_text(
    text: str, stops: list[str], chunks: list[int], include: bool
) -> None:
    ids = encode(text) or [9]
    results = []
    for kind in ("cumulative", "delta", "final_only"):
        one = start(SamplingParams(stop=stops, output_kind=kind, include_stop_str_in_output=include))
        outputs, rest, turn = [], ids, 0
        while rest:
            size = chunks[turn % len(chunks)]
            new, rest, turn = rest[:size], rest[size:], turn + 1
            outputs += one.process([update(*new, finish_reason=None if rest else "length")])[0]
        parts = [o.outputs[0] for o in outputs]
        shown = "".join(p.text for p in parts) if kind == "delta" else parts[-1].text
        tokens = [t for p in parts for t in p.token_ids] if kind == "delta" else parts[-1].token_ids
        results.append((shown, tokens, parts[-1].finish_reason, parts[-1].stop_reason))
    assert results[0] == results[1] == results[2]
    if not include and stops:
        assert not any(stop in results[0][0] for stop in stops)


def test_the_end_tells_what_became_of_drafts_if_it_is_to() -> None:
    def told(detailed: bool, n: int = 1) -> list[SpeculativeMetrics | None]:
        one = OutputProcessor(None, new_draft_log=lambda: DraftLog(3, detailed))
        inputs = InputProcessor(None, vocab_size=400, max_model_len=1000, eos_token_ids=(EOS,))
        one.add("r", None, requests := inputs.process([5, 6], SamplingParams(n=n), "r"))
        found: list[RequestOutput] = []
        for place, request in enumerate(requests, 1):
            for drafted, tokens in ((None, [7]), ((3, 2), [7, 8, 9]), ((2, 2), [7, 8, 9])):
                found += one.process([update(*tokens, to=request.request_id, drafted=drafted)])[0]
            last = update(7, to=request.request_id, drafted=(3, 0), finish_reason="length")
            outputs, _ = one.process([last])
            found += outputs
            assert outputs[0].finished is (place == n)
        return [output.metrics.speculative_decoding for output in found if output.metrics is not None]

    *before, last = told(detailed=False)
    assert before == [None] * 3
    expected = SpeculativeMetrics(
        num_spec_tokens=3, num_spec_steps=3, num_draft_tokens=8, num_accepted_draft_tokens=4, mean_acceptance_length=1 + 4 / 3,
        draft_acceptance_rate=0.5, acceptance_histogram=[1, 0, 2, 0], acceptance_histogram_by_draft_length={2: [0, 0, 1], 3: [1, 0, 1, 0]},
    )  # fmt: skip
    assert last == expected
    assert b"per_step" not in msgspec.json.encode(last)
    steps = {"per_step_drafted": [3, 2, 3], "per_step_accepted": [2, 2, 0]}
    assert told(detailed=True)[-1] == msgspec.structs.replace(expected, **steps)
    assert told(detailed=True, n=2) == [None] * 8
