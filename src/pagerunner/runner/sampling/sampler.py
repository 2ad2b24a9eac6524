"""The sampler: one step's logits in, one token per row out. State is indexed by slot and never moves.

`ops.sample.sample` samples every row by the slot's settings, which lie on the device: the most likely token, or one drawn after
temperature, min-p, top-k and top-p. It needs nothing of the host, so decode graphs end with it.

Some rows ask for more. They are called odd rows. Their logits are processed in vLLM's order: log-probabilities of the raw
logits; grammar masks; allowed ids; bad words; min_tokens; logit bias; penalties. Then odd rows are sampled again, but
for those that only report log-probabilities. All other rows keep their token.

Of several ranks each computes the logits of its own token ids (`vocabulary.py`). Their graphs end with the most likely tokens. Rows that draw
are sampled after it: without filters from weights that ranks gather, with filters by one rank each, which gets the rows' logits.

Shape letters: S sampled rows, N odd rows among them, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.ops.async_copy import BestCopies, BestCopy, ToHost, bits_to_device, to_device
from pagerunner.ops.logprobs import gather_logprobs
from pagerunner.ops.mask import allow_bits
from pagerunner.ops.penalties import penalized
from pagerunner.ops.sample import WORDS, SlotSettings, sample
from pagerunner.ops.tables import write_entries
from pagerunner.ops.vocab_pick import DrawnRows
from pagerunner.runner.sampling.layout import HeldRows, Layout, LogprobRows, build_layout
from pagerunner.runner.sampling.logprobs import NUM_REPORTED, to_token_logprobs
from pagerunner.runner.sampling.processors import ban_words
from pagerunner.runner.sampling.slots import AllowedIds, SlotParams, broken_slot, compile_slot
from pagerunner.runner.sampling.vocabulary import DividedVocabulary
from pagerunner.types import NO_TOKEN_ALLOWED, SlotInit, TokenLogprobs

logger = logging.getLogger(__name__)

_LEAST_LAYOUTS = 32
_ODD_ROWS_AT_ONCE = 256  # rows whose logits are copied as float32 and changed at once

BAD_LOGITS = (
    "The model's logits hold NaN or infinity, so no token can be sampled. In float16, numbers of models made for bfloat16 overflow: "
    'dtype="bfloat16" holds them. In another dtype the checkpoint is damaged.'
)


class SampledRows(NamedTuple):
    """Rows to sample: distinct slots that hold a request, on the host and, int64 [S], on the device.

    `lengths` counts each row's tokens so far, which is the new token's position. `positions_S` int64 [S] are the positions of
    the tokens before the new ones, on the device.

    With drafts a row has up to `width` places: its last token's, and one after each draft. A token is sampled for each. Logits and what lies on the
    device are by place then, [S * width]; row r has the first `counts[r]` of its places, and at others `slots_S` is -1. `lengths` are of the first places, and
    the least that is possible. `drafts_NK`: the drafts, by slot.
    """

    slots: Sequence[int]
    lengths: Sequence[int]
    slots_S: torch.Tensor
    positions_S: torch.Tensor
    width: int = 1
    counts: Sequence[int] = ()
    drafts_NK: torch.Tensor | None = None

    def places(self, row: int) -> range:
        """The places that a row has."""
        return range(row * self.width, row * self.width + self.counts[row]) if self.width > 1 else range(row, row + 1)


Settle = Callable[[torch.Tensor], torch.Tensor]
"""Tells the slots what was sampled, int64 [S], and returns what of it counts: see `ops.accept.accept`. Without drafts all of it does."""


Masks = Mapping[int, Sequence[bytes | None]]
"""By row, of each place which tokens may be taken there: see `ops.mask.allow_bits`. None where all may."""


@dataclass(slots=True, eq=False)
class Sampled:
    """The tokens of one step. `token_ids` int64 [S] stays on the device; `read` brings everything to the host. With drafts all is by
    place, and `token_ids` are below 0 behind a row's tokens. `new_drafts` are those of the next rows that the host wants to know, below 0 behind those that there are.
    """

    token_ids: torch.Tensor
    copy: BestCopy
    logprob_rows: Sequence[LogprobRows]
    known_errors: dict[int, str]
    reports: ToHost | None = None
    new_drafts: ToHost | None = None
    _read: tuple[list[int], list[TokenLogprobs | None], dict[int, str]] | None = None

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token ids and, for rows that asked, log-probabilities. Waits for this step only. Rows in `errors` hold some
        id of the vocabulary that means nothing."""
        tokens, logprobs, _ = self._fetch()
        return tokens, logprobs

    def read_drafts(self) -> list[list[int]]:
        """The `new_drafts` of each row."""
        rows = [] if self.new_drafts is None else self.new_drafts.lists()[0]
        return [list(takewhile(lambda token: token >= 0, row)) for row in rows]

    @property
    def errors(self) -> dict[int, str]:
        """Rows that have no token to sample, with the sentence for the client. Waits like `read`."""
        return self._fetch()[2]

    def _fetch(self) -> tuple[list[int], list[TokenLogprobs | None], dict[int, str]]:
        if self._read is None:
            tokens, best = self.copy.lists()
            lists = [] if self.reports is None else self.reports.lists()
            logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
            for part, wanted in enumerate(self.logprob_rows):
                report = lists[part * NUM_REPORTED : (part + 1) * NUM_REPORTED]
                found = to_token_logprobs([tokens[row] for row in wanted.row_numbers], report, wanted.top)
                for row, value in zip(wanted.row_numbers, found, strict=True):
                    logprobs[row] = value if tokens[row] >= 0 else None
            errors: dict[int, str] = {}
            if not math.isfinite(sum(best)):  # finite float32 logits never sum up to infinity in float64
                errors = {
                    row: NO_TOKEN_ALLOWED if value == -math.inf else BAD_LOGITS
                    for row, value in enumerate(best)
                    if not math.isfinite(value) and tokens[row] >= 0
                }
            errors.update(self.known_errors)
            self._read = (tokens, logprobs, errors)
        return self._read


