"""What became of drafted tokens during a measurement, from the counters that a server with vLLM's metric names shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total\{([^}]*)\} (\S+)", re.M
)
_PLACE = re.compile(r'position="(\d+)"')


class DraftCounts(msgspec.Struct, frozen=True):
    """Drafts (of one row in one step), their tokens, those accepted, and those by their place in the draft; of all engines together."""

    drafts: int
    tokens: int
    accepted: int
    per_position: list[int]

    def since(self, before: DraftCounts) -> DraftCounts:
        """What has been counted after `before`."""
        per = [now - then for now, then in zip(self.per_position, before.per_position, strict=True)]
        return DraftCounts(
            self.drafts - before.drafts, self.tokens - before.tokens, self.accepted - before.accepted, per
        )

    def result(self) -> dict[str, Any]:
        """The figures under the keys that vLLM's benchmark writes."""
        drafts = max(self.drafts, 1)
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted / max(self.tokens, 1),
            "spec_decode_acceptance_length": 1 + self.accepted / drafts,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": [count / drafts for count in self.per_position],
        }


def read_counts(text: str) -> DraftCounts | None:
    """The counts in the text of /metrics; None if the server drafts nothing."""
    sums: dict[str, int] = {}
    places: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        count = int(float(value))
        if name == "accepted_tokens_per_pos":
            place = int(_PLACE.findall(labels)[0])
            places[place] = places.get(place, 0) + count
        else:
            sums[name] = sums.get(name, 0) + count
    if not sums:
        return None
    per_position = [places[place] for place in sorted(places)]
    return DraftCounts(sums.get("drafts", 0), sums.get("draft_tokens", 0), sums.get("accepted_tokens", 0), per_position)


def draft_counts(base: str, headers: Mapping[str, str]) -> DraftCounts | None:
    """What the server at `base` has counted so far; None if it drafts nothing, or doesn't show its metrics."""
    import httpx

    try:
        response = httpx.get(f"{base}/metrics", headers=dict(headers), timeout=30)
    except httpx.HTTPError:
        return None
    return read_counts(response.text) if response.status_code == 200 else None


def rows(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Labels and figures for a person, worded as vLLM words them."""
    rates = result["spec_decode_per_position_acceptance_rates"]
    return [
        ("Acceptance rate (%):", result["spec_decode_acceptance_rate"]),
        ("Acceptance length:", result["spec_decode_acceptance_length"]),
        ("Drafts:", result["spec_decode_num_drafts"]),
        ("Draft tokens:", result["spec_decode_draft_tokens"]),
        ("Accepted tokens:", result["spec_decode_accepted_tokens"]),
        *((f"  Position {place} accepted (%):", 100 * rate) for place, rate in enumerate(rates)),
    ]
