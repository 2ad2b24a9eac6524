"""Structured outputs by a random model: what comes out is valid, whatever the pool, and neighbours notice nothing."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.effort import share_of_the_day
from helpers.graphs import RecordedGraphs
from helpers.patience import LONG
from pagerunner import LLM, SamplingParams, StructuredOutputsParams, limits
from pagerunner.engine.structured_output import grammar as module
from pagerunner.engine.worker import build
from pagerunner.errors import InvalidRequestError
from pagerunner.types import EngineRequest, Grammar

TIGHT = {"max_model_len": 192, "num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_in_flight": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured"), "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), poison_fresh_pages=True, max_num_batched_tokens=48, **TIGHT)


def wants(max_tokens: int = 120, **values: Any) -> SamplingParams:
    other = {name: values.pop(name) for name in list(values) if name in SamplingParams.__struct_fields__}
    return SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**values), **other)


def random_schema(random_: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that a random model completes them."""
    kind = random_.choice(["integer", "string", "enum", "boolean", *["object", "array"] * (depth > 0)])
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": random_.randint(1, 500)}
    if kind == "string":
        return {"type": "string", "maxLength": random_.randint(1, 4)}
    if kind == "enum":
        return {"enum": random_.sample(["red", "green", 1, 2.5, None, True], 3)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "array":
        return {"type": "array", "items": random_schema(random_, depth - 1), "minItems": 1, "maxItems": 2}
    names = random_.sample("abcd", random_.randint(1, 2))
    properties = {name: random_schema(random_, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list) and 1 <= len(value) <= 2 and all(conforms(x, schema["items"]) for x in value)
    return value.keys() == schema["properties"].keys() and all(
        conforms(value[name], inner) for name, inner in schema["properties"].items()
    )


def random_regex(random_: random.Random) -> str:
    pieces = ["[a-f]{1,3}", "(foo|bar)", "[0-9]{2}", "x?", "(ab){1,2}", "-", "é"]
    return "".join(random_.choice(pieces) for _ in range(random_.randint(1, 6)))


@pytest.mark.parametrize("seed", share_of_the_day(4, 2))
def test_what_is_finished_is_valid_in_a_tight_pool_with_two_plans_in_flight(llm: LLM, seed: int) -> None:
    random_ = random.Random(seed)
    before = llm.stats().preemptions_total
    prompts, params, checks = [], [], []
    for index in range(40):
        kind = ("schema", "regex", "choice", "plain")[index % 4]
        options: dict[str, Any] = {"temperature": random_.choice([0.0, 1.0, 1.5]), "seed": index, "n": 1 + index % 2}
        if kind == "schema":
            schema = random_schema(random_)
            params.append(wants(json=schema, disable_any_whitespace=True, **options))
            checks.append(lambda text, schema=schema: conforms(json.loads(text), schema))
        elif kind == "regex":
            regex = random_regex(random_)
            params.append(wants(regex=regex, logprobs=1, **options))
            checks.append(lambda text, regex=regex: re.fullmatch(regex, text) is not None)
        elif kind == "choice":
            choices = ["".join(random_.choices("ab é日", k=random_.randint(1, 9))) for _ in range(3)]
            params.append(wants(choice=choices, **options))
            checks.append(lambda text, choices=choices: text in choices)
        else:
            params.append(SamplingParams(max_tokens=random_.randint(1, 60), ignore_eos=True, **options))
            checks.append(lambda text: True)
        prompts.append({"prompt_token_ids": [random_.randrange(4, 500) for _ in range(random_.randint(1, 90))]})
    outputs = llm.generate(prompts, params, use_tqdm=False)
    complete = 0
    for output, check, one in zip(outputs, checks, params, strict=True):
        assert output.error is None
        for made in output.outputs:
            guided = one.structured_outputs is not None
            if made.finish_reason == "stop" or not guided:
                assert check(made.text), made.text
                complete += guided
            if made.logprobs is not None:
                assert len(made.logprobs) == len(made.token_ids)
    assert complete > 30
    assert llm.stats().preemptions_total > before


def test_neighbours_have_the_tokens_they_have_alone(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(5, 75))}
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    guided = wants(regex="[a-z ]{30}", temperature=1.0, seed=6)
    [plain_alone], [guided_alone] = (llm.generate(prompt, one, use_tqdm=False) for one in (seeded, guided))
    core = llm._core
    for bad in ("no grammar at all", '{"grammars": [{"lark_grammar": "start: /a{1,9}{1,999}{1,999}b{9999}/ x"}]}'):
        core.add(
            EngineRequest(
                request_id=bad, prompt_token_ids=[7] * 20, params=seeded, seed=0, max_tokens=9, grammar=Grammar(bad)
            )
        )
    crowd = llm.generate([prompt, prompt, prompt], [guided, seeded, wants(choice=["yes", "no"])], use_tqdm=False)
    assert crowd[0].outputs[0].token_ids == guided_alone.outputs[0].token_ids
    assert crowd[1].outputs[0].token_ids == plain_alone.outputs[0].token_ids
    assert crowd[2].outputs[0].text in ("yes", "no")
    while core.has_work:
        core.step()


def test_rows_with_masks_of_steps_that_run_in_graphs(
    checkpoint: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [wants(regex="[a-z ]{12}", temperature=0, logprobs=1), wants(choice=["left", "right"], seed=1)]
    params += [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    prompts = [{"prompt_token_ids": list(range(5 + at, 30))} for at in range(4)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    engine = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: engine)
    replayed = LLM(str(checkpoint), attention_backend="triton", max_num_batched_tokens=48, **TIGHT)
    got = replayed.generate(prompts, params, use_tqdm=False)
    assert sum(graph.replays for graph in engine.graphs) > 5
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in expected]


def test_while_a_grammar_compiles_others_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compile_ = threading.Event(), module.compile_grammar

    def slow(*args: Any) -> Any:
        gate.wait(LONG)
        return compile_(*args)

    monkeypatch.setattr(module, "compile_grammar", slow)
    core, wanted = llm._core, Grammar('{"grammars": [{"lark_grammar": "start: \\"only this\\""}]}')
    core.add(
        EngineRequest(
            request_id="g", prompt_token_ids=[7], params=SamplingParams(), seed=0, max_tokens=50, grammar=wanted
        )
    )
    [plain] = llm.generate("abc", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(plain.outputs[0].token_ids) == 5
    assert llm.stats().waiting == 1
    gate.set()
    tokens: list[int] = []
    while core.has_work:
        tokens += [token for update in core.step() for token in update.new_token_ids]
    assert llm.get_tokenizer().decode(tokens) == "only this"


def test_a_grammar_that_never_compiles_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(module, "compile_grammar", lambda *args: gate.wait(LONG))
    llm._frontend.inputs._grammars.check(StructuredOutputsParams(choice=["another text"]))
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SECONDS", 0.3)
    llm.generate("abc", SamplingParams(max_tokens=1), use_tqdm=False)
    [output] = llm.generate("abc", wants(choice=["another text"]), use_tqdm=False)
    gate.set()
    assert output.outputs[0].finish_reason == "error" and "0.3 seconds" in (output.error or "")


def test_the_end_is_only_allowed_where_the_grammar_is_complete(llm: LLM) -> None:
    eos = {0: 100.0}
    [output] = llm.generate("abc", wants(regex="[ab]{6}", logit_bias=eos, ignore_eos=True), use_tqdm=False)
    assert re.fullmatch("[ab]{6}", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    [output] = llm.generate("abc", wants(regex="[ab]+", logit_bias=eos), use_tqdm=False)
    assert re.fullmatch("[ab]+", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    [output] = llm.generate("abc", wants(regex="[ab]+", logit_bias=eos, min_tokens=9), use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 9
    [output] = llm.generate("abc", wants(regex="[ab]{2}", min_tokens=9), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and output.error is None


def test_stop_strings_and_raw_log_probabilities(llm: LLM) -> None:
    [output] = llm.generate("abc", wants(regex="a{5}b{5}", stop="ab"), use_tqdm=False)
    assert output.outputs[0].text == "aaaa" and output.outputs[0].stop_reason == "ab"
    free = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    [plain] = llm.generate("abc", free, use_tqdm=False)
    [guided] = llm.generate("abc", wants(choice=["zzz", "yyy"], logprobs=20, temperature=0), use_tqdm=False)
    best = plain.outputs[0].logprobs[0]
    raw = guided.outputs[0].logprobs[0]
    assert {token: one.logprob for token, one in best.items()}.items() <= {t: o.logprob for t, o in raw.items()}.items()


def test_tokens_that_the_grammar_allows_and_the_request_forbids(llm: LLM) -> None:
    [output] = llm.generate("abc", wants(regex="[0-9]", allowed_token_ids=[0]), use_tqdm=False)
    assert "structured_outputs" in (output.error or "")


def test_behind_a_text(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("fox")
    params = wants(regex="[ab]{4}", after="fox", allowed_token_ids=[*ids, *llm.get_tokenizer().encode("ab")])
    [output] = llm.generate("abc", params, use_tqdm=False)
    text = output.outputs[0].text
    assert "fox" in text or output.outputs[0].finish_reason == "length"
    assert re.fullmatch(r"(?s).*?fox[ab]{0,4}", text) or "fox" not in text


def test_behind_a_text_only_if_the_output_begins_so(llm: LLM) -> None:
    [the] = llm.get_tokenizer().encode("The")
    ids = [the, *llm.get_tokenizer().encode("abZ")]
    for first, pattern in ((the, "The[abTheZ]*?Z[ab]{4}"), (ids[1], "[ab]{4}")):
        params = wants(
            regex="[ab]{4}",
            after="Z",
            begins="The",
            allowed_token_ids=ids,
            logit_bias={first: 9.0, ids[-1]: 8.5},
            seed=1,
        )
        [output] = llm.generate("abc", params, use_tqdm=False)
        assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text
    params = wants(regex="[ab]{4}", after="Z", begins="The capital", logit_bias={the: 100.0})
    [output] = llm.generate("abc", params, use_tqdm=False)  # not one token: it can't be told in time
    assert re.fullmatch("[ab]{4}", output.outputs[0].text)


BAD = {
    "regex": {"regex": "("},
    "look-around": {"regex": "(?=a)b"},
    "schema type": {"json": {"type": "nope"}},
    "schema keyword": {"json": {"not": {"const": 1}}},
    "schema text": {"json": "{"},
    "remote": {"json": {"$ref": "http://127.0.0.1:9/x"}},
    "endless": {"json": {"$ref": "#"}},
    "grammar": {"grammar": "start: nothing"},
    "llama.cpp": {"grammar": "root ::= nothing"},
    "deep": {"grammar": "start: " + "(" * 100_000},
    "deep llama.cpp": {"grammar": "root ::= " + "(" * 100_000},
    "special": {"grammar": "start: <|nothing|>"},
    "large": {"json": {"enum": ["x" * limits.MAX_GRAMMAR_CHARS]}},
    "work": {
        "json": {"allOf": [{"anyOf": [{"type": "string", "minLength": a * 9 + b} for b in range(4)]} for a in range(9)]}
    },
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_grammar_is_refused_before_it_is_queued(llm: LLM, case: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        llm.generate("abc", SamplingParams(structured_outputs=StructuredOutputsParams(**BAD[case])), use_tqdm=False)
    assert len(str(caught.value)) < 600 and caught.value.param == "structured_outputs"
    assert llm.stats().waiting == llm.stats().running == 0


MALFORMED: list[dict[str, Any]] = [
    {},
    {"regex": "a", "choice": ["b"]},
    {"regex": 5},
    {"choice": []},
    {"choice": [1]},
    {"choice": "abc"},
    {"json": [1]},
    {"json_object": "yes"},
    {"regex": "a" * (limits.MAX_GRAMMAR_CHARS + 1)},
    {"choice": ["a"] * (limits.MAX_CHOICES + 1)},
    {"regex": "a", "after": ""},
    {"regex": "a", "begins": "b"},
]


@pytest.mark.parametrize("values", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_parameters(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        StructuredOutputsParams(**values)


def test_without_a_tokenizer_there_are_no_grammars(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), skip_tokenizer_init=True, max_model_len=64)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, wants(regex="a"), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def chain(rules: int, sign: str) -> str:
    names = ["start" if sign == ":" else "root", *(f"r{index}" for index in range(rules))]
    return (
        "".join(f'{one} {sign} "a" {other}\n' for one, other in itertools.pairwise(names)) + f'{names[-1]} {sign} "b"'
    )


@pytest.mark.parametrize("kind", ["rules", "definitions", "references"])
def test_a_grammar_that_would_end_the_process_ends_the_checkers_only(llm: LLM, kind: str) -> None:
    """Each of these overflows the stack of the thread that compiles it."""
    steps = range(4_000)
    inner = {"references": lambda to: to, "definitions": lambda to: {"type": "array", "items": to}}.get(kind)
    if inner is None:
        wanted = StructuredOutputsParams(grammar=chain(9_000, ":"))
    else:
        definitions = {f"d{i}": inner({"$ref": f"#/$defs/d{i + 1}"}) for i in steps} | {"d4000": {"type": "null"}}
        wanted = StructuredOutputsParams(json={"$ref": "#/$defs/d0", "$defs": definitions})
    with pytest.raises(InvalidRequestError, match="too deep"):
        llm.generate("abc", SamplingParams(structured_outputs=wanted), use_tqdm=False)
    [output] = llm.generate("abc", wants(regex="[ab]{3}"), use_tqdm=False)
    assert re.fullmatch("[ab]{3}", output.outputs[0].text)


def test_ten_thousand_choices_and_a_thousand_optional_properties(llm: LLM) -> None:
    random_ = random.Random(3)
    choices = ["".join(random_.choices("abcdefghijklmnop 0123456789", k=12)) for _ in range(limits.MAX_CHOICES)]
    closed = {"properties": {f"p{n}": {"type": "boolean"} for n in range(1_000)}, "additionalProperties": False}
    schema = {"type": "object", "minProperties": 0, **closed}
    del schema["minProperties"]
    chosen, made = llm.generate(["a", "b"], [wants(choice=choices), wants(json=schema, seed=2)], use_tqdm=False)
    assert chosen.outputs[0].text in choices
    assert made.error is None and made.outputs[0].text.startswith("{")
    if made.outputs[0].finish_reason == "stop":
        assert json.loads(made.outputs[0].text).keys() <= closed["properties"].keys()  # type: ignore[attr-defined]


def test_json_has_no_endless_white_space(llm: LLM) -> None:
    """A model that likes blanks and newlines above all can't fill its limit with them."""
    ids = {id_: 50.0 for text in (" ", "\n", "\t", "  ", "\n\n") for id_ in llm.get_tokenizer().encode(text)}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    [made] = llm.generate("abc", wants(json=schema, logit_bias=ids, max_tokens=190), use_tqdm=False)
    assert made.outputs[0].finish_reason == "stop", made.outputs[0].text
    assert json.loads(made.outputs[0].text) == {"a": 1}
    assert max(map(len, re.findall(r"\s*", made.outputs[0].text))) <= 66
    [made] = llm.generate(
        "abc", wants(json=schema, logit_bias=ids, whitespace_pattern="[ ]{0,2}", max_tokens=190), use_tqdm=False
    )
    assert re.search(r"\s{3}|\n", made.outputs[0].text) is None and json.loads(made.outputs[0].text) == {"a": 1}
    pretty = json.dumps({"a": 1}, indent=4)
    [made] = llm.generate(
        "abc",
        wants(json=schema, logit_bias=dict.fromkeys(llm.get_tokenizer().encode(pretty), 30.0), max_tokens=190),
        use_tqdm=False,
    )
    assert json.loads(made.outputs[0].text) == {"a": 1}


def test_a_grammar_that_gets_too_much_to_follow_says_so(llm: LLM) -> None:
    """Nested repetitions compile at once and grow with every token."""
    [only] = llm.get_tokenizer().encode("a")
    many = wants(regex="((((a{1,100}){1,100}){1,100}){1,100})", allowed_token_ids=[only], max_tokens=150)
    [made] = llm.generate("abc", many, use_tqdm=False)
    assert "nested repetitions" in (made.error or "") and "non-verbose" not in (made.error or "")
    two = wants(regex="((a{1,100}){1,100})", allowed_token_ids=[only], max_tokens=120)
    [made] = llm.generate("abc", two, use_tqdm=False)
    assert made.error is None and made.outputs[0].text == "a" * 120


def test_what_the_compiler_says_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"followed: no finite text matches it\.$"):
        llm.generate("abc", wants(json={"$ref": "#"}), use_tqdm=False)
