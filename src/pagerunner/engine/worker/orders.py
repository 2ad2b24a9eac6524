"""What the core and the ranks in other processes say to each other: typed msgspec structs as MessagePack, nothing else.

The core binds a ZeroMQ socket for its orders to each rank, one for the reports of all ranks, and one for the results of steps
(`engine/core/executors/doors.py`). `RankLaunch` goes to a rank's standard input as one line of JSON. The first rank of the last stage, or of each team, answers a step, with its result. All ranks say every
tenth of a second how far they have come, and at once what has failed.
"""

from __future__ import annotations

import msgspec

from pagerunner.config import EngineArgs
from pagerunner.engine.core.messages import Numbered, StartUp, WireError
from pagerunner.engine.startup.machine import DeviceMemory
from pagerunner.engine.startup.measure import MemoryFacts
from pagerunner.engine.worker.ways import Ways
from pagerunner.tiers.index import Name
from pagerunner.tiers.stats import StoreStats
from pagerunner.types import StepPlan, StepResult, TransferEnd
from pagerunner.types.lora import AdapterEnd, AdapterFill
from pagerunner.types.weights import RankChange


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank's process starts. `loader` is `module:function`, called as `load_worker`.

    `available`: see `resolve`. `directory` has a directory in which the ranks meet; it is empty for ranks of several machines, which meet where
    rank 0 listens. `log_name` is the rank's in the log. `seconds`: the longest that a rank may be waited for in a sum. `threads`: of the core's process, by which
    a plan counts what a CPU works in.
    """

    args: EngineArgs
    rank: int
    ranks: int
    available: int | DeviceMemory | None
    directory: str
    ways: Ways
    loader: str
    log_level: int
    log_name: str
    seconds: float
    threads: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """All ranks are there: meet them, and load. `meeting` is where rank 0 listens, if the ranks are of several machines."""

    meeting: str = ""


class TakePages(Numbered, frozen=True, tag="take_pages"):
    """Call `LoadedWorker.map_pages(num_bytes)`. `weights` has all ranks' `Loaded.weights`, in their order: a page depends on all of them."""

    num_bytes: int
    weights: list[str]


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Call `Worker.run(plan)`."""

    plan: StepPlan


class PrepareSleep(Numbered, frozen=True, tag="prepare_sleep"):
    """Call `Worker.prepare_sleep(level)`."""

    level: int


class Sleep(Numbered, frozen=True, tag="sleep"):
    """Call `Worker.sleep(level)`."""

    level: int


class WakeUp(Numbered, frozen=True, tag="wake_up"):
    """Call `Worker.wake_up(tags)`."""

    tags: list[str] | None


class ChangeWeights(Numbered, frozen=True, tag="change_weights"):
    """Call `Worker.change_weights(change)`."""

    change: RankChange


class Compare(Numbered, frozen=True, tag="compare"):
    """Call `Worker.state_digest()`, or `weights_digest()`, which differs from rank to rank."""

    of_weights: bool = False


class MovePages(msgspec.Struct, frozen=True, tag="move_pages"):
    """Call `read` or `write` of the rank's own store of pages. A page is a group, a key, and its place in host memory."""

    number: int
    reads: bool
    pages: list[tuple[int, bytes, int]]


class ForgetPages(msgspec.Struct, frozen=True, tag="forget_pages"):
    """Call `forget` of the rank's store of pages."""

    group: int
    keys: list[bytes]


class ClearPages(msgspec.Struct, frozen=True, tag="clear_pages"):
    """Call `clear` of the rank's store of pages, for the `clears`-th time."""

    clears: int


class CancelPages(msgspec.Struct, frozen=True, tag="cancel_pages"):
    """End what hasn't begun of all reads and writes."""


class ClosePages(Numbered, frozen=True, tag="close_pages"):
    """Close the rank's store of pages, which writes what it was given for some seconds. The rank answers when that is done. Nothing follows."""


