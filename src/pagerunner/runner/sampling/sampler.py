"""The sampler: one step's logits in, one token per row out. State is indexed by slot and never moves.

Order, as in vLLM: log-probabilities of the raw logits; grammar masks; allowed ids; bad words; min_tokens; logit bias; penalties; greedy
rows take the most likely token; the others go through temperature, min-p, top-k, top-p and draw.

Shape letters: S sampled rows, T prompt tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from pagerunner.errors import InvalidRequestError
from pagerunner.ops.mask import allow_bits
from pagerunner.ops.sample import draw, greedy
from pagerunner.ops.transfer import BestCopies, BestCopy, ToHost, bits_to_device, to_device
from pagerunner.runner.sampling.layout import Layout, LogprobRows, build_layout
from pagerunner.runner.sampling.logprobs import gather_logprobs, to_token_logprobs
from pagerunner.runner.sampling.processors import allow_only, ban_words, penalize
from pagerunner.runner.sampling.slots import AllowedIds, SlotParams, broken_slot, compile_slot
from pagerunner.types import NO_TOKEN_ALLOWED, SlotInit, TokenLogprobs

logger = logging.getLogger(__name__)

_KEPT_LAYOUTS = 8
_PROMPT_ROWS_AT_ONCE = 256

BAD_LOGITS = "The model's logits hold NaN or infinity, so no token can be sampled."


class Sampled:
    """The tokens of one step. `token_ids` int64 [S] stays on the device; `read` brings everything to the host."""

    __slots__ = ("_copy", "_known_errors", "_logprob_rows", "_read", "token_ids")

    def __init__(
        self,
        token_ids: torch.Tensor,
        copy: ToHost | BestCopy,
        logprob_rows: LogprobRows | None,
        known_errors: dict[int, str],
    ) -> None:
        self.token_ids = token_ids
        self._copy = copy
        self._logprob_rows = logprob_rows
        self._known_errors = known_errors
        self._read: tuple[list[int], list[TokenLogprobs | None], dict[int, str]] | None = None

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token ids and, for rows that asked, log-probabilities. Waits for this step only. Rows in `errors` hold some
        id of the vocabulary that means nothing."""
        tokens, logprobs, _ = self._fetch()
        return tokens, logprobs

    @property
    def errors(self) -> dict[int, str]:
        """Rows that have no token to sample, with the sentence for the client. Waits like `read`."""
        return self._fetch()[2]

    def _fetch(self) -> tuple[list[int], list[TokenLogprobs | None], dict[int, str]]:
        if self._read is None:
            tokens, best, *lists = self._copy.lists()
            logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
            if self._logprob_rows is not None:
                rows = self._logprob_rows.row_numbers
                found = to_token_logprobs([tokens[row] for row in rows], lists, self._logprob_rows.top)
                for row, value in zip(rows, found, strict=True):
                    logprobs[row] = value
            errors: dict[int, str] = {}
            if not math.isfinite(sum(best)):  # which no number of finite float32 logits makes infinite
                errors = {
                    row: NO_TOKEN_ALLOWED if value == -math.inf else BAD_LOGITS
                    for row, value in enumerate(best)
                    if not math.isfinite(value)
                }
            errors.update(self._known_errors)
            self._read = (tokens, logprobs, errors)
        return self._read


