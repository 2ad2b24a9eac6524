"""An engine's drafter that is a model: what is planned for it, and what its ranks load."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import EAGLE, eagle_weights, make_followed, make_module, make_smaller, write_drafter
from helpers.device import as_on_cuda, counted_graphs
from helpers.effort import effort
from helpers.families import MAKERS
from pagerunner import LLM, SamplingParams
from pagerunner.config import engine_args
from pagerunner.demo import demo_path
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker.worker import load_worker
from pagerunner.errors import ConfigError
from pagerunner.memory.report import plan_table
from pagerunner.models.checkpoint.drafters import with_smaller_model
from pagerunner.models.configs.reader import read_model_config
from pagerunner.sched.stats import SpecCounts

LIMITS = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 2**24,
    "device": "cpu",
    "skip_tokenizer_init": True,
}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=8, tokenizer=False)
    return str(target), str(
        write_drafter(tmp_path / "head", EAGLE | {"max_position_embeddings": 1024}, eagle_weights(EAGLE))
    )


def drafting(head: str) -> dict[str, object]:
    return {"speculative_config": {"method": "eagle3", "model": head, "num_speculative_tokens": 3}}


def test_the_drafters_layer_and_weights_are_in_the_plan(paths: tuple[str, str]) -> None:
    target, head = paths
    plain = resolve(engine_args(model=target, **LIMITS)).plan
    found = resolve(engine_args(model=target, **LIMITS, **drafting(head)))
    assert sum(len(group.layers) for group in plain.groups) == 8
    assert sum(len(group.layers) for group in found.plan.groups) == 9
    size = dict(found.plan.other)["weights of the drafter"]
    model = found.model.drafter
    assert model is not None and model.path == head
    tensors = [tensor.nbytes for name, tensor in eagle_weights(EAGLE).items() if name != "t2d"]
    assert 0 <= size - sum(tensors) < 2**14  # panels and places are rounded up
    assert dict(found.plan.other)["weights"] == dict(plain.other)["weights"]
    assert "weights of the drafter" in plan_table(found.plan)


def test_a_drafter_shorter_than_the_engine_is_refused(paths: tuple[str, str]) -> None:
    target, head = paths
    with pytest.raises(ConfigError, match="max_model_len=2048 is more than the 1024 positions of the drafter"):
        resolve(engine_args(model=target, **LIMITS | {"max_model_len": 2048}, **drafting(head)))


def test_the_drafter_is_in_the_region_of_the_weights_and_is_read_again(paths: tuple[str, str]) -> None:
    """So sleep frees it, and a wake brings it back."""
    target, head = paths
    resolved = resolve(engine_args(model=target, **LIMITS, **drafting(head)))
    worker = load_worker(resolved)
    other = dict(resolved.plan.other)
    assert worker.weights.nbytes == other["weights"] + other["weights of the drafter"]
    own = load_file(Path(head) / "model.safetensors")
    norm = worker.model.drafter.layers[0].hidden_norm.weights
    assert torch.equal(norm["weight"], own["midlayer.hidden_norm.weight"])
    digest = worker.weights_digest()
    worker.weights.zero_()
    assert not norm["weight"].any()
    worker.reload()
    assert torch.equal(norm["weight"], own["midlayer.hidden_norm.weight"])
    assert worker.weights_digest() == digest


def test_random_weights_need_only_a_config(paths: tuple[str, str]) -> None:
    target, head = paths
    (Path(head) / "model.safetensors").unlink()
    worker = load_worker(resolve(engine_args(model=target, load_format="dummy", **LIMITS, **drafting(head))))
    drafter = worker.model.drafter
    assert drafter.to_target(torch.arange(96)).max() < 512
    assert drafter.layers[0].self_attn.qkv_proj.weights["weight"].std() > 0.01


TEXTS = [
    [3 + (7 * row + 13 * place) % 60 for place in range(length)] for row, length in enumerate((40, 5, 21, 33, 2, 64))
]
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "prompts in pieces": {"max_num_batched_tokens": 16},
    "two in flight": {"max_in_flight": 2, "max_num_batched_tokens": 24},
    "few pages": {"num_gpu_blocks_override": 15, "kv_cache_memory_bytes": None, "max_in_flight": 2},
    "poison": {"poison_fresh_pages": True},
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A target and a head that is right in two thirds of all cases at most."""
    target, head = make_followed(tmp_path_factory.mktemp("followed"))
    return {"model": str(target), "head": str(head)}


def generated(
    followed: dict[str, object], params: list[SamplingParams], drafts: int = 0, make: Any = LLM, **options: Any
) -> tuple[Any, SpecCounts]:
    """What an engine answers to the texts, twice, and what became of its drafts."""
    if drafts:
        options["speculative_config"] = {"method": "eagle", "model": followed["head"], "num_speculative_tokens": drafts}
        options["speculative_config"] |= {"num_speculative_tokens_per_batch_size": [[1, 4, drafts]]}
    llm = make(
        str(followed["model"]), **{name: value for name, value in (LIMITS | options).items() if value is not None}
    )
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    found = []
    for _ in range(2):  # the second time prompts are found
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found += [
            (list(one.token_ids), [sorted(place) for place in one.logprobs or ()])
            for output in outputs
            for one in output.outputs
        ]
    stats = llm.stats()
    assert stats.running == 0
    return found, stats.spec or SpecCounts.of(0)


