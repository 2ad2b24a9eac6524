"""Drafters: who guesses the tokens that a row computes beside its last one."""

from pagerunner.runner.spec.base import Computed, Drafter, NoDrafts, Verified
from pagerunner.runner.spec.ngram import NgramDrafter

__all__ = ["Computed", "Drafter", "NgramDrafter", "NoDrafts", "Verified"]
