"""Drafts from a request's own text (prompt lookup): see `ops/ngram.py`. The texts lie on the device, so nothing waits for the host."""

from __future__ import annotations

import torch

from pagerunner.ops.async_copy import to_device
from pagerunner.ops.batch import SlotState
from pagerunner.ops.ngram import draft_ngrams
from pagerunner.runner.spec.base import Computed, Verified
from pagerunner.types import SlotInit


class NgramDrafter:
    """One launch a step. A prompt comes from the host once, with the request."""

    onward = None

    def __init__(self, state: SlotState, max_model_len: int, least: int, most: int) -> None:
        """`least` and `most`: how many of a text's last tokens must have stood before, and how many are looked at."""
        self._drafts_NK, self._least, self._most = state.drafts, least, most
        slots, num_drafts = state.drafts.shape
        self._texts_NL = torch.zeros(
            (slots, _length(max_model_len, num_drafts)), dtype=torch.int32, device=state.drafts.device
        )

    @staticmethod
    def state_bytes(max_num_seqs: int, max_model_len: int, num_drafts: int) -> int:
        """Device bytes of the texts."""
        return 4 * (max_num_seqs + 1) * _length(max_model_len, num_drafts)

    def init_slot(self, init: SlotInit) -> None:
        """See Drafter."""
        text = [*init.request.prompt_token_ids, *init.output_token_ids][: self._texts_NL.shape[1]]
        self._texts_NL[init.slot, : len(text)] = to_device(text, torch.int32, self._texts_NL.device)

    def draft(self, verified: Verified | None, count: int, computed: Computed | None) -> None:
        """See Drafter."""
        assert verified is not None, "it is called after steps that sample"
        draft_ngrams(*verified, self._texts_NL, self._drafts_NK, count, self._least, self._most)


def _length(max_model_len: int, num_drafts: int) -> int:
    """A step may sample tokens beyond a sequence's end, which nobody gets."""
    return max_model_len + num_drafts + 2