@pytest.fixture(scope="module")
def plain(followed: dict[str, object]) -> Any:
    """What the target says without drafts under a condition."""
    return functools.cache(lambda condition: generated(followed, mixed_params(), **CONDITIONS[condition])[0])


def mixed_params() -> list[SamplingParams]:
    """Most likely tokens, drawn ones, penalties, log-probabilities, siblings, and a text that ends early."""
    plain = {"max_tokens": effort(16, 24), "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=0.7, seed=3, **plain),
        SamplingParams(temperature=0.5, seed=4, top_p=0.9, repetition_penalty=1.1, **plain),
        SamplingParams(temperature=0, logprobs=2, **plain),
        SamplingParams(temperature=0.6, seed=5, n=2, **plain),
        SamplingParams(temperature=0, **plain | {"max_tokens": 3}),
    ]


@pytest.mark.days(2)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_tokens_are_those_without_a_drafter(followed: dict[str, object], plain: Any, condition: str) -> None:
    found, counts = generated(followed, mixed_params(), drafts=3, **CONDITIONS[condition])
    assert found == plain(condition)
    first, *_, last = counts.accepted_per_pos
    assert counts.num_drafts > first > last > 0, "no mixture of right and wrong drafts"


def test_tokens_are_those_without_a_drafter_in_graphs(followed: dict[str, object], plain: Any) -> None:
    eager = generated(followed, mixed_params(), drafts=2, max_in_flight=2)
    with as_on_cuda(), counted_graphs() as graphs:
        found, counts = generated(followed, mixed_params(), drafts=2, max_in_flight=2)
    assert found == plain("defaults") == eager[0]
    assert counts == eager[1]  # the same drafts
    assert counts.num_accepted_tokens > 20
    assert any(key.drafts == 2 for key in graphs.replays)


@pytest.mark.days(3)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_tokens_are_those_without_a_smaller_model(
    followed: dict[str, object], plain: Any, tmp_path: Path, condition: str
) -> None:
    smaller = make_smaller(tmp_path, Path(str(followed["model"])))
    drafts: dict[str, object] = {"method": "draft_model", "model": str(smaller), "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 4, 3]]
    options = CONDITIONS[condition]
    found, counts = generated(followed, mixed_params(), speculative_config=drafts, **options)
    assert found == plain(condition)
    assert counts.num_accepted_tokens > 30
    if condition == "defaults":
        with as_on_cuda():
            in_graphs, same = generated(followed, mixed_params(), speculative_config=drafts)
        assert in_graphs == found
        assert same == counts


def test_a_smaller_model_reads_each_draft_at_its_place(tmp_path: Path) -> None:
    """One with the target's own weights is always right, so a pass at another position, or over another token, shows."""
    drafts: dict[str, object] = {"method": "draft_model", "num_speculative_tokens": 4}
    drafts |= {
        "model": str(copytree(demo_path(), tmp_path / "twin")),
        "num_speculative_tokens_per_batch_size": [[1, 4, 4]],
    }
    limits: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**24, "max_num_batched_tokens": 24}
    llm = LLM("demo", max_num_seqs=2, max_in_flight=2, speculative_config=drafts, **limits)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate(["Once upon a time", "Tom had a red ball. " * 6], params, use_tqdm=False)
    counts = llm.stats().spec
    assert counts is not None and counts.num_accepted_tokens == counts.num_draft_tokens > 50


def test_smaller_models_that_cannot_draft(tmp_path: Path) -> None:
    target = read_model_config(make_checkpoint(tmp_path, "llama", tokenizer=False))
    other = make_checkpoint(tmp_path, "llama", vocab_size=300, tokenizer=False)
    for path, said in (
        (str(other), "has vocab_size=300, and the target"),
        (target.path, "is the target itself"),
        (str(MAKERS["qwen3_next"](tmp_path)), "has recurrent layers"),
        (str(MAKERS["gpt_oss"](tmp_path)), "has attention with sinks"),
    ):
        with pytest.raises(ConfigError, match=f"method draft_model: .*{said}"):
            with_smaller_model(target, path)


@pytest.mark.days(6)
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
)
def test_tokens_are_those_without_a_module(tmp_path: Path, family: str) -> None:
    """Latents, chosen and compressed ones, windows, and recurrent states."""
    path, params = str(make_module(tmp_path, family)), mixed_params()
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    expected, _ = generated({"model": path}, params, max_num_batched_tokens=24)
    found, counts = generated({"model": path}, params, max_num_batched_tokens=24, speculative_config=drafts)
    assert found == expected
    assert counts.num_drafts > 100
    if family != "deepseek_v4":
        assert counts.num_accepted_tokens > 20
    with as_on_cuda(), counted_graphs() as graphs:  # some steps in graphs, others eagerly
        in_graphs, same = generated({"model": path}, params, max_num_batched_tokens=24, speculative_config=drafts)
    assert in_graphs == expected and same == counts
    assert any(key.drafts == 3 for key in graphs.replays)


