"""What the frontend and the engine core say to each other: typed msgspec structs as MessagePack, nothing else.

Each frontend binds a ZeroMQ PAIR socket in a private directory, the core connects to it. `Launch` goes to the core's
standard input as one line of JSON; everything later goes over the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from pagerunner.config import EngineArgs
from pagerunner.engine.core.live import LiveState
from pagerunner.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    MissingAdapterError,
    PagerunnerError,
    RequestFailedError,
    described,
)
from pagerunner.memory.ownership import MemoryState
from pagerunner.memory.units import human_bytes
from pagerunner.sched.live import Wait
from pagerunner.sched.stats import STEP_PLACES as STEP_PLACES
from pagerunner.sched.stats import SchedulerStats as SchedulerStats
from pagerunner.sched.stats import SpecCounts as SpecCounts
from pagerunner.sched.stats import StepSizes as StepSizes
from pagerunner.types import EngineRequest, RequestUpdate
from pagerunner.types.lora import AdapterInfo, LoRARequest
from pagerunner.types.steps import MeasuredSteps
from pagerunner.types.weights import WeightChange

_KINDS: dict[str, type[PagerunnerError]] = {
    kind.__name__: kind
    for kind in (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        EngineSleepingError,
        InvalidRequestError,
        MissingAdapterError,
        RequestFailedError,
    )
}


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception on its way to the other process: its class name, its sentence, the parameter it names."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """The error as it travels. An error that isn't one of the engine's own keeps its type's name in the text."""
        if isinstance(error, PagerunnerError):
            kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "EngineDeadError")
            return cls(kind, str(error), getattr(error, "param", None))
        return cls("EngineDeadError", described(error))

    def exception(self) -> PagerunnerError:
        """The exception to raise on this side."""
        kind = _KINDS.get(self.kind, EngineDeadError)
        if issubclass(kind, InvalidRequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the core process starts. `addresses` are those of its frontends; the first is who starts it. `factory` is `module:function`, called with `args`, `available` and `engine`, that returns an EngineCore.

    `available` is what it may take of the host's memory, where it isn't the only engine, and `engine` its number among them. `log_level` is the frontend's, as a number of
    the logging package, and `log_name` the process's name in the log. A step of more than `stall_seconds` is reported.
    """

    args: EngineArgs
    addresses: list[str]
    factory: str
    available: int | None
    engine: int
    log_level: int
    log_name: str
    stall_seconds: float


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Queue the sequences of one request, all or none. `requests` is a MessagePack list of EngineRequest.

    It is decoded on its own, so that values that the core refuses fail this request and not the connection. `siblings` are the
    ids and seeds of more sequences that are like the first one of them (`EngineRequest.siblings`).
    """

    request_ids: list[str]
    requests: msgspec.Raw
    siblings: list[tuple[str, int]] = []

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> Add:
        """The message that queues the sequences of one request. The other sequences share everything with the first but ids
        and seeds.

        Raises:
            OverflowError, TypeError, ValueError: a value can't travel.
        """
        first, *others = requests
        names = [one.request_id for one in requests]
        shared = msgspec.Raw(msgspec.msgpack.encode([first]))
        return cls(names, shared, [(one.request_id, one.seed) for one in others])


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these sequences; each still gets its last update. Unknown ids are ignored."""

    request_ids: list[str]


class Numbered(msgspec.Struct, frozen=True):
    """What is answered: the answer has the same id."""

    call_id: int


class Sleep(Numbered, frozen=True, tag="sleep"):
    """Call `core.sleep(level, mode)`."""

    level: int
    mode: str


class PrepareSleep(Numbered, frozen=True, tag="prepare_sleep"):
    """Call `core.prepare_sleep(level, mode)`."""

    level: int
    mode: str


class WakeUp(Numbered, frozen=True, tag="wake_up"):
    """Call `core.wake_up(tags)`."""

    tags: list[str] | None


class ChangeWeights(Numbered, frozen=True, tag="change_weights"):
    """Call `core.change_weights(change)`."""

    change: WeightChange


class LoadAdapter(Numbered, frozen=True, tag="load_adapter"):
    """Call `core.adapters.begin(request, named=False)`. The answer, the digest, comes when the adapter has been read. The name is its from a `NameAdapter` on."""

    request: LoRARequest


class NameAdapter(Numbered, frozen=True, tag="name_adapter"):
    """Call `core.adapters.name(name)`, or `drop`: what the frontend's load has read gets its name, or is forgotten."""

    name: str
    drop: bool = False


class UnloadAdapter(Numbered, frozen=True, tag="unload_adapter"):
    """Call `core.adapters.remove(name)`."""

    name: str


class ReadSleepLevel(Numbered, frozen=True, tag="read_sleep_level"):
    """Read `core.sleep_level`, which is None while the engine is awake."""


class ResetPrefixCache(Numbered, frozen=True, tag="reset_prefix_cache"):
    """Call `core.reset_prefix_cache()`."""


class ReadMemory(Numbered, frozen=True, tag="read_memory"):
    """Call `core.memory_state(team)`."""

    team: int = 0


class Watch(Numbered, frozen=True, tag="watch"):
    """Call `core.watch(since, team)`."""

    since: int
    team: int = 0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a frontend's process number `life`, 1 or more. Its answer are stats. Sequences of earlier ones are ended."""

    life: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Process number `life` of frontend `client` has ended: end its sequences. What else it has sent may come later, and doesn't count."""

    client: int
    life: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and exit with status 0."""


Call = (
    Sleep
    | PrepareSleep
    | WakeUp
    | ChangeWeights
    | LoadAdapter
    | NameAdapter
    | UnloadAdapter
    | ReadSleepLevel
    | ResetPrefixCache
    | ReadMemory
    | Watch
)
ToCore = Add | Abort | Hello | Gone | Call | Shutdown
WAIT_REASONS = tuple(str(why) for why in get_args(Wait) if why not in ("", "sibling", "line"))
"""What the first in line may wait for; see `sched/live.py`."""

Answer = bool | int | str | MemoryState | LiveState | None


class StartUp(msgspec.Struct, frozen=True):
    """How a core came up: seconds by phase in order, bytes of device memory by use (none on a CPU), bytes of weights read. `steps`: what some took."""

    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    loaded_bytes: int = 0
    steps: MeasuredSteps = MeasuredSteps()

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def load_rate(self) -> float:
        """Bytes of weights a second while they were read; 0 where none were."""
        return self.loaded_bytes / max(self.seconds.get("weights", 0.0), 1e-9)

    def text(self) -> str:
        """One line of seconds, and one of memory where it was measured."""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        if self.loaded_bytes:
            phases += f"; weights at {human_bytes(round(self.load_rate))}/s"
        lines = [f"start-up took {self.total:.2f} s: {phases}"]
        if self.memory:
            lines.append("device memory: " + ", ".join(f"{n} {human_bytes(size)}" for n, size in self.memory.items()))
        return "\n".join(lines)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core is loaded. `max_model_len` is resolved; `memory_plan` is the plan as JSON."""

    max_model_len: int
    memory_plan: bytes
    startup: StartUp = StartUp()


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The core could not be built; the process exits."""

    error: WireError


class Updates(msgspec.Struct, frozen=True, tag="updates", omit_defaults=True):
    """What one step, or one abort, did to a frontend's sequences. Sent without updates as a sign of progress during long prefills.

    Stats come to all frontends, with the `level` that the core sleeps at (-1: it is awake), and why its weights are half new, if they are.
    """

    updates: list[RequestUpdate]
    stats: SchedulerStats | None = None
    level: int = -1
    weights_fault: str = ""


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """All adapters that requests may name. Comes to all frontends whenever that changes."""

    infos: list[AdapterInfo]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The sequences of one `Add` were not accepted; none of them runs."""

    request_ids: list[str]
    error: WireError


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the Call with this id."""

    call_id: int
    value: Answer = None
    error: WireError | None = None


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """A step failed; the process exits and nothing more comes."""

    error: WireError


FromCore = Ready | StartFailed | Updates | Adapters | Refused | Reply | Dead
