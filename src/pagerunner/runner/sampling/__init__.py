"""From logits to tokens: slot-indexed sampling state, logits processors, filters, counter-based draws, logprobs."""

from __future__ import annotations

from pagerunner.runner.sampling.sampler import Sampled, SampledRows, Sampler

__all__ = ["Sampled", "SampledRows", "Sampler"]
