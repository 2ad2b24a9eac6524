"""Strict reading of a JSON object: every field is used, known to be irrelevant, unset, or an error that names it."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pagerunner.errors import ConfigError
from pagerunner.types.checks import is_finite

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# Written by training code, by transformers' bookkeeping or by exporters; none of them changes what the model computes.
IRRELEVANT_FIELDS = frozenset(
    """
    architectures transformers_version _name_or_path name_or_path auto_map torch_dtype dtype model_type
    initializer_range use_cache pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id unk_token_id
    decoder_start_token_id attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop hidden_dropout_prob
    attention_probs_dropout_prob classifier_dropout pretraining_tp output_attentions output_hidden_states return_dict
    return_dict_in_generate gradient_checkpointing use_flash_attn _attn_implementation attn_implementation
    _flash_attn_2_enabled _attn_implementation_autoset _attn_implementation_internal _commit_hash
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    unsloth_fixed unsloth_version max_length min_length do_sample
    temperature top_k top_p typical_p repetition_penalty length_penalty num_beams num_beam_groups num_return_sequences
    no_repeat_ngram_size encoder_no_repeat_ngram_size early_stopping diversity_penalty bad_words_ids
    begin_suppress_tokens suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    remove_invalid_values output_scores renormalize_logits torchscript use_bfloat16 tf_legacy_loss pruned_heads
    tie_encoder_decoder is_matryoshka matryoshka_dimensions cache_implementation use_mamba_kernels
    """.split()
)
# Fields that other families use, at the values that leave the computation alone.
NEUTRAL_VALUES: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_qk_norm": False,
    "per_layer_config": {},
}
_MOST = 2**31 - 1  # no size of a model comes near; products of larger ones overflow
# Unknown fields that ask for something else where they are false; every other unknown field is unset when it is false.
_FALSE_MATTERS = frozenset({"symmetric", "is_causal", "causal", "use_causal_mask"})


class Fields:
    """A JSON object whose fields are taken one by one; `finish` refuses what is left.

    `where` names the object in messages, and `path` are the names of the objects of config.json that it lies in.
    `length` is the longest sequence that will be run, for fields that have no effect on shorter ones.

    Raises:
        ConfigError: from any method; the message names the file, the field and its value.
    """

    def __init__(self, values: Mapping[str, Any], where: str, length: int = 0, path: tuple[str, ...] = ()) -> None:
        self._values = dict(values)
        self.length = length
        self.where = where
        self.path = path

    def inside(self, name: str, values: Mapping[str, Any]) -> Fields:
        """The fields `values` of the object `name` in this one."""
        return type(self)(values, f"{self.where}: {name}", self.length, (*self.path, name))

    def error(self, name: str, message: str) -> ConfigError:
        """An error about one field, for the caller to raise."""
        return ConfigError(f"{self.where}: {name} {message}")

    def take(self, name: str, default: Any = None) -> Any:
        """The field's value as it is; `default` where it is absent."""
        return self._values.pop(name, default)

    def mapping(self, name: str) -> dict[str, Any] | None:
        """The object that the field holds, as it is; None where it is absent or null."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise self.error(name, f"must be an object, got {value!r:.80}.")
        return value

    def skip(self, *names: str) -> None:
        """Take fields that change nothing."""
        for name in names:
            self.take(name)

    def check_divided(self, name: str, count: int, by: str, parts: int) -> None:
        """Raise ConfigError unless the field `by`, which is `parts`, divides the field `name`, which is `count`."""
        if count % parts:
            raise self.error(name, f"is {count}, which {by}={parts} does not divide.")

    def holds(self, name: str) -> bool:
        """Whether the field is there and not null, and hasn't been taken."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, and of 31 bits; `default` where it is absent or null, unless None, which asks for one."""
        value = self._values.pop(name, None)
        if value is None:
            return self._usual(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, f"must be a whole number, got {value!r}.")
        if value < least:
            raise self.error(name, f"must be at least {least}, got {value}.")
        if value > _MOST:
            raise self.error(name, f"must be at most {_MOST}, got {value!s:.40}.")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number greater than `above`; `default` as in `integer`."""
        value = self._values.pop(name, None)
        if value is None:
            return self._usual(name, default)
        if not is_finite(value):
            raise self.error(name, f"must be a finite number, got {value!r:.80}.")
        if value <= above:
            raise self.error(name, f"must be greater than {above:g}, got {value}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where it is absent or null."""
        value = self._values.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}.")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of `allowed`; `default` as in `integer`."""
        value = self._values.pop(name, None)
        if value is None:
            return self._usual(name, default, f"; it must be one of {', '.join(allowed)}")
        if value not in allowed:
            raise self.error(name, f"is {value!r}, which is not supported; it must be one of {', '.join(allowed)}.")
        return str(value)

    def names(self, name: str, allowed: Iterable[str], count: int, *, more: bool = False) -> list[str] | None:
        """A list of `count` of the `allowed` names, one per layer (with `more`, at least as many); None where it is absent or null."""
        value = self._values.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or (len(value) > count and not more):
            held = f"{len(value)} of them: " if isinstance(value, list) else ""
            raise self.error(
                name, f"must be a list of {count} names, one for each of num_hidden_layers, got {held}{_start(value)}."
            )
        allowed = tuple(allowed)
        for kind in value:
            if kind not in allowed:
                raise self.error(
                    name, f"holds {kind!r}, which is not supported in this family; supported are {', '.join(allowed)}."
                )
        return value[:count]

    def layers(self, name: str, count: int) -> list[int] | None:
        """A list of numbers of the model's `count` layers; None where it is absent or null."""
        value = self._values.pop(name, None)
        whole = isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        if value is not None and not (whole and all(0 <= x < count for x in value)):
            raise self.error(name, f"must be a list of layer numbers from 0 to {count - 1}, got {value!r:.120}.")
        return None if value is None else list(value)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse any field that was not taken, is not irrelevant, and is not unset (false, null or empty).

        Unknown fields that are unset are listed once in the log.
        """
        known = IRRELEVANT_FIELDS.union(ignored)
        unset: list[str] = []
        for name, value in self._values.items():
            if name in known or value is None or (name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]):
                continue
            shown = _start(value)
            if value is not False and value not in ("", [], {}) or name in _FALSE_MATTERS:
                raise self.error(name, f"is {shown}, a field that pagerunner does not know. {self._how_to_allow(name)}")
            unset.append(f"{name}={shown}")
        if unset:
            log_once(f"{self.where}: passed over unknown fields that are unset: {', '.join(unset)}.")

    def _usual(self, name: str, default: Value | None, wanted: str = "") -> Value:
        if default is None:
            raise self.error(name, f"is missing{wanted}.")
        return default

    def _how_to_allow(self, name: str) -> str:
        overrides: Any = None
        for key in reversed((*self.path, name)):
            overrides = {key: overrides}
        return (
            "It may change what the model computes, so it is not passed over by itself. If it doesn't matter for text, "
            f"pass it over by name: --hf-overrides '{json.dumps(overrides)}' (hf_overrides in Python, with None for null)."
        )


def _start(value: Any) -> str:
    """A value as it is, or its beginning, cut between the parts of a list."""
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117].rpartition(',')[0] or shown[:117]}, ..."


@functools.cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """A config is read by more than one part of an engine; its reader still says a thing once."""
    logger.log(level, "%s", text)
