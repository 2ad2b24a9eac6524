"""With what tiles kernels of paged attention are launched; see `kernels/paged/paged_attention.py`."""

from __future__ import annotations

from typing import NamedTuple

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, padded


def _borders() -> numerics.AttentionBorders:
    return numerics.FAST.attention


class Tiles(NamedTuple):
    """How a kernel is launched: rows and keys of a tile, warps, stages, and programs per multiprocessor.

    The last field is the time that a program needs to begin another row, counted in tiles.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    entry: int = 0

    @property
    def registers(self) -> int:
        """The most that a thread may have, so that all programs fit."""
        return min(255, 65536 // (32 * self.warps * self.programs)) // 8 * 8


def decode_tiles(row_bytes: int, group: int, fp8: bool, few: bool) -> Tiles:
    """Tiles of decode. A tile holds 8 KiB of keys and 8 KiB of values, whatever the size of a head and its elements.

    Entries of the page table are a pipeline's first stage, so five stages keep two tiles in flight. With fp8 the work on a tile
    takes the time, not its way. For few rows, four programs with entries one tile ahead are fastest. For many rows, programs of
    few warps are fastest, as their warps wait less for each other.
    """
    rows = max(8 if fp8 else 16, padded(group))
    if not fp8:
        return Tiles(rows, min(max(8192 // row_bytes, 16), 128), 4, 5, 4, 2)
    if few:
        return Tiles(rows, min(max(8192 // row_bytes, 16), 64), 4, 2, 4, 1)
    warps = min(max(rows * row_bytes // 512, 2), 4)  # results take a quarter of a warp's registers
    return Tiles(rows, min(max(4096 * warps // row_bytes, 16), 128), warps, 4, 12 // warps, 1)


def few_tiles(row_bytes: int, group: int, tokens: int) -> Tiles:
    """Tiles of decode in steps of few rows, or of rows that see few keys. A row of at most `keys` tokens needs no merging.

    Many rows are done in turns, which are fewer with more programs. More than 8 heads have two warps: too few for the tensor core
    instructions whose addresses ptxas 12.8 gets wrong where an operand has fewer than 64 columns.
    """
    keys = min(max(16384 // row_bytes, 16), 128)
    if group > 8:
        return Tiles(padded(group), max(keys // 2, 16), 2, 3, 4)
    return Tiles(8, keys, 4, 3, 2 if tokens < _borders().few_rows else 4)


class DraftTiles(NamedTuple):
    """Tiles of `drafts_kernel`: how a tile of queries is launched, how many of them a program has, and for how many tokens of a row."""

    tiles: Tiles
    count: int
    tokens: int


def draft_tiles(row_bytes: int, group: int, stride: int, fp8: bool, rows: int) -> DraftTiles:
    """Tiles of decode for so many rows of up to `stride` tokens.

    Queries are rows of tiles as large as those of rows of one token, so that results are the same. With fp8 they are the products'
    columns, and any number is one tile. Registers hold 64 queries of 256 bytes, fewer of larger ones; more are several blocks of tokens.
    With few rows 16 queries are a block: the device is idle, and merging parts takes time for each query. Programs have as many registers as their results need (compiled for sm_90: docs/performance/paged-attention.md).
    """
    few = rows <= _borders().small_rows
    most = 16 if rows < _borders().few_rows else min(64, max(16384 // row_bytes, 16))
    parts = blocks(stride, max(most // group, 1))
    tokens = blocks(stride, parts)
    if not fp8:
        tiles = decode_tiles(row_bytes, group, fp8, few)
        count = blocks(tokens * group, tiles.rows)
        if count > 1:
            tiles = tiles._replace(programs=3 if count * tiles.rows * row_bytes <= 8192 else 2)
        return DraftTiles(tiles, count, tokens)
    columns = max(8, padded(tokens * group))
    if columns == 8:
        return DraftTiles(decode_tiles(row_bytes, group, fp8, few), 1, tokens)
    keys = min(max(8192 // row_bytes, 16), 64)
    if columns == 16:
        return DraftTiles(Tiles(16, keys, 4, 2, 3, 1) if few else Tiles(16, keys, 2, 4, 4, 1), 1, tokens)
    return DraftTiles(Tiles(columns, keys, 4, 3, 2, 1), 1, tokens)


def few_draft_tiles(row_bytes: int) -> Tiles:
    """Tiles of decode in steps of few rows with drafts: those of rows of one token, with queries as rows."""
    return Tiles(16, min(max(16384 // row_bytes, 16), 128), 4, 3, 2)


def shared_tiles(row_bytes: int, queries: int, exact: bool) -> Tiles:
    """Tiles for the prefix that all rows share, where each key/value head has so many queries."""
    if exact:
        return Tiles(16, 16, 4, 2)
    keys = min(max(16384 // row_bytes, 16), 64)
    return Tiles(64, keys, 4, 3) if queries <= 64 else Tiles(128, keys, 8, 3)


def prefill_tiles(row_bytes: int, queries: int, group: int, exact: bool, window: int = 0) -> Tiles:
    """Tiles of prefill, where most rows have at most `queries` new tokens, which see `window` keys if it isn't 0.

    In short rows, half of a large tile would be empty, and a program has few keys, as in short windows: several programs on a multiprocessor
    wait for less.
    """
    if exact:
        return Tiles(max(32, group), 32, 4, 2, 2)
    if queries * group <= 64 or (row_bytes == 256 and queries <= _borders().short_queries):
        return Tiles(64, 64 if row_bytes <= 256 else 32, 4, 3, 2)
    if row_bytes == 128:
        return Tiles(64, 32, 4, 3) if 0 < window <= _borders().short_window else Tiles(128, 64, 8, 3)
    return Tiles(128, 128 if row_bytes == 256 else 32, 8, 3)


def merged_at_once(group: int, dim: int) -> int:
    """How many parts of a row and a head of keys are loaded together to be merged."""
    return min(max(8192 // (group * dim), 2), 16)