class Sampler:
    """Samples slots. A request's state is set by `init_slot` and replaced by the next request's.

    Device memory: see `state_bytes`; what a request lists itself (bias, allowed ids, bad words) comes on top while it
    holds its slot.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        vocabulary: DividedVocabulary | None = None,
        num_drafts: int = 0,
    ) -> None:
        """`vocabulary`: logits are those of one of several ranks. `num_drafts`: the most of a row."""
        self._device, self._vocabulary = torch.device(device), vocabulary
        self._vocab_size = vocab_size
        self._allowed_ids = AllowedIds(vocab_size, self._device)
        self._params: list[SlotParams | None] = [None] * max_num_seqs
        self._plain_from = [0] * max_num_seqs
        self._free = [False] * max_num_seqs  # slots whose rows ranks draw together, without filters
        self._shared_out = [False] * max_num_seqs  # and with filters
        self.settings = SlotSettings.empty(max_num_seqs, self._device)
        self._new_settings: dict[int, int] = {}
        # Twice a token's count in the output, plus 1 if the prompt holds it. Rows without penalties are never touched.
        self._seen = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=self._device)
        # Latest generated tokens, newest last: what the last token of a bad word may follow.
        self._recent = torch.full((max_num_seqs, _recent_width()), -1, dtype=torch.int32, device=self._device)
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]], Layout] = {}
        # those of two steps in which all places are odd: were there fewer, none would be found again
        places = max_num_seqs * (1 + num_drafts)
        self._most_layouts = max(_LEAST_LAYOUTS, 2 * -(-places // _ODD_ROWS_AT_ONCE))
        self._best_copies = BestCopies(places, self._device)

    @property
    def is_divided(self) -> bool:
        """Whether logits are those of one of several ranks."""
        return self._vocabulary is not None

    @property
    def whole_mask(self) -> bytes:
        """A mask that allows all tokens; see ops/mask.py."""
        return b"\xff" * 4 * -(-self._vocab_size // 32)

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Device bytes that a sampler of this size holds from the start."""
        return max_num_seqs * (vocab_size * 4 + WORDS * 8 + _recent_width() * 4)

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot, new or back from preemption; nothing of the slot's former request remains.

        A request whose parameters can't be compiled doesn't raise, because its neighbours must go on. Its row is in
        `Sampled.errors` when it is sampled. Example: a token id outside the vocabulary.

        Raises:
            RuntimeError: the device fails (torch's errors are of this type).
        """
        slot = init.slot
        self._layouts.clear()
        try:
            params = compile_slot(init.request, self._vocab_size, self._device, self._allowed_ids)
            if params.penalties is not None:
                self._init_seen(slot, init.request.prompt_token_ids, init.output_token_ids)
            if params.bad_words is not None:
                self._init_recent(slot, init.output_token_ids)
        except InvalidRequestError as error:
            params = broken_slot(init.request, str(error))
        except RuntimeError:
            raise
        except Exception as error:  # a bug that one request has found
            logger.exception("The sampling parameters of request %s can't be used.", init.request.request_id)
            params = broken_slot(init.request, f"Its sampling parameters can't be used: {error!r}.")
        self._params[slot] = params
        divided = self._vocabulary is not None and params.draws
        self._plain_from[slot] = params.plain_from
        self._free[slot], self._shared_out[slot] = divided and not params.filters, divided and params.filters
        self._new_settings.update(zip(range(slot * WORDS, (slot + 1) * WORDS), params.settings, strict=True))

    def new_settings(self) -> dict[int, int]:
        """Settings of slots that were taken since the last call, for `write_settings`: integers by place."""
        found, self._new_settings = self._new_settings, {}
        return found

    def write_settings(self, places_N: torch.Tensor, words_N: torch.Tensor) -> None:
        """Put `new_settings` where the step finds them; int64, on the device."""
        write_entries(self.settings.words.view(-1), places_N, words_N)

    def pick(
        self, logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph finds: see `ops.sample.sample`. Of several ranks, the most likely token of every row."""
        if self._vocabulary is not None:
            return self._vocabulary.best(logits_SV)
        return sample(logits_SV, slots_S, positions_S, self.settings)

    def whole(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """The logits of all token ids."""
        return logits_SV if self._vocabulary is None else self._vocabulary.whole(logits_SV)

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows: SampledRows,
        masks: Masks | None = None,
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        settle: Settle | None = None,
    ) -> Sampled:
        """Sample one token per row or place, without waiting for the device.

        Args:
            logits_SV: [S, V] of any floating dtype. They are not changed.
            rows: whose they are, row by row.
            masks: by row, which tokens a grammar allows at each place; see ops/mask.py.
            drawn: tokens int64 [S] and largest logits [S] of `pick`, if a graph has found them already, and what `settle` made of the
                tokens. The first two may be changed in place where a row asks for more; such tokens are settled again.
            settle: without it tokens are as they are sampled.
        """
        masks = masks or {}
        odd = self._odd_rows(rows, masks)
        if drawn is None:
            tokens_S, best_S = self.pick(logits_SV, rows.slots_S, rows.positions_S)
        else:
            tokens_S, best_S, found_S = drawn
        if drawn is not None and not odd and self._vocabulary is None:
            return Sampled(found_S, self._best_copies.copy(found_S, best_S), (), {})
        again = self._draw_together(logits_SV, rows, odd, (tokens_S, best_S))
        reports: list[torch.Tensor] = []
        layouts: list[Layout] = []
        errors: dict[int, str] = {}
        for first in range(0, len(odd), _ODD_ROWS_AT_ONCE):
            layout = self._layout(odd[first : first + _ODD_ROWS_AT_ONCE], rows, masks)
            theirs = _by_place(masks, layout.row_numbers, rows.width) if masks else {}
            (tokens_S, best_S), report = self._sample_odd(logits_SV, layout, rows, theirs, (tokens_S, best_S))
            reports += report
            layouts.append(layout)
            errors.update(layout.errors)
            again |= bool(layout.row_numbers)
        if drawn is None or again:
            found_S = tokens_S if settle is None else settle(tokens_S)
        for layout in layouts:
            self._remember(layout, found_S, rows.width)
        copy = self._best_copies.copy(found_S, best_S)
        wanted = [one.logprobs for one in layouts if one.logprobs is not None]
        return Sampled(found_S, copy, wanted, errors, ToHost(tuple(reports), self._device) if reports else None)

    def _odd_rows(self, rows: SampledRows, masks: Masks) -> list[int]:
        """Places of rows that ask for more than their settings say."""
        plain_from = list(map(self._plain_from.__getitem__, rows.slots))
        if not masks and not any(plain_from):
            return []
        found = [
            row
            for row, (length, plain) in enumerate(zip(rows.lengths, plain_from, strict=True))
            if length < plain or row in masks
        ]
        return found if rows.width == 1 else [place for row in found for place in rows.places(row)]

    def _draw_together(
        self, logits_SV: torch.Tensor, rows: SampledRows, odd: Sequence[int], found: tuple[torch.Tensor, torch.Tensor]
    ) -> bool:
        """Draw for the rows that ranks draw together, and write their tokens into `found`. Whether there are any."""
        if self._vocabulary is None:
            return False
        others, drew, every = set(odd), False, (logits_SV, found[1], rows.slots_S, rows.positions_S)
        ways = (self._free, self._vocabulary.draw), (self._shared_out, self._vocabulary.draw_filtered)
        for theirs, draw in ways:
            some = [
                place
                for row, slot in enumerate(rows.slots)
                if theirs[slot]
                for place in rows.places(row)
                if place not in others
            ]
            if some:
                index_N = self._layout(some, rows, {}).index
                own = every if len(some) == len(rows.slots_S) else tuple(one.index_select(0, index_N) for one in every)
                logits_NO, *drawn = own
                found[0].index_copy_(0, index_N, draw(logits_NO, DrawnRows(*drawn, self.settings)))
                drew = True
        return drew

    def _layout(self, odd: Sequence[int], rows: SampledRows, masks: Masks) -> Layout:
        slots, width = rows.slots, rows.width
        masked = tuple(odd[number] for number in _by_place(masks, odd, width)) if masks else ()
        key = (tuple(odd), tuple(slots[place // width] for place in odd), width, masked)
        layout = self._layouts.get(key)
        if layout is None:
            params = [p for p in map(self._params.__getitem__, key[1]) if p is not None]
            assert len(params) == len(odd), "a slot was sampled that holds no request"
            changed = masked if self._vocabulary is None else None  # ranks draw for all of them from whole rows
            layout = build_layout(odd, key[1], params, self._vocab_size, self._device, width, changed)
            if len(self._layouts) >= self._most_layouts:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = layout
        return layout

    def _sample_odd(
        self,
        logits_SV: torch.Tensor,
        layout: Layout,
        rows: SampledRows,
        masks: Mapping[int, bytes],
        found: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Sample a layout's rows again, and write their tokens and logits into `found`. Returns that, or what there is in its place if these are all rows, and what the rows report.

        `masks` are by the layout's rows."""
        wanted, index_N = layout.logprobs, layout.index
        source, at_N = logits_SV, index_N
        if self._vocabulary is not None:
            source, at_N = (
                self.whole(logits_SV.index_select(0, index_N)),
                torch.arange(len(index_N), device=self._device),
            )
        if layout.row_numbers:
            logits_NV = self._changed(source, at_N, layout, rows, masks)
            if len(index_N) == len(rows.slots_S):
                found = sample(logits_NV, rows.slots_S, rows.positions_S, self.settings)
            else:
                own = (one.index_select(0, index_N) for one in (rows.slots_S, rows.positions_S))
                for all_S, again_N in zip(found, sample(logits_NV, *own, self.settings), strict=True):
                    all_S.index_copy_(0, index_N, again_N)
        if wanted is None:
            return found, ()
        chosen_L = found[0].index_select(0, wanted.index)
        own_L = wanted.index if self._vocabulary is None else wanted.rows
        return found, gather_logprobs(source, own_L, chosen_L, max(wanted.top))

    def _changed(
        self, source: torch.Tensor, at_N: torch.Tensor, layout: Layout, rows: SampledRows, masks: Mapping[int, bytes]
    ) -> torch.Tensor:
        """Rows `at_N` of the raw logits, as they are after all processors. The raw ones stay as they are."""
        drafts_NK, penalties = rows.drafts_NK if rows.width > 1 else None, layout.penalties
        if not (masks or layout.edits):
            if penalties is None:  # of several ranks
                return source
            return penalized(source, at_N, penalties.of_rows, self._seen, drafts_NK)
        logits_NV = source.index_select(0, at_N).float()
        if masks:
            masked_M = to_device(list(masks), torch.int64, self._device)
            allow_bits(logits_NV, masked_M, bits_to_device(list(masks.values()), self._device))
        if layout.allowed is not None:
            allow_bits(logits_NV, layout.allowed.rows, layout.allowed.bits)
        if layout.bad_words is not None:
            ban_words(logits_NV, layout.bad_words, self._recent, drafts_NK)
        if layout.held is not None:
            self._hold(logits_NV, layout.held, rows)
        if layout.bias_flat is not None and layout.bias_values is not None:
            logits_NV.view(-1).index_add_(0, layout.bias_flat, layout.bias_values)
        if penalties is not None:
            logits_NV = penalized(logits_NV, None, penalties.of_rows, self._seen, drafts_NK)
        return logits_NV

    def _hold(self, logits_NV: torch.Tensor, held: HeldRows, rows: SampledRows) -> None:
        """Mask what may not be sampled before a row has its least number of tokens. With drafts the host has lower bounds of lengths."""
        lengths, width = rows.lengths, rows.width
        if any(lengths[place // width] + place % width < until for place, until in held.rows):
            early_H = rows.positions_S.index_select(0, held.place_H) + 1 < held.until_H
            logits_NV.view(-1).index_add_(0, held.flat_H, torch.where(early_H, -math.inf, 0.0))

    def _remember(self, layout: Layout, found_S: torch.Tensor, width: int) -> None:
        """Penalties and bad words follow the tokens on the device: the host may not know them yet."""
        if layout.penalties is not None:
            tokens_N = found_S.index_select(0, layout.penalties.index)
            added_N = torch.full_like(tokens_N, 2, dtype=torch.int32)
            if width > 1:  # what wasn't accepted is below 0
                added_N.masked_fill_(tokens_N < 0, 0)
                tokens_N = tokens_N.clamp(min=0)
            self._seen.view(-1).index_add_(0, layout.penalties.state_start + tokens_N, added_N)
        if layout.bad_words is not None and (heads := layout.bad_words.heads) is not None:
            new_NW = found_S.view(-1, width).index_select(0, heads).to(torch.int32)
            history = torch.cat((self._recent.index_select(0, layout.bad_words.head_slots), new_NW), dim=1)
            size = self._recent.shape[1]
            if width == 1:
                latest = history[:, 1:]
            else:
                first_N1 = (new_NW >= 0).sum(1, keepdim=True)
                latest = history.gather(1, first_N1 + torch.arange(size, device=history.device))
            self._recent.index_copy_(0, layout.bad_words.head_slots, latest)

    def _init_seen(self, slot: int, prompt: list[int], output: list[int]) -> None:
        row = self._seen[slot].zero_()
        row.index_fill_(0, to_device(prompt, torch.int64, self._device), 1)
        ids = to_device(output, torch.int64, self._device)
        row.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def _init_recent(self, slot: int, output: list[int]) -> None:
        width = self._recent.shape[1]
        latest = output[-width:]
        self._recent[slot] = to_device([-1] * (width - len(latest)) + latest, torch.int32, self._device)


def _by_place(masks: Masks, places: Iterable[int], width: int) -> dict[int, bytes]:
    """The masks of these places, by their numbers in the list."""
    found = {}
    for number, place in enumerate(places):
        row, behind = divmod(place, width)
        if row in masks and (mask := masks[row][behind]) is not None:
            found[number] = mask
    return found


def _recent_width() -> int:
    return max(limits.MAX_BAD_WORD_LENGTH - 1, 1)
