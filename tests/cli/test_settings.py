"""`serve`'s flags from a file and from the environment, and vLLM's flags that mean nothing here."""

from __future__ import annotations

import json

import pytest

from pagerunner.cli import serve
from pagerunner.cli.options import engine_args
from pagerunner.cli.settings import ConfiguredParser
from pagerunner.engine.startup.machine import SHARE_DEVICES
from pagerunner.errors import ConfigError
from pagerunner.ops.native.library import SWITCH
from pagerunner.vllm_flags import ALWAYS, NEUTRAL, PASSED_OVER, REFUSED


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parse words with a file's text and an environment."""

    def run(*words, text=None, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        if text is not None:
            (tmp_path / "serve.yaml").write_text(text, encoding="utf-8")
            words = (*words, "--config", str(tmp_path / "serve.yaml"))
        return serve.build_parser().parse(words)

    return run


FILE = """
model: from-file
port: 9000
max-model-len: 16k
max_num_seqs: 4          # underscores too
enable-prefix-caching: false
enforce-eager: true
quiet: false
gpu-memory-utilization: 0.5
kv-cache-memory-bytes: 2GiB
cudagraph-capture-sizes: [1, 2, 8]
api-key: [one, two]
served-model-name: [a, b]
pooler-config: {pooling_type: MEAN}
seed: null
"""


def test_a_file(parse):
    namespace = parse(text=FILE)
    assert (namespace.model, namespace.port, namespace.api_key) == ("from-file", 9000, [["one"], ["two"]])
    assert (namespace.served_model_name, namespace.quiet) == (["a", "b"], False)
    del namespace.served_model_name
    args = engine_args(namespace, "m")
    assert (args.max_model_len, args.max_num_seqs, args.enable_prefix_caching, args.enforce_eager) == (
        16_000,
        4,
        False,
        True,
    )
    assert (args.gpu_memory_utilization, args.kv_cache_memory_bytes, args.seed) == (0.5, 2 * 2**30, 0)
    assert args.cudagraph_capture_sizes == (1, 2, 8)
    assert args.pooler_config == '{"pooling_type": "MEAN"}'


def test_the_command_line_beats_the_environment_which_beats_the_file(parse):
    environ = {"PAGERUNNER_PORT": "9001", "PAGERUNNER_MAX_NUM_SEQS": "5", "PAGERUNNER_ENFORCE_EAGER": "false"}
    words = ("model", "--max_num_seqs=6", "--api-key", "mine", "--enable-prefix-caching")
    namespace = parse(*words, text=FILE, **environ)
    assert (namespace.model_tag, namespace.model) == ("model", None)
    assert (namespace.port, namespace.max_num_seqs, namespace.api_key) == (9001, 6, [["mine"]])
    assert (namespace.enforce_eager, namespace.enable_prefix_caching) == (False, True)


def test_variables_that_are_no_flags_pass(parse):
    assert parse(**{SWITCH: "0", SHARE_DEVICES: "1"}, PAGERUNNER_PORT="77").port == 77


def test_the_environment_may_name_the_file(parse, tmp_path):
    (tmp_path / "x.yaml").write_text("port: 77", encoding="utf-8")
    assert parse(PAGERUNNER_CONFIG=str(tmp_path / "x.yaml")).port == 77


def test_an_empty_file_and_empty_variables_say_nothing(parse):
    assert parse(text="", PAGERUNNER_PORT="", UNRELATED="x").port == 8000


def test_what_kubernetes_sets_for_a_service_of_our_name_is_passed_over(parse):
    address = "tcp://10.0.0.1:8000"
    environ = {
        "PAGERUNNER_PORT": address,
        "PAGERUNNER_PORT_8000_TCP": address,
        "PAGERUNNER_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    environ |= {
        "PAGERUNNER_SERVICE_HOST": "10.0.0.1",
        "PAGERUNNER_SERVICE_PORT": "8000",
        "PAGERUNNER_SERVICE_PORT_HTTP": "1",
    }
    assert parse(**environ).port == 8000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max-model-length: 5", "serve.yaml: unknown key max-model-length; did you mean max-model-len?"),
        ("zzz: 5", "serve.yaml: unknown key zzz."),
        ("port: many", "serve.yaml: argument --port: 'many' is not a whole number"),
        ("port: true", "serve.yaml: port must be a value, got True"),
        ("enforce-eager: perhaps", "serve.yaml: enforce-eager must be true or false, got 'perhaps'"),
        ("api-key: [[a]]", "serve.yaml: api-key must be a list of plain values"),
        ("config: other.yaml", "serve.yaml: unknown key config"),
        ("nnodes: 8", "serve.yaml: --nnodes is vLLM's flag for several devices"),
        ("port: 1\nport: 2", "port is given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs is given twice"),
        ("[port]", "must hold keys and values, got a list"),
        ("a: [", "is not valid YAML"),
        ("port: &a {x: *a}", "is not valid YAML: Circular reference"),
        ("hf-overrides: &a [*a]", "is not valid YAML: Circular reference"),
        ("port: " + "[" * 20_000, "lists or mappings in one another too many times"),
        ("port: !!int x", "is not valid YAML: invalid literal"),
        ("port: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("hf-overrides: {? 2001-01-01 : 1}", "is not valid YAML: keys must be str"),
        ("kv-cache-metrics: 7", "serve.yaml: --kv-cache-metrics must be true or false, got '7'"),
        ("data-parallel-size-local: 1\ndata-parallel-size: 2", "--data-parallel-size-local is vLLM's flag"),
    ],
)
def test_bad_files(parse, text, sentence):
    with pytest.raises(ConfigError) as caught:
        parse(text=text)
    assert sentence in str(caught.value)


