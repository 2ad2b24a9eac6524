"""Drafters: who guesses the tokens that a row computes beside its last one."""

from pagerunner.runner.spec.base import Drafter, NoDrafts, Verified
from pagerunner.runner.spec.ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter", "NoDrafts", "Verified"]