class ReadAdapter(msgspec.Struct, frozen=True, tag="read_adapter"):
    """Call `read` of the worker's adapters."""

    number: int
    path: str


class FillAdapter(msgspec.Struct, frozen=True, tag="fill_adapter"):
    """Call `fill` of the worker's adapters."""

    fill: AdapterFill


class ForgetAdapter(msgspec.Struct, frozen=True, tag="forget_adapter"):
    """Call `forget` of the worker's adapters. `seen`: by rank, of how many reads that have found the copy the core has heard since the last such order."""

    digest: str
    seen: dict[int, int] = {}


class DrainAdapters(msgspec.Struct, frozen=True, tag="drain_adapters"):
    """Call `drain` of the worker's adapters. Plans that come later wait for that."""


OfAdapters = ReadAdapter | FillAdapter | ForgetAdapter | DrainAdapters
OfPages = MovePages | ForgetPages | ClearPages | CancelPages | ClosePages
Call = PrepareSleep | Sleep | WakeUp | ChangeWeights | Compare
Order = Join | TakePages | Run | OfAdapters | OfPages | Call


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The rank has started. `runs` has a digest of each thing that must be the same on all ranks, by its name. `meeting`: see `Join`."""

    rank: int
    runs: dict[str, str]
    meeting: str = ""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Rank 0 has read so many of the bytes of its weights."""

    rank: int
    num_bytes: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank's worker has everything but its pages. `weights` tells its weights from all others, if pages are kept on a disk."""

    rank: int
    facts: list[MemoryFacts]
    weights: str = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call with this id is done, or was refused.

    `sleep_level` is the worker's afterwards, `digest` what `Compare` asks for. After `TakePages` `startup` is what the start took, and `host_path` where
    the core finds the rank's host memory, if it is shared.
    """

    rank: int
    call_id: int
    sleep_level: int | None = None
    error: WireError | None = None
    digest: str = ""
    startup: StartUp = StartUp()
    host_path: str = ""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """How far the rank has come: `moved` grows with everything that its host does, and `begun` with the sums and steps that it begins. It has launched so
    many `steps`, and its device has `done` so many of them, in `busy_seconds` of work. `waits`: it is in a call in which it may wait for other ranks.
    """

    rank: int
    moved: int
    begun: int = 0
    steps: int = 0
    done: int = 0
    busy_seconds: float = 0.0
    waits: bool = False

    @property
    def place(self) -> tuple[bool, int, int]:
        """How far it is compared with others: one that hangs is first."""
        return self.waits, self.begun, self.done


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Transfers of pages that have ended on the rank, and how many bytes of its host memory can be used for pages by now."""

    rank: int
    ended: list[TransferEnd]
    host_ready: int


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """What has become of the rank's store of pages: numbers that have ended with the outcomes of their pages, pages that are `there` and
    those that are `gone` since the last report, figures, and whether it reads at present. `clears`: see ClearPages.
    """

    rank: int
    ended: list[tuple[int, list[bool]]]
    there: list[Name]
    gone: list[Name]
    stats: StoreStats
    reads: bool
    clears: int


class AdapterEnded(msgspec.Struct, frozen=True, tag="adapter_ended"):
    """What has become of a read or fill on the rank."""

    rank: int
    end: AdapterEnd


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank's process ends. `follows`: because another rank is gone, which says why."""

    rank: int
    error: WireError
    follows: bool


class Stepped(msgspec.Struct, frozen=True):
    """What a team has computed in step `number`, the first being 1."""

    number: int
    in_graph: bool
    result: StepResult
    team: int = 0


Report = Here | Read | Loaded | Done | Alive | Moved | Kept | AdapterEnded | Failed
ORDERS, REPORTS, RESULTS, MEETING = "orders-{}", "reports", "results", "meeting"
"""Names in the private directory: the socket to a rank, the sockets of reports and of results, the directory in which ranks meet."""
