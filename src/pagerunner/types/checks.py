"""Checks of what users hand in: each raises an InvalidRequestError that names the parameter, the value and the limit."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from typing import NoReturn

from pagerunner import limits
from pagerunner.errors import InvalidRequestError

_MANY_IDS = 256


def require(condition: bool, param: str, message: str) -> None:
    """Raise InvalidRequestError(f"{param} {message}") unless the condition holds."""
    if not condition:
        refuse(param, message)


def refuse(param: str, message: str) -> NoReturn:
    """Raise InvalidRequestError(f"{param} {message}"). What is checked often makes its message only where it is needed."""
    raise InvalidRequestError(f"{param} {message}", param=param)


def check_rank(param: str, rank: int, count: int) -> int:
    """The number of one of `count` engines, or teams of ranks, if there is such a one."""
    fits = is_int(rank) and 0 <= rank < count
    require(fits, param, f"must be in [0, {count}), as data_parallel_size is {count}; got {show(rank)}.")
    return rank


def show(value: object) -> str:
    """A value from a user for an error message: its repr, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits refuses to become text
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_finite(value: object) -> bool:
    """Whether a value is a number, not a truth value, and neither infinite nor NaN."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_int(value: object) -> bool:
    """Whether a value is an integer of at most 64 bits, not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def at_most(count: int, limit: str, param: str, has: str) -> None:
    """Raise unless `count` is within the limit of that name. `has` says in words what is counted."""
    most = getattr(limits, limit)
    require(count <= most, param, f"{has}; at most {most} are allowed {limits.knob(limit)}." if count > most else "")


def range_text(value: int | None, least: int, limit: str) -> str:
    """The sentence about a value outside of [least, limit]; the limit's knob is named where a higher one would help."""
    knob = f" {limits.knob(limit)}" if value is not None and value >= least else ""
    return f"must be in [{least}, {getattr(limits, limit)}], got {show(value)}{knob}."


def as_strings(param: str, value: object, limit: str) -> tuple[str, ...]:
    """None, one string or several, as a tuple; `limit` names the most that are allowed."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{param} must be a string or a list of strings, got {show(value)}.", param=param)
    at_most(len(value), limit, param, f"has {len(value)} entries")
    for item in value:
        require(isinstance(item, str) and item != "", param, "must hold non-empty strings.")
        at_most(len(item), "MAX_STOP_STRING_CHARS", param, f"holds a string of {len(item)} characters")
        require(item.isascii() or _is_unicode(item), param, "holds a lone surrogate, which is not valid Unicode.")
    return tuple(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def as_token_ids(param: str, value: object, limit: str) -> tuple[int, ...]:
    """Token ids as a tuple; `limit` names the most that are allowed."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"{param} must be a list of token ids, got {show(value)}.", param=param)
    at_most(len(value), limit, param, f"has {len(value)} entries")
    # At once where all is well: there may be very many.
    if not set(map(type, value)) <= {int} or not 0 <= min(value, default=0) <= max(value, default=0) < 2**63:
        for token in value:
            require(is_int(token) and token >= 0, param, f"must hold token ids (integers from 0), got {show(token)}.")
    return tuple(value)


def extremes(ids: Collection[int]) -> tuple[int, int]:
    """The least and the largest of some integers; 0 and 0 of none. Long lists of token ids take a fifth of what `min` and `max` take."""
    if isinstance(ids, list) and len(ids) >= _MANY_IDS:
        import numpy  # not at the start of a command, which has no ids

        try:
            packed = numpy.frombuffer(array("I", ids), numpy.uint32)
        except (OverflowError, TypeError):  # what isn't a token id
            pass
        else:
            return int(packed.min()), int(packed.max())
    return min(ids, default=0), max(ids, default=0)


def in_vocabulary(param: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequestError if one of `ids` is no token id of a model with `vocab_size` of them."""
    for token in extremes(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{param} holds token id {token}, outside the vocabulary of {vocab_size} tokens.", param=param
            )


def as_logit_bias(value: object) -> dict[int, float]:
    """Biases by token id. Keys may be digits in a string: that is how JSON carries them."""
    name = "logit_bias"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must map token ids to numbers, got {show(value)}.", param=name)
    at_most(len(value), "MAX_LOGIT_BIAS", name, f"has {len(value)} entries")
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        require(is_int(token) and token >= 0, name, f"must have token ids as keys, got {show(key)}.")
        require(
            is_finite(bias) and -100 <= bias <= 100, name, f"of token {token} must be in [-100, 100], got {show(bias)}."
        )
        require(token not in checked, name, f"names token {token} twice.")
        checked[token] = float(bias)
    return checked
