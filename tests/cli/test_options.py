"""Flags become engine arguments; what can't be read is one sentence that names the flag."""

from __future__ import annotations

import pytest

from pagerunner.cli import generate, plan
from pagerunner.cli.options import Parser, engine_args, parse_bytes, parse_number, sampling_values
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError


def args_of(*words):
    return engine_args(generate.build_parser().parse(words), "m")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10GiB", 10 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("10GB", 10**10),
        ("2KB", 2000),
        ("10G", 10 * 2**30),
        ("10g", 10**10),
        ("1048576", 2**20),
        ("17B", 17),
    ],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "ten", "-1GiB", "10 apples", "1.5", "nan", "1e9", "0x10"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="not a"):
        parse_bytes(text)


def test_numbers_take_units_of_a_thousand_and_of_1024():
    assert (parse_number("32k"), parse_number("32K"), parse_number("-1")) == (32_000, 32_768, -1)


def test_no_flags_give_the_engines_own_defaults():
    assert args_of("a prompt") == EngineArgs(model="m")


def test_flags_reach_the_fields_of_their_name():
    args = args_of(
        *("--max-model-len", "auto", "--kv-cache-memory-bytes", "2GiB", "--no-enable-prefix-caching"),
        *("--cudagraph-capture-sizes", "1,2,16"),
        *("--enforce-eager", "--gpu-memory-utilization", "0.5", "--dtype", "bfloat16", "--block-size=32"),
    )
    assert (args.max_model_len, args.kv_cache_memory_bytes) == ("auto", 2 * 2**30)
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert args.cudagraph_capture_sizes == (1, 2, 16)
    assert (args.gpu_memory_utilization, args.dtype, args.block_size) == (0.5, "bfloat16", 32)


def test_underscores_are_understood_as_dashes():
    assert args_of("--max_model_len", "8k").max_model_len == 8000


def test_flags_and_prompts_mix():
    namespace = generate.build_parser().parse(["one", "--max-tokens", "5", "two", "--stop", "x", "--stop", "y"])
    assert namespace.prompts == ["one", "two"]
    assert sampling_values(namespace) == {"max_tokens": 5, "temperature": 0.0, "stop": ["x", "y"], "n": 1}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-model-length", "5"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--blocksize=5"], "did you mean --block-size?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes: 'lots' is not a size such as 10GiB"),
        (["--max-num-seqs", "many"], "--max-num-seqs: 'many' is not a whole number"),
        (["--cudagraph-capture-sizes", "1,0"], "--cudagraph-capture-sizes: must be at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens: must be at least 1, got 0"),
        (["--block-size"], "--block-size: expected one argument"),
        (["--max-model"], "unknown flag --max-model"),
    ],
)
def test_bad_flags(words, sentence):
    with pytest.raises(ConfigError) as caught:
        args_of(*words)
    assert sentence in str(caught.value)
    assert "pagerunner generate --help" in str(caught.value)


def test_a_value_out_of_range_names_the_field():
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be in"):
        args_of("--gpu-memory-utilization", "1.5")


def test_plan_has_only_the_flags_that_change_a_plan():
    options = plan.build_parser().option_names()
    assert "--max-model-len" in options and "--seed" not in options


def test_unexpected_argument():
    parser = Parser("x", "y")
    with pytest.raises(ConfigError, match="unexpected argument 'word'"):
        parser.parse(["word"])


def test_quantization_has_vllms_short_flag_where_serve_has_it():
    from pagerunner.cli.serve import build_parser

    assert build_parser().parse(["-q", "fp8", "--model", "m"]).quantization == "fp8"