class Sampler:
    """Samples slots. A request's state is set by `init_slot` and replaced by the next request's.

    Device memory: see `state_bytes`; what a request lists itself (bias, allowed ids, bad words) comes on top while it
    holds its slot.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._allowed_ids = AllowedIds(vocab_size, self._device)
        self._params: list[SlotParams | None] = [None] * max_num_seqs
        self._takes_best = [False] * max_num_seqs
        # Twice a token's count in the output, plus 1 if the prompt holds it. Rows without penalties are never touched.
        self._seen = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=self._device)
        # Latest generated tokens, newest last; as wide as the longest bad-word prefix met so far.
        self._recent = torch.full((max_num_seqs, 1), -1, dtype=torch.int64, device=self._device)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._best_copies = BestCopies(max_num_seqs, self._device)

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Device bytes that a sampler of this size holds from the start."""
        return max_num_seqs * (vocab_size * 4 + 8)

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot, new or back from preemption; nothing of the slot's former request remains.

        A request whose parameters can't be compiled, such as a token id outside the vocabulary, doesn't raise, for the
        sake of its neighbours: its row is in `Sampled.errors` when it is sampled.

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
                self._init_recent(slot, params.bad_words.max_prefix, init.output_token_ids)
        except InvalidRequestError as error:
            params = broken_slot(init.request, str(error))
        except RuntimeError:
            raise
        except Exception as error:  # a bug that one request has found
            logger.exception("The sampling parameters of request %s can't be used.", init.request.request_id)
            params = broken_slot(init.request, f"Its sampling parameters can't be used: {error!r}.")
        self._params[slot] = params
        self._takes_best[slot] = params.takes_best

    def take_best(self, slots: Sequence[int]) -> bool:
        """Whether each of the slots takes its most likely token and asks for nothing else, so that `best` will do."""
        return all(map(self._takes_best.__getitem__, slots))

    def best(self, tokens_S: torch.Tensor, best_S: torch.Tensor) -> Sampled:
        """What `sample` returns, of most likely tokens int64 [S] that are known already, and their logits."""
        return Sampled(tokens_S, self._best_copies.copy(tokens_S, best_S), None, {})

    def sample(
        self, logits_SV: torch.Tensor, slots: list[int], positions: list[int], masks: Mapping[int, bytes] | None = None
    ) -> Sampled:
        """Sample one token per row. The logits are consumed: processors change them in place.

        Args:
            logits_SV: [S, V] of any floating dtype, row i for `slots[i]`.
            slots: distinct slots that hold a request.
            positions: absolute position of each row's new token; the first one after the prompt is at prompt length.
            masks: by row, which tokens a grammar allows; see ops/mask.py.
        """
        logits_SV = logits_SV.float().contiguous()
        layout = self._layout(slots)
        raw_LV = self._raw_rows(logits_SV, layout, bool(masks))
        if masks:
            rows_N = to_device(list(masks), torch.int64, self._device)
            allow_bits(logits_SV, rows_N, bits_to_device(list(masks.values()), self._device))
        self._process(logits_SV, layout, positions)
        tokens_S, best_S = self._choose(logits_SV, layout, positions)
        self._remember(layout, tokens_S)
        report: tuple[torch.Tensor, ...] = ()
        if layout.logprobs is not None and raw_LV is not None:
            report = gather_logprobs(raw_LV, tokens_S.index_select(0, layout.logprobs.rows), max(layout.logprobs.top))
        return Sampled(tokens_S, ToHost((tokens_S, best_S, *report), self._device), layout.logprobs, layout.errors)

    def prompt_logprobs(self, logits_TV: torch.Tensor, target_ids_T: torch.Tensor, num: int) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's own tokens: row t scores `target_ids_T[t]`, the token after position t,
        with `num` alternatives. Waits for the device."""
        found: list[TokenLogprobs] = []
        for start in range(0, logits_TV.shape[0], _PROMPT_ROWS_AT_ONCE):
            targets = target_ids_T[start : start + _PROMPT_ROWS_AT_ONCE]
            report = gather_logprobs(logits_TV[start : start + _PROMPT_ROWS_AT_ONCE].float(), targets, num)
            lists = [tensor.tolist() for tensor in report]
            found += to_token_logprobs(targets.tolist(), lists, [num] * len(targets))
        return found

    def _layout(self, slots: Sequence[int]) -> Layout:
        key = tuple(slots)
        layout = self._layouts.get(key)
        if layout is None:
            params = [p for p in (self._params[slot] for slot in slots) if p is not None]
            assert len(params) == len(slots), "a slot was sampled that holds no request"
            layout = build_layout(slots, params, self._vocab_size, self._device)
            if len(self._layouts) >= _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = layout
        return layout

    def _raw_rows(self, logits_SV: torch.Tensor, layout: Layout, masked: bool) -> torch.Tensor | None:
        """The logits that log-probabilities are reported of, safe from what processors do."""
        if layout.logprobs is None:
            return None
        if len(layout.logprobs.row_numbers) == layout.num_rows and not (layout.changes_logits or masked):
            return logits_SV
        return logits_SV.index_select(0, layout.logprobs.rows)

    def _process(self, logits_SV: torch.Tensor, layout: Layout, positions: list[int]) -> None:
        if not layout.changes_logits:
            return
        if layout.allowed is not None:
            allow_only(logits_SV, layout.allowed)
        if layout.bad_words is not None:
            ban_words(logits_SV, layout.bad_words, self._recent)
        held = [flat for h in layout.held if positions[h.row] < h.until for flat in h.flat_ids]
        if held:
            logits_SV.view(-1).index_fill_(0, to_device(held, torch.int64, self._device), -math.inf)
        if layout.bias_flat is not None and layout.bias_values is not None:
            logits_SV.view(-1).index_add_(0, layout.bias_flat, layout.bias_values)
        if layout.penalties is not None:
            penalize(logits_SV, layout.penalties, self._seen)

    def _choose(
        self, logits_SV: torch.Tensor, layout: Layout, positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [S] and the processed logit that shows whether the row had any: NaN or infinite if not."""
        random = layout.random
        if random is None:
            return greedy(logits_SV)
        uniform = [p.uniforms.at(positions[row]) for p, row in zip(random.params, random.row_numbers, strict=True)]
        uniform_N = to_device(uniform, torch.float64, self._device)
        if random.index is None:
            return draw(logits_SV, random.filters, uniform_N)
        drawn_N, best_N = draw(logits_SV.index_select(0, random.index), random.filters, uniform_N)
        tokens_S, best_S = greedy(logits_SV)
        return tokens_S.index_copy_(0, random.index, drawn_N), best_S.index_copy_(0, random.index, best_N)

    def _remember(self, layout: Layout, tokens_S: torch.Tensor) -> None:
        """Penalties and bad words follow the sampled tokens on the device: the host may not know them yet."""
        if layout.penalties is not None:
            flat = layout.penalties.state_start + tokens_S.index_select(0, layout.penalties.rows)
            self._seen.view(-1).index_add_(0, flat, torch.full_like(flat, 2, dtype=torch.int32))
        if layout.bad_words is not None:
            new = tokens_S.index_select(0, layout.bad_words.rows)[:, None]
            older = self._recent.index_select(0, layout.bad_words.slots)[:, 1:]
            self._recent.index_copy_(0, layout.bad_words.slots, torch.cat((older, new), dim=1))

    def _init_seen(self, slot: int, prompt: list[int], output: list[int]) -> None:
        row = self._seen[slot].zero_()
        row.index_fill_(0, to_device(prompt, torch.int64, self._device), 1)
        ids = to_device(output, torch.int64, self._device)
        row.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def _init_recent(self, slot: int, width: int, output: list[int]) -> None:
        missing = width - self._recent.shape[1]
        if missing > 0:
            fill = torch.full((self._recent.shape[0], missing), -1, dtype=torch.int64, device=self._device)
            self._recent = torch.cat((fill, self._recent), dim=1)
        width = self._recent.shape[1]
        latest = output[-width:]
        self._recent[slot] = to_device([-1] * (width - len(latest)) + latest, torch.int64, self._device)
