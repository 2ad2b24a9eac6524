"""speculative_config: each of vLLM's fields is taken or refused by name, with the reason, before anything loads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from helpers.checkpoints import make_config
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.config import EngineArgs, SpeculativeConfig
from pagerunner.demo import demo_path
from pagerunner.engine.startup import speculation
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.startup.speculation import SpeculativeOptions, read_options
from pagerunner.errors import ConfigError
from pagerunner.models.configs.reader import read_model_config
from pagerunner.runner.spec.made import check_backends

if TYPE_CHECKING:
    from pagerunner.memory.memory_plan import GroupPlan

DOCUMENT = Path(__file__).parents[2] / "docs" / "speculation.md"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("model"), make_config("llama"))


def write(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def resolved(model: str, config: object, **options: Any) -> SpeculativeConfig:
    args = EngineArgs(model=model, speculative_config=config, **options)  # type: ignore[arg-type]
    found = speculation.resolve_speculation(args, read_model_config(model))
    assert found is not None
    return found


def test_the_engine_gets_what_was_asked_for(model: str) -> None:
    args = EngineArgs(
        model=model, device="cpu", speculative_config=NGRAM, kv_cache_memory_bytes=2**22, max_model_len=128
    )
    assert resolve(args, plan_only=True).config.speculative == SpeculativeConfig(
        method="ngram", num_speculative_tokens=4
    )
    assert read_options(None) is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (NGRAM, {}),
        (json.dumps(NGRAM), {}),
        ({"method": "ngram_gpu", "num-speculative-tokens": "4"}, {}),
        ({"model": "[ngram]", "num_speculative_tokens": 4.0}, {}),
        (NGRAM | {"prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        (NGRAM | {"prompt_lookup_max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        (NGRAM | {"prompt_lookup_max": 7, "prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 7}),
        (
            NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 8, 4], [17, 64, 2], [65, 256, 0]]},
            {"num_speculative_tokens_per_batch_size": ((1, 4), (17, 2), (65, 0))},
        ),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
            {"acceptance_rates": (1.0, 0.5, 0.0, 0.0)},
        ),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
            {"acceptance_rates": (1.0, 1.0, 1.0, 1.0)},
        ),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.4, 0.1, 0]},
            {"acceptance_rates": (0.8, 0.5, 0.25, 0.0)},
        ),
        ({"method": "suffix"}, {"method": "suffix", "num_speculative_tokens": 7}),
        (
            {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_min_token_prob": 0.2},
            {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_min_token_prob": 0.2},
        ),
        (
            NGRAM
            | {
                "enforce_eager": False, "kv_cache_dtype": "auto", "disable_padded_drafter_batch": False,
                "disable_eagle_block_drop": True, "use_heterogeneous_vocab": None, "parallel_drafting": False,
                "enable_adaptive_verification": False,
            },
            {},
        ),
    ],
)  # fmt: skip
def test_what_is_taken(model: str, asked: object, found: dict[str, Any]) -> None:
    assert resolved(model, asked) == SpeculativeConfig(**{"method": "ngram", "num_speculative_tokens": 4} | found)


def test_methods_are_guessed_as_vllm_guesses_them(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def method(name: str, config: dict[str, Any], **options: Any) -> SpeculativeConfig:
        return resolved(model, {"model": write(tmp_path / name, config), "num_speculative_tokens": 2, **options})

    llama = make_config("llama")
    found = method("EAGLE-LLaMA3-8B", llama)
    assert (found.method, found.model) == ("eagle", str(tmp_path / "EAGLE-LLaMA3-8B"))
    assert method("Qwen3-8B_eagle3", llama).method == "eagle3"
    assert method("small", llama).method == "draft_model"
    assert method("small", llama, method="eagle3").method == "eagle3"
    for name, config, words in (
        ("a-dflash-b", llama, "'dflash' isn't there"),
        ("dspark_b", llama, "'dspark' isn't there"),
        ("heads", {"model_type": "medusa"}, "'medusa' isn't there"),
        ("heads", {"model_type": "mlp_speculator"}, "'mlp_speculator' isn't there"),
    ):
        with pytest.raises(ConfigError, match=words):
            method(name, config)
    mtp = write(tmp_path / "mtp", make_config("llama"))
    target = read_model_config(mtp)
    write(tmp_path / "mtp", make_config("llama") | {"num_nextn_predict_layers": 1})
    for asked in ({"method": "mtp"}, {"method": "deepseek_mtp"}, {"model": mtp}):
        got = speculation.resolve_speculation(EngineArgs(model=mtp, speculative_config=asked), target)
        assert got == SpeculativeConfig(method="mtp", num_speculative_tokens=1, model=mtp)
    assert 'method deepseek_mtp is called "mtp"' in caplog.text


def test_how_many_tokens_a_drafter_was_made_for(model: str, tmp_path: Path) -> None:
    ways = [{"proposal_type": "greedy", "speculative_tokens": 5}, {"proposal_type": "tree", "speculative_tokens": 4}]
    proposal = {"speculators_config": {"proposal_methods": ways}}
    of_two = {"speculators_config": {"proposal_methods": ways, "default_proposal_method": "tree"}}
    for number, (config, asked, found) in enumerate(
        [
            ({"n_predict": 3}, None, 3),
            ({"n_predict": 3}, 2, 2),
            ({"n_predict": 3}, 6, 6),
            (proposal, None, 5),
            (proposal, 7, 7),  # a head drafts one token after another
            (of_two, None, 4),
            ({}, 7, 7),
        ]
    ):
        drafter = write(tmp_path / f"eagle3-{number}", make_config("llama") | config)
        options = {"model": drafter} | ({"num_speculative_tokens": asked} if asked else {})
        assert resolved(model, options).num_speculative_tokens == found
    for options, words in (
        (
            {"model": str(tmp_path / "eagle3-0"), "num_speculative_tokens": 4},
            "num_speculative_tokens=4 must be a multiple of 3",
        ),
        ({"model": str(tmp_path / "eagle3-6")}, "method 'eagle3' needs num_speculative_tokens"),
        *(
            ({"model": write(tmp_path / f"eagle3-{said}", make_config("llama") | {"n_predict": said})}, words)
            for said, words in (
                (64, "config.json says that the drafter predicts 64 tokens, and it must be from 1 to 32"),
                (-1, "predicts -1 tokens"),
                (True, "needs num_speculative_tokens"),
            )
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            resolved(model, options)


SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
TABLE = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("ngram", "speculative_config must be JSON such as"),
        ({}, "must say method or model"),
        (NGRAM | {"num_speculative_token": 3}, "has no 'num_speculative_token'; did you mean num_speculative_tokens?"),
        (NGRAM | {"xyz": 3}, "has no 'xyz'; it knows method, model"),
        (NGRAM | {"num-speculative-tokens": 3}, "has num_speculative_tokens twice"),
        (NGRAM | {"num_speculative_tokens": "x"}, "num_speculative_tokens must be a whole number or None, got 'x'"),
        (NGRAM | {"max_model_len": "auto"}, "max_model_len must be a whole number or None, got 'auto'"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 32, got 0"),
        (NGRAM | {"num_speculative_tokens": 33}, "num_speculative_tokens must be from 1 to 32, got 33"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"method": "ngrams"}, "method must be one of ngram, suffix, .*, got 'ngrams'"),
        ({"method": "medusa"}, "'medusa' isn't there: .* Methods are ngram"),
        ({"method": "custom_class"}, "names code to run"),
        ({"method": "eagle3"}, "'eagle3' needs model"),
        (NGRAM | {"model": ""}, "model must be a drafter's directory or hub name, got ''"),
        ({"model": " ", "num_speculative_tokens": 2}, "model must be a drafter's directory or hub name, got ' '"),
        ({"method": "mtp", "model": "other"}, "names another one"),
        ({"method": "mtp"}, "models of model_type llama have no multi-token prediction module"),
        (NGRAM | {"model": "org/drafter"}, "method 'ngram' has no weights, so model='org/drafter' changes nothing"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min must be from 1 to 64, got 0"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 must be at most prompt_lookup_max=3"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth=8 changes nothing with method 'ngram'"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min=2 changes nothing with method 'suffix'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "max_tree_depth must be from 1 to 64, got 0"),
        ({"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_tree_depth": 5}, "=6 must be at most .*max_tree_depth=5"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob must be from 0 to 1, got 1.5"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests must be from 0"),
        (NGRAM | {TABLE: []}, "must have an entry"),
        (NGRAM | {TABLE: [[2, 8, 4]]}, "must begin with 1"),
        (NGRAM | {TABLE: [[1, 8, 4], [8, 9, 2]]}, r"must begin with 1 and then grow, got \[8, 9, 2\] after 8 rows"),
        (NGRAM | {TABLE: [[1, 8, 5]]}, "drafts must be from 0 to num_speculative_tokens=4, got 5"),
        (NGRAM | {TABLE: [[1, 8]]}, "lists of three whole numbers"),
        (NGRAM | {"rejection_sample_method": "block"}, "tokens would differ from those without drafts"),
        (NGRAM | {"rejection_sample_method": "strict"}, "must be one of standard, synthetic, got 'strict'"),
        (NGRAM | {"synthetic_acceptance_length": 2}, 'go with rejection_sample_method="synthetic"'),
        (SYNTHETIC, "needs one of synthetic_acceptance_rates and"),
        (SYNTHETIC | {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 1, 1, 1]}, "needs one of"),
        (SYNTHETIC | {"synthetic_acceptance_length": 0.5}, r"must be from 1 to num_speculative_tokens \+ 1 = 5, got 0.5"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5]}, "must be num_speculative_tokens=4 numbers"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5, 0.7, 0]}, "must not grow"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1, "x", 0.7, 0]}, "numbers from 0 to 1"),
        (NGRAM | {"draft_sample_method": "probabilistic"}, "a draft counts if it is that token"),
        (NGRAM | {"draft_sample_method": "x"}, "must be one of greedy, probabilistic, got 'x'"),
        (NGRAM | {"draft_tensor_parallel_size": 2}, "changes nothing with method 'ngram'"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "must be tensor_parallel_size=1"),
        (NGRAM | {"tensor_parallel_size": 2}, "a drafter's ranks are draft_tensor_parallel_size"),
        (NGRAM | {"enforce_eager": True}, "enforce_eager=True must be the engine's, which is False"),
        (NGRAM | {"kv_cache_dtype": "fp8"}, "must be the engine's, 'auto'"),
        *(
            (NGRAM | {name: value}, f"{name}=.* isn't there")
            for name, value in {
                "quantization": "fp8", "moe_backend": "triton", "attention_backend": "FLASH_ATTN", "max_model_len": 99, "code_revision": "a",
                "draft_load_config": {"load_format": "auto"}, "index_share_for_mtp_iteration": True, "disable_padded_drafter_batch": True,
                "use_local_argmax_reduction": True, "use_heterogeneous_vocab": True, "parallel_drafting": True,
                "enable_adaptive_verification": True, "dspark_draft_topk": 3,
            }.items()
        ),
    ],
)  # fmt: skip
def test_what_is_refused(model: str, asked: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(model, asked)


def test_every_field_is_taken_or_refused() -> None:
    taken = set(speculation._EVERYWHERE).union(*speculation._OF_METHOD.values()) | {"enforce_eager", "kv_cache_dtype"}
    assert taken ^ set(speculation._REFUSED) == set(SpeculativeOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 must be 1"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "several teams of ranks"),
        ({"attention_backend": "flashinfer"}, 'attention_backend="auto" does'),
    ],
)
def test_what_drafts_do_not_go_with(model: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(model, NGRAM, **options)


def test_a_backend_that_plans_on_the_host_is_refused_by_name() -> None:
    groups = [cast("GroupPlan", SimpleNamespace(name="full"))]
    with pytest.raises(
        ConfigError, match=r"'torch_ref', which serves the model's full layers: .*attention_backend=\"auto\""
    ):
        check_backends(groups, [TorchBackend()])


def test_recurrent_layers_keep_a_journal_of_drafts_and_the_plan_counts_it() -> None:
    hybrid = str(demo_path("demo-hybrid"))
    plain, drafted = (
        resolve(EngineArgs(model=hybrid, device="cpu", speculative_config=wish, max_model_len=256), plan_only=True).plan
        for wish in (None, NGRAM)
    )
    states = [group for group in drafted.groups if group.kind == "recurrent"]
    (before,) = (group for group in plain.groups if group.kind == "recurrent")
    entries = [piece.spec.entry for piece in before.layers]
    added = sum(-(-4 * NGRAM["num_speculative_tokens"] * size // 16) * 16 for entry in entries for (size,) in entry)
    assert 0 <= states[0].page_bytes - before.page_bytes - added < 16 * len(entries)


def test_the_document_says_which_methods_work() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    said = text.partition("Methods that work: ")[2].partition(".")[0]
    assert said == ", ".join(f"`{name}`" for name in speculation.METHODS)
    for name in speculation.METHODS:
        assert f"### `{name}`" in text
