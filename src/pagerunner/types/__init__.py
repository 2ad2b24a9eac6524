"""The values that cross layers: sampling parameters, requests, step plans and results, outputs.

Everything here is torch-free. The `msgspec` structs also cross the process boundary as MessagePack.
"""

from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo, LoRARequest, LoraStats
from pagerunner.types.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculativeMetrics
from pagerunner.types.params import OutputKind, SamplingParams, StructuredOutputsParams
from pagerunner.types.plan import (
    NO_TOKEN_ALLOWED,
    Guess,
    PageCopy,
    PageTransfer,
    SlotInit,
    StateSave,
    StepPlan,
    StepResult,
    StepRow,
    TableWrite,
    TeamsPlan,
    TeamsResult,
    TransferEnd,
)
from pagerunner.types.request import EngineRequest, FinishReason, Grammar, Pooling, RequestUpdate, TokenLogprobs

__all__ = [
    "NO_TOKEN_ALLOWED",
    "AdapterEnd",
    "AdapterFill",
    "AdapterInfo",
    "CompletionOutput",
    "EngineRequest",
    "FinishReason",
    "Grammar",
    "Guess",
    "LoRARequest",
    "Logprob",
    "LoraStats",
    "OutputKind",
    "PageCopy",
    "PageTransfer",
    "Pooling",
    "RequestMetrics",
    "RequestOutput",
    "RequestUpdate",
    "SamplingParams",
    "SlotInit",
    "SpeculativeMetrics",
    "StateSave",
    "StepPlan",
    "StepResult",
    "StepRow",
    "StructuredOutputsParams",
    "TableWrite",
    "TeamsPlan",
    "TeamsResult",
    "TokenLogprobs",
    "TransferEnd",
    "show",
]