@pytest.mark.parametrize("model", ["a head", "deepseek_v3"])
def test_drafts_behind_a_rows_last_fp8_page_are_not_stored(
    followed: dict[str, object], tmp_path: Path, model: str
) -> None:
    """A prompt fills its page, and is all that is computed: the drafter's second pass has no page."""
    if model == "a head":
        path, drafts = str(followed["model"]), {"method": "eagle", "model": followed["head"]}
    else:
        path, drafts = str(make_module(tmp_path, model)), {"method": "mtp"}
    drafts |= {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    llm = LLM(path, kv_cache_dtype="fp8_e4m3", block_size=16, **LIMITS | {"speculative_config": drafts})
    for length, most in ((16, 1), (1, 1), (15, 20)):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        outputs = llm.generate({"prompt_token_ids": TEXTS[5][:length]}, params, use_tqdm=False)
        assert len(outputs[0].outputs[0].token_ids) == most


@pytest.mark.days(3)
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_module_with_a_window_reads_nothing_behind_a_rows_pages(tmp_path: Path, block_size: int) -> None:
    """A long prompt takes pages that no later step reads, so its table has holes, where the module's last passes would look."""
    drafts = {"method": "mtp", "num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 4, 8]]}
    path = str(make_module(tmp_path, "deepseek_v4"))
    own = LIMITS | {"max_num_seqs": 1, "max_num_batched_tokens": 200, "block_size": block_size}
    prompts = [{"prompt_token_ids": (TEXTS[5] * 2)[:length]} for length in (126, 90, 33)]
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False) for most in (2, 1, 20)]
    found = []
    for config in (None, drafts):
        llm = LLM(path, speculative_config=config, **own)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


@pytest.mark.days(3)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_tokens_are_those_without_a_random_head(tmp_path: Path, family: str) -> None:
    """Sinks and windows, of which the head's layer has none; and mixtures."""
    path = MAKERS[family](tmp_path)
    config = json.loads((path / "config.json").read_text())
    fields = (
        EAGLE
        | {name: config[name] for name in ("hidden_size", "vocab_size")}
        | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    )
    head = write_drafter(tmp_path / "head", fields, eagle_weights(fields))
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    expected, _ = generated({"model": path}, mixed_params(), max_num_batched_tokens=24)
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 4, 2]]
    found, counts = generated({"model": path}, mixed_params(), max_num_batched_tokens=24, speculative_config=drafts)
    assert found == expected
    assert counts.num_drafts > 100


@pytest.mark.days(3)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("model", "drafts"), [("demo", {"method": "eagle3", "model": "demo-eagle3"}), ("demo-hybrid", {"method": "mtp"})]
)
def test_two_ranks_draft_what_one_does(model: str, drafts: dict[str, object]) -> None:
    drafts = drafts | {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    found = []
    for ranks, options in ((1, {}), (1, {"speculative_config": drafts}), (2, {"speculative_config": drafts})):
        llm = LLM(
            model, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=2**24, tensor_parallel_size=ranks, **options
        )
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(["Once upon a time", "Tom had a red ball."], params, use_tqdm=False)
        found.append(([list(output.outputs[0].token_ids) for output in outputs], llm.stats().spec))
    assert found[0][0] == found[1][0]
    assert found[1] == found[2]


def test_the_demos_heads_are_right_most_of_the_time() -> None:
    """As they were when they were trained, so a state that is taken from the wrong layer shows."""
    for model, drafts in (("demo", {"method": "eagle3", "model": "demo-eagle3"}), ("demo-hybrid", {"method": "mtp"})):
        drafts |= {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
        llm = LLM(model, max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=2**25, speculative_config=drafts)
        prompts = ["Once upon a time there was a little dog", "Tom had a red ball.", "Lily went to the park with her"]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
        counts = llm.stats().spec
        assert counts is not None
        assert counts.mean_acceptance_length > 2.4, model


@pytest.mark.days(3)
@pytest.mark.parametrize("level", [1, 2])
def test_a_drafter_goes_on_after_sleep(followed: dict[str, object], level: int) -> None:
    drafts = {"method": "eagle", "model": followed["head"], "num_speculative_tokens": 3}
    options = {"speculative_config": drafts | {"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}}
    llm = LLM(str(followed["model"]), enable_sleep_mode=True, **LIMITS, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

    def run() -> tuple[list[list[int]], list[int]]:
        before = llm.stats().spec
        outputs = llm.generate([{"prompt_token_ids": text} for text in TEXTS], params, use_tqdm=False)
        counts = llm.stats().spec
        assert counts is not None
        return [list(output.outputs[0].token_ids) for output in outputs], counts.since(before).accepted_per_pos

    expected = run()
    llm.sleep(level)
    llm.wake_up()
    assert run() == expected
