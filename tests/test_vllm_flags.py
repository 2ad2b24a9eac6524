"""Keyword arguments of vLLM's `LLM` that mean nothing here."""

import pytest

from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.vllm_flags import screen_arguments


def screened(**values):
    return screen_arguments(values, EngineArgs.__struct_fields__)


def test_arguments_that_ask_for_what_is_done_anyway_are_left_out(caplog):
    ours = {"max_model_len": 512, "skip_tokenizer_init": True, "no_such": 1}
    nothing = {
        "trust_remote_code": False,
        "tokenizer_mode": "auto",
        "runner": "generate",
        "cpu_offload_gb": 0,
        "compilation_config": {},
        "logits_processors": [],
        "limit_mm_per_prompt": {"image": 0},
        "mm_processor_kwargs": None,
        "enable_dbo": False,
        "async_scheduling": True,
    }
    assert screened(**ours, **nothing) == ours
    assert not caplog.records
    assert screened(trust_remote_code=True, swap_space=4, async_scheduling=False) == {}
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == [
        "trust_remote_code=True changes nothing",
        "swap_space=4 changes nothing",
        "async_scheduling=False changes nothing",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compilation_config", 3),
        ("compilation_config", {"mode": 3}),
        ("limit_mm_per_prompt", {"image": 1}),
        ("tokenizer_mode", "mistral"),
        ("cpu_offload_gb", 4),
        ("enable_prompt_embeds", True),
        ("logits_processors", [len]),
        ("worker_cls", len),
    ],
)
def test_an_argument_for_what_is_not_here_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is vLLM's flag for .*leave it out"):
        screened(**{name: value})