def test_a_missing_file(parse):
    with pytest.raises(ConfigError, match=r"the config file nowhere\.yaml cannot be read"):
        parse("--config", "nowhere.yaml")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "PAGERUNNER_MAX_MODEL_LENGTH",
            "5",
            "unknown variable PAGERUNNER_MAX_MODEL_LENGTH; did you mean PAGERUNNER_MAX_MODEL_LEN?",
        ),
        ("PAGERUNNER_PORT", "x", "the environment: argument --port: 'x' is not a whole number"),
        (
            "PAGERUNNER_LORA_DTYPE",
            "float16",
            "the environment: --lora-dtype is vLLM's flag for other forms of adapters",
        ),
    ],
)
def test_bad_variables(parse, name, value, sentence):
    with pytest.raises(ConfigError) as caught:
        parse(**{name: value})
    assert sentence in str(caught.value)


def test_vllms_flags_that_ask_for_what_is_there_are_passed_over(parse):
    words = ("-tp", "1", "--enable-prompt-tokens-details", "dir", "--data_parallel_size=1", "--swap-space", "0")
    namespace = parse(*words, text="nnodes: 1\nasync-scheduling: true")
    assert namespace.model_tag == "dir"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-dcp", "2"), "-dcp is vLLM's flag for several devices"),
        (("--master_port=2",), "--master-port is vLLM's flag for several devices"),
        (("--lora-dtype=float16",), "for other forms of adapters"),
        (("--cpu-offload-gb",), "offloading"),
        (("--max-model-length", "5"), "did you mean --max-model-len?"),
        (("-dcp1",), "unknown flag -dcp1; did you mean -dcp 1?"),
        (("-tp2",), "unknown flag -tp2; did you mean -tp 2?"),
        (("--enable-dbo=1",), "--enable-dbo is vLLM's flag"),
        (("--kv-cache-metrics=maybe",), "--kv-cache-metrics must be true or false, got 'maybe'"),
    ],
)
def test_vllms_flags_for_what_is_not_there_are_refused(parse, words, sentence):
    with pytest.raises(ConfigError) as caught:
        parse("dir", *words)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text", "share"),
    [
        ((), None, 0.0),
        (("--kv-cache-metrics",), None, 0.01),
        (("--kv-cache-metrics", "--kv-cache-metrics-sample", "0.2"), None, 0.2),
        (("--kv_cache_metrics_sample=0.2", "--kv_cache_metrics"), None, 0.2),
        (("--no-kv-cache-metrics",), None, 0.0),
        ((), "kv-cache-metrics: true", 0.01),
        ((), "kv-cache-metrics: false", 0.0),
        ((), "kv-cache-metrics: true\nkv-cache-metrics-sample: 0.2", 0.2),
        ((), "kv-cache-metrics-sample: 0.2\nkv-cache-metrics: true", 0.2),
        (("--kv-cache-metrics",), "kv-cache-metrics-sample: 0.2", 0.2),
        (("--kv-cache-metrics-sample=0.3",), "kv-cache-metrics: true", 0.3),
        (("--kv-cache-metrics", "--kv-cache-metrics"), None, 0.01),
        (("--kv-cache-metrics", "--no-kv-cache-metrics"), None, 0.0),
        (("--no-kv-cache-metrics", "--kv-cache-metrics"), None, 0.01),
        (("--no-kv-cache-metrics", "--kv-cache-metrics-sample=0.2"), None, 0.0),
        (("--no-kv-cache-metrics",), "kv-cache-metrics: true", 0.0),
        ((), "kv-cache-metrics: null", 0.0),
    ],
)
def test_vllms_switch_for_sampling_pages_has_vllms_default(parse, words, text, share):
    assert engine_args(parse("dir", *words, text=text), "dir").kv_cache_metrics_sample == share


