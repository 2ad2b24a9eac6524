"""vLLM's dotted flags: `--flag.key value` is a part of a flag's JSON."""

from __future__ import annotations

import json

import pytest

from pagerunner.cli.options import Parser
from pagerunner.errors import ConfigError


def parsed(*words: str) -> object:
    parser = Parser("pagerunner serve", "")
    parser.add_argument("--kv-transfer-config")
    found = parser.parse(words).kv_transfer_config
    return found if found is None else json.loads(found)


def test_dotted_flags_are_one_json() -> None:
    name = "--kv-transfer-config"
    assert parsed(
        f"{name}.kv_connector", "OffloadingConnector", f"{name}.kv_role=kv_both", "--kv_transfer_config.kv_port", "7",
        f"{name}.kv_connector_extra_config.cpu_bytes_to_use", "3e7", f"{name}.kv_connector_extra_config.peers+", "10.0.0.7:1,10.0.0.8:2",
        f"{name}.kv_connector_extra_config.peers+=x", f"{name}.kv_connector_extra_config.secondary_tiers", '[{"type": "fs"}]',
    ) == {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_port": 7,
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 3e7, "peers": ["10.0.0.7:1", "10.0.0.8:2", "x"], "secondary_tiers": [{"type": "fs"}]
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kv-transfer-config.a",), "needs a value"),
        (("--kv-transfer-config.a", "1", "--kv-transfer-config.a", "2"), "contradicts another"),
        (("--kv-transfer-config.a", "1", "--kv-transfer-config.a.b", "2"), "contradicts another"),
        (("--kv-transfer-config={}", "--kv-transfer-config.a", "1"), "by its keys"),
        (("--kv-transfer-confi.a", "1"), "unknown flag --kv-transfer-confi.a"),
    ],
)
def test_what_contradicts_itself_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(*words)


def spec(*words: str) -> object:
    parser = Parser("pagerunner serve", "")
    parser.add_argument("--speculative-config", "-sc")
    parser.add_argument("--port")
    found = parser.parse(words).speculative_config
    return found if found is None else json.loads(found)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("--port", "1"), None),
        (("--spec-method", "eagle3", "--spec_model=dir", "--spec-tokens", "3"), {"method": "eagle3", "model": "dir", "num_speculative_tokens": 3}),
        (("-sc", '{"method": "ngram"}', "--spec-tokens", "3"), {"method": "ngram", "num_speculative_tokens": 3}),
        (('--speculative_config={"method": "ngram"}', "--spec-tokens=3", "--port", "1"), {"method": "ngram", "num_speculative_tokens": 3}),
        (("--speculative-config.method", "ngram", "--spec-tokens", "3"), {"method": "ngram", "num_speculative_tokens": 3}),
        (("-sc", '{"method": "ngram"}'), {"method": "ngram"}),
    ],
)  # fmt: skip
def test_flags_for_keys_of_the_speculative_config(words: tuple[str, ...], keys: object) -> None:
    assert spec(*words) == keys


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--spec-tokens",), "--spec-tokens needs a value"),
        (("--spec-tokens", "3", "--spec-tokens", "4"), "it is --speculative-config.num_speculative_tokens"),
        (("-sc", '{"num-speculative-tokens": 2}', "--spec-tokens", "4"), "has num_speculative_tokens in its JSON and as a flag"),
        (("-sc", "ngram", "--spec-tokens", "4"), "must be JSON of keys and values, got 'ngram'"),
    ],
)  # fmt: skip
def test_flags_for_keys_that_contradict_the_json(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec(*words)


def test_verbs_without_the_option_know_no_flags_for_its_keys() -> None:
    with pytest.raises(ConfigError, match="unknown flag --spec-tokens"):
        Parser("pagerunner x", "").parse(["--spec-tokens", "3"])
