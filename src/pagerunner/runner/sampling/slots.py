"""What one slot asks of the sampler, compiled once when a request takes the slot."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch

from pagerunner.ops.async_copy import to_device
from pagerunner.ops.sample import SlotSettings
from pagerunner.types import EngineRequest
from pagerunner.types.checks import in_vocabulary

# Below this a temperature is greedy decoding (vLLM's bound): dividing by less overflows float32 logits.
GREEDY_TEMPERATURE = 1e-5
# Values beyond these have no further effect on real logits, but leave the range of float32.
_MAX_TEMPERATURE = 1e30
_MAX_REPETITION = 1e20
NEVER = 2**62  # a position that no sequence reaches


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of one request; at least one of them is active."""

    repetition: float
    frequency: float
    presence: float


@dataclass(frozen=True, slots=True)
class Bias:
    """Sparse additions to a row's logits: `ids` int64 [B], `values` float32 [B], on the device."""

    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Banned token sequences, flattened: word w is its prefix and the token `last[w]` that may not follow it.

    Prefix token p of the flat list belongs to word `word[p]` and must equal the token generated `distance[p]` steps
    before the next one (1 is the latest). All int64 on the device.
    """

    last: torch.Tensor  # [W]
    prefix_len: torch.Tensor  # [W]
    prefix: torch.Tensor  # [P]
    distance: torch.Tensor  # [P]
    word: torch.Tensor  # [P]


@dataclass(frozen=True, slots=True)
class SlotParams:
    """One request's sampling parameters in the form that the step needs; None or 0 is a feature not in use.

    `settings` are the slot's words of `ops.sample.SlotSettings`. `held_ids` are masked until `min_tokens` tokens are
    generated. `error` says why the row can't be sampled at all. `draws`: the temperature isn't 0; `filters`: min-p, top-k or top-p is on.
    """

    settings: tuple[int, int, int, int]
    prompt_len: int
    logprobs: int | None = None
    min_tokens: int = 0
    held_ids: tuple[int, ...] = ()
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: torch.Tensor | None = None
    bad_words: BadWords | None = None
    error: str | None = None
    draws: bool = False
    filters: bool = False

    @property
    def changes(self) -> bool:
        """Whether the request's logits may be changed before they are sampled."""
        asks = (self.penalties, self.bias, self.allowed, self.bad_words)
        return self.min_tokens > 0 or any(value is not None for value in asks)

    @property
    def plain_from(self) -> int:
        """From this position on, the settings alone say all that the request asks for.

        `NEVER` if there is no such position.
        """
        asks = (self.error, self.logprobs, self.penalties, self.bias, self.allowed, self.bad_words)
        if any(value is not None for value in asks):
            return NEVER
        return self.prompt_len + self.min_tokens if self.min_tokens else 0


def broken_slot(request: EngineRequest, error: str) -> SlotParams:
    """A slot whose request cannot be sampled: every token of it reports `error`."""
    settings = SlotSettings.pack(seed=0, temperature=0.0, min_p=0.0, top_k=0, top_p=1.0)
    return SlotParams(settings, prompt_len=len(request.prompt_token_ids), error=error)


class AllowedIds:
    """Masks of allowed tokens on the device, as of `ops.mask.allow_bits`.

    All siblings of a request share one, as long as one of them holds it.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ids: tuple[int, ...] = ()
        self._latest: weakref.ref[torch.Tensor] | None = None

    def tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        """int32 [W]. Raises InvalidRequestError for an id outside the vocabulary."""
        found = None if self._latest is None or ids is not self._ids else self._latest()
        if found is None:
            in_vocabulary("allowed_token_ids", ids, self._vocab_size)
            bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.bool_)
            bits[list(ids)] = True
            found = to_device(np.packbits(bits, bitorder="little").view(np.int32), torch.int32, self._device)
            self._ids, self._latest = ids, weakref.ref(found)
        return found


def compile_slot(
    request: EngineRequest, vocab_size: int, device: torch.device, allowed_ids: AllowedIds | None = None
) -> SlotParams:
    """The slot parameters of a request; `allowed_ids` knows those of its siblings.

    Raises:
        InvalidRequestError: a token id lies outside the vocabulary. On a CUDA device it would kill the process.
    """
    params = request.params
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: torch.Tensor | None = None
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        in_vocabulary("prompt_token_ids", request.prompt_token_ids, vocab_size)
        repetition = min(max(params.repetition_penalty, 1.0 / _MAX_REPETITION), _MAX_REPETITION)
        penalties = Penalties(repetition, params.frequency_penalty, params.presence_penalty)
    held_ids: tuple[int, ...] = ()
    if params.min_tokens > 0:
        in_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
        eos = (token for token in request.eos_token_ids if token < vocab_size)
        held_ids = tuple(sorted({*eos, *(params.stop_token_ids or ())}))
    if params.logit_bias:
        in_vocabulary("logit_bias", params.logit_bias, vocab_size)
        bias = Bias(
            to_device(list(params.logit_bias.keys()), torch.int64, device),
            to_device(list(params.logit_bias.values()), torch.float32, device),
        )
    if params.allowed_token_ids is not None:
        allowed = (allowed_ids or AllowedIds(vocab_size, device)).tensor(params.allowed_token_ids)
    draws, top_k = params.temperature >= GREEDY_TEMPERATURE, params.top_k if params.top_k < vocab_size else 0
    settings = SlotSettings.pack(
        seed=request.seed,
        temperature=min(params.temperature, _MAX_TEMPERATURE) if draws else 0.0,
        min_p=params.min_p,
        top_k=top_k,
        top_p=params.top_p,
    )
    return SlotParams(
        settings,
        prompt_len=len(request.prompt_token_ids),
        logprobs=params.logprobs,
        min_tokens=params.min_tokens if held_ids else 0,
        held_ids=held_ids,
        penalties=penalties,
        bias=bias,
        allowed=allowed,
        bad_words=_compile_bad_words(request.bad_words_ids, vocab_size, device),
        draws=draws,
        filters=params.min_p > 0.0 or top_k > 0 or params.top_p < 1.0,
    )


def _compile_bad_words(words: tuple[tuple[int, ...], ...], vocab_size: int, device: torch.device) -> BadWords | None:
    if not words:
        return None
    for word in words:
        in_vocabulary("bad_words", word, vocab_size)
    prefix = [token for word in words for token in word[:-1]]
    distance = [d for word in words for d in range(len(word) - 1, 0, -1)]
    owner = [w for w, word in enumerate(words) for _ in word[:-1]]
    return BadWords(
        last=to_device([word[-1] for word in words], torch.int64, device),
        prefix_len=to_device([len(word) - 1 for word in words], torch.int64, device),
        prefix=to_device(prefix, torch.int64, device),
        distance=to_device(distance, torch.int64, device),
        word=to_device(owner, torch.int64, device),
    )