@pytest.mark.parametrize(
    "words",
    [
        ("-tp", "2", "-pp", "3"),
        ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"),
        ("--tensor_parallel_size=2", "--pipeline_parallel_size=3"),
    ],
)
def test_ranks_are_asked_for_as_in_vllm(parse, words):
    args = engine_args(parse("dir", *words), "dir")
    assert (args.tensor_parallel_size, args.pipeline_parallel_size, args.num_ranks) == (2, 3, 6)


@pytest.mark.parametrize("flag", ["-ep", "--enable-expert-parallel"])
def test_whole_experts_are_asked_for_as_in_vllm(parse, flag):
    assert engine_args(parse("dir", "-tp", "2", flag), "dir").enable_expert_parallel


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_sample_is_a_share(parse, share):
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample must be in"):
        engine_args(parse("dir", f"--kv-cache-metrics-sample={share}"), "dir")


def test_vllms_flags_whose_value_changes_nothing_are_passed_over_with_a_line(parse, caplog):
    assert parse("--swap-space", "4", "dir", "--swap_space=16").model_tag == "dir"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "--swap-space 4 changes nothing" in said[0] and "swapped" in said[1]


@pytest.mark.parametrize("words", [("dir", "--swap-space"), ("--swap-space", "--port", "80")])
def test_a_flag_that_is_passed_over_takes_no_other_flag_for_its_value(parse, words):
    """The port would be left out, and 80 be the model."""
    with pytest.raises(ConfigError, match="--swap-space: expected one argument"):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--data-parallel-size-local 1 --data-parallel-rank 0", None),
        ("-dp 2 --data-parallel-size-local=2 --data-parallel-start-rank 0", None),
        ("--data-parallel-size-local 2 --data_parallel_size=2", None),
        ("-dp 2 --data-parallel-size-local 1", "--data-parallel-size-local"),
        ("-dp 2 --data-parallel-rank 0", "--data-parallel-rank"),
        ("--data-parallel-rank 1", "--data-parallel-rank"),
    ],
)
def test_engines_that_are_all_here_may_be_said_to_be(parse, words, refused):
    if refused is None:
        assert parse("dir", *words.split()).model_tag == "dir"
        return
    with pytest.raises(ConfigError, match=f"{refused} is vLLM's flag for several devices"):
        parse("dir", *words.split())


@pytest.mark.parametrize(
    ("words", "text", "environ"),
    [
        ((), "data-parallel-size: 2\ndata-parallel-size-local: 2", {}),
        (("-dp", "2"), "data-parallel-size-local: 2", {}),
        (("--data-parallel-size-local", "2"), "data_parallel_size: 2", {}),
        ((), "data-parallel-size-local: 2\ndata-parallel-size: 9", {"PAGERUNNER_DATA_PARALLEL_SIZE": "2"}),
        ((), "data-parallel-rank: 0\ndata-parallel-size-local: null", {"PAGERUNNER_ENABLE_DBO": "0"}),
    ],
)
def test_engines_that_are_all_here_may_be_said_to_be_wherever_their_number_stands(parse, words, text, environ):
    assert parse("dir", *words, text=text, **environ).model_tag == "dir"


def test_a_file_goes_with_a_model_behind_two_dashes(parse):
    assert parse("--", "dir", text="port: 77").port == 77


@pytest.mark.parametrize("words", [("1", "2", "8"), ("1,2", "8"), ("1,2,8",)])
def test_sizes_and_keys_have_blanks_between_as_in_vllm(parse, words):
    namespace = parse("dir", "--cudagraph-capture-sizes", *words, "--api-key", "a", "b")
    assert engine_args(namespace, "dir").cudagraph_capture_sizes == (1, 2, 8)
    assert namespace.api_key == [["a", "b"]]


