"""The books of the page memory, which all parts of the manager keep together."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagerunner.memory.adapters import AdapterPages
from pagerunner.memory.grant import Grant, Promises
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PrefixIndex
from pagerunner.memory.rules import GroupRule
from pagerunner.memory.slabs import SlabPool
from pagerunner.memory.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Books:
    """The pages (`pool`), what they hold (`index`), the grants of running requests, what these were promised, and what the next
    plan must carry (`work`). `rules` are those of the plan's groups, and `adapters` are in pages as well.
    """

    plan: MemoryPlan
    index: PrefixIndex
    pool: SlabPool
    work: StepWork
    promises: Promises
    rules: tuple[GroupRule, ...]
    adapters: AdapterPages
    grants: dict[Grant, None] = field(default_factory=dict)
