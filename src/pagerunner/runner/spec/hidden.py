"""Drafts by a model: one that works on the target's hidden states (EAGLE heads and multi-token prediction modules), or a smaller one that reads the text.

Its first pass is over all tokens of the target's step, each with the token behind it. So its pages hold what follows from the target's own hidden states, and
not what earlier drafts have left there. Then it goes on alone, one token a row in each pass, from the last token that counts.

Example: a row had tokens 10 and 11 and the drafts 12, 13, 14, of which 12 and 13 were right, and token 14' was sampled behind 13. The step's tokens are at
positions 11 to 14. The first pass gets tokens 12, 13, 14' there, and 14' at position 14, too, which nobody reads. What it leaves at position 13 guesses the token behind
14'. The next pass is at position 14.

Shape letters: T tokens of the step, S rows that get drafts, X features that a pass takes of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.models.drafting import Drafted, DraftModel
from pagerunner.ops.async_copy import to_device
from pagerunner.ops.batch import SlotState
from pagerunner.ops.drafting import PassTensors, build_pass, next_tokens, store_drafts
from pagerunner.ops.vocab_pick import best_tokens
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.sampling.vocabulary import DividedVocabulary
from pagerunner.runner.spec.base import Computed, Verified
from pagerunner.types import SlotInit, StepRow


class HiddenDrafter:
    """Drives a DraftModel. Everything that `go_on` does can be part of a graph.

    Its pieces of memory are the last `num_layers`. `vocabulary`: of several ranks each computes the logits of its own token ids.
    """

    def __init__(
        self,
        model: DraftModel,
        builder: BatchBuilder,
        state: SlotState,
        num_layers: int,
        max_model_len: int,
        vocabulary: DividedVocabulary | None = None,
    ) -> None:
        self._model, self._builder, self._state = model, builder, state
        self._last_position = max_model_len - 1
        self._vocabulary = vocabulary if model.divided else None
        device = state.tokens.device
        self._pass = PassTensors.empty(builder.max_rows, builder.num_groups, device)
        self._first_layer = len(builder.layers) - num_layers
        self._groups = tuple(sorted({memory.group for memory in builder.layers[self._first_layer :]}))
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def onward(self) -> HiddenDrafter:
        """See Drafter."""
        return self

    def room_for(self, tokens: int) -> torch.Tensor:
        """See OnwardDrafter."""
        return torch.empty(tokens, self._model.taken_size, dtype=self._model.taken_dtype, device=self._none.device)

    def init_slot(self, init: SlotInit) -> None:
        """See Drafter. A slot's pages and tables say all."""

    def draft(self, verified: Verified | None, count: int, computed: Computed | None) -> None:
        """See Drafter."""
        assert computed is not None, "it goes on from what the model has computed"
        self._tell(computed.rows)
        slots_S, count = (self._none, 0) if verified is None else (verified.slots_S, count)
        self.go_on(computed, slots_S, count)

    def go_on(self, computed: Computed, slots_S: torch.Tensor, count: int) -> None:
        """See OnwardDrafter.

        The pages of the step's tokens are filled even if nothing is drafted.
        """
        _, batch, taken_TX, places_S, _ = computed
        rows, state, model = batch.rows, self._state, self._model
        ids_T = batch.token_ids
        if model.shifted:
            ids_T = next_tokens(ids_T, rows.row_T, rows.positions_T, rows.slots_R, state)
        wanted_S = self._none
        if count and model.shifted:
            wanted_S = places_S + state.accepted.index_select(0, slots_S.clamp(min=0)).mul_(slots_S >= 0)
        drafted = model.first(taken_TX, replace(batch, token_ids=ids_T, logits_index=wanted_S, last_alone=True))
        if count and not model.shifted:
            last_S = state.tokens.index_select(0, slots_S.clamp(min=0))
            drafted = model.step(drafted.hidden, self._pass_behind(computed, last_S, slots_S, 1, count))
        for number in range(count):
            best_S = self._best(drafted)
            store_drafts(slots_S, best_S, number, state)
            if number + 1 < count:
                ahead = number + (1 if model.shifted else 2)
                drafted = model.step(drafted.hidden, self._pass_behind(computed, best_S, slots_S, ahead, count))

    def _pass_behind(
        self, computed: Computed, token_ids_S: torch.Tensor, slots_S: torch.Tensor, ahead: int, count: int
    ) -> ForwardBatch:
        """The batch of a pass over one token a row, `ahead` places behind the slot's last computed one."""
        build_pass(slots_S, ahead, self._last_position, self._builder.tables, self._groups, self._state, self._pass)
        return self._builder.of_pass(
            self._pass, token_ids_S, computed.batch, count + 1, self._first_layer, computed.states
        )

    def _tell(self, rows: Sequence[StepRow]) -> None:
        """Let slots whose prompts go on know the token behind the part that these rows compute."""
        known = [
            (row.slot, row.tokens[row.num_tokens], row.start + row.num_tokens - 1)
            for row in rows
            if len(row.tokens) > row.num_tokens
        ]
        if known:
            slots_N, tokens_N, positions_N = to_device(known, torch.int64, self._none.device).T.contiguous()
            self._state.store(slots_N, tokens_N, positions_N)

    def _best(self, drafted: Drafted) -> torch.Tensor:
        """The most likely token of each row."""
        logits_SV = self._model.compute_logits(drafted.logit_input)
        best_S = best_tokens(logits_SV) if self._vocabulary is None else self._vocabulary.best(logits_SV)[0]
        return self._model.to_target(best_S)