def test_a_flag_that_is_passed_over_is_said_once_with_a_config_file_too(parse, caplog):
    parse("dir", "--swap-space=4", "--trust-remote-code", text="swap-space: 16\nmax-num-seqs: 4")
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert sorted(said) == [
        "--swap-space 16 changes nothing",
        "--swap-space 4 changes nothing",
        "--trust-remote-code changes nothing",
    ]


@pytest.mark.parametrize(
    "word", ["-O3", "-O", "-O.mode=3", "--compilation-config.cudagraph_mode", "--moe-backend", "--stream-interval=2"]
)
def test_a_flag_that_is_refused_is_named_in_each_of_its_spellings(parse, word):
    flag = "-O" if word.startswith("-O") else word.partition(".")[0].partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{flag} is vLLM's flag for"):
        parse("dir", word, "FULL")


def test_what_asks_for_a_text_model_alone_is_passed_over(parse):
    for words in (
        ["--language-model-only", "--skip-mm-profiling"],
        ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
        ["--limit-mm-per-prompt.image", "0"],
    ):
        assert (
            parse("dir", *words, text="limit-mm-per-prompt: {image: 0}\nlanguage-model-only: true").model_tag == "dir"
        )
    with pytest.raises(ConfigError, match="images, sound and video"):
        parse("dir", text="limit-mm-per-prompt: {image: 1}")


def test_what_is_always_so_can_not_be_turned_off_and_the_log_says_so(parse, caplog):
    assert parse("dir", "--no-async-scheduling", "--async-scheduling", "--no-trust-remote-code").model_tag == "dir"
    assert [record.getMessage() for record in caplog.records] == [
        "--no-async-scheduling changes nothing: it is always so."
    ]


def test_no_flag_of_ours_is_refused():
    own = set(serve.build_parser().option_names())
    assert not own & (REFUSED.keys() | ALWAYS | PASSED_OVER.keys()) and NEUTRAL.keys() <= REFUSED.keys()


def test_a_command_line_of_vllm_that_changes_nothing_is_taken_as_it_is(parse, caplog):
    words = """dir --trust-remote-code --runner generate --task=generate --model-impl auto --response-role assistant
        --chat-template-content-format auto --limit-mm-per-prompt {} --mm-processor-kwargs={} --tokenizer-mode auto
        --no-enable-lora --no-enable-expert-parallel --distributed-executor-backend mp --enable-server-load-tracking
        --uvicorn-log-level warning --disable-uvicorn-access-log --disable-access-log-for-endpoints /health,/metrics
        --disable-fastapi-docs --tensor_parallel_size 1 --max-num-seqs 7""".split()
    found = parse(*words)
    assert (found.model_tag, found.max_num_seqs) == ("dir", 7)
    assert (found.uvicorn_log_level, found.disable_access_log_for_endpoints) == ("warning", ("/health", "/metrics"))
    assert found.disable_uvicorn_access_log and found.disable_fastapi_docs
    assert "no code of a checkpoint is run" in caplog.text
    for words in (["--limit-mm-per-prompt", '{"image": 1}'], ["--runner", "pooling"], ["--model-impl", "transformers"]):
        with pytest.raises(ConfigError, match=words[0]):
            parse("dir", *words)
    with pytest.raises(ConfigError, match="health"):
        parse("dir", "--disable-access-log-for-endpoints", "health")


def test_only_what_is_given_is_replaced():
    parser = ConfiguredParser("x", "y", environ={"PAGERUNNER_NAME": "env"})
    parser.add_argument("--name", default="default")
    assert (parser.parse(["--name", "cli"]).name, parser.parse([]).name) == ("cli", "env")


def test_keys_of_the_speculative_config_have_flags_in_files_and_the_environment_too(parse):
    with pytest.raises(ConfigError, match="method in its JSON and as a flag"):
        parse(text="spec-method: mtp\nspeculative-config: {method: ngram}")
    text = "spec-method: eagle3\nspec_model: dir\nspec-tokens: 3"
    assert json.loads(parse(text=text).speculative_config) == {
        "method": "eagle3",
        "model": "dir",
        "num_speculative_tokens": 3,
    }
    assert json.loads(parse(text=text, PAGERUNNER_SPEC_METHOD="mtp").speculative_config) == {"method": "mtp"}
    assert json.loads(parse("--spec-method", "suffix", text=text).speculative_config) == {"method": "suffix"}
