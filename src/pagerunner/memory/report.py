"""The memory plan for people (an aligned table) and for programs (JSON)."""

from __future__ import annotations

from typing import Any

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.units import human_bytes

_OF_PLAN = (
    "max_model_len", "max_num_seqs", "budget_bytes", "kv_bytes", "slab_bytes", "num_slabs", "num_gpu_blocks", "tokens",
    "max_concurrency", "waste", "hit_granularity", "host_bytes", "host_tokens", "disk_bytes", "disk_tokens",
    "adapter_pages", "adapter_copies",
)  # fmt: skip
_OF_GROUP = ("name", "kind", "page_tokens", "page_bytes", "pages_per_slab", "unit", "table_width", "zero_fresh")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plan_table(plan: MemoryPlan) -> str:
    """The plan as text: what it holds, then one line per group, then how the memory is cut and what is beside the pages."""
    header = ("group", "layers", "page tokens", "page bytes", "pages/slab", "waste", "pages", "per request")
    groups = [
        (
            group.name,
            str(len(group.layers)),
            "state" if group.kind == "recurrent" else str(group.page_tokens),
            f"{group.page_bytes:,}",
            f"{group.pages_per_slab:,}",
            f"{plan.group_waste(number):.2%}",
            f"{plan.num_pages(number):,}",
            f"{group.pages_needed(plan.max_model_len):,}",
        )
        for number, group in enumerate(plan.groups)
    ]
    held = [
        ("capacity", f"{plan.tokens:,} tokens of all requests together"),
        ("concurrency", f"{plan.max_concurrency:,.2f} requests of max_model_len (at most {plan.max_num_seqs:,} run)"),
        ("max_model_len", f"{plan.max_model_len:,} tokens"),
        ("one request", f"{human_bytes(plan.request_bytes(plan.max_model_len))} at max_model_len"),
        ("pages", f"{human_bytes(plan.kv_bytes)} of the {human_bytes(plan.budget_bytes)} left for them"),
        *((name, human_bytes(size)) for name, size in plan.other),
        ("total", human_bytes(plan.kv_bytes + plan.other_bytes)),
        *(
            (name, f"{human_bytes(size)} for pages, {tokens:,} tokens")
            for name, size, tokens in (
                ("host memory", plan.host_bytes, plan.host_tokens),
                ("disk", plan.disk_bytes, plan.disk_tokens),
            )
            if size
        ),
    ]
    if plan.adapter_pages:
        size, group = plan.adapter_pages, plan.groups[plan.largest_group]
        said = f"up to {size:,} pages each, {human_bytes(size * group.page_bytes)}; alone, {plan.num_gpu_blocks // size:,} fill the pages"
        held.append(("adapters", said))
        held.append(("in host memory", f"copies of adapters, up to {human_bytes(plan.adapter_copies)}"))
    cut = [
        ("slabs", f"{plan.num_slabs:,} of {human_bytes(plan.slab_bytes)}, each cut into pages of one group"),
        ("waste", f"{plan.waste:.2%}"),
        ("prefix hits", f"at multiples of {plan.hit_granularity:,} tokens"),
    ]
    width = max(len(name) for name, _ in (*held, *cut))

    def lines(rows: list[tuple[str, str]]) -> list[str]:
        return [f"{name.ljust(width)}  {value}" for name, value in rows]

    return "\n".join([*lines(held), "", *_aligned([header, *groups]), "", *lines(cut)])


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values; bytes and counts are exact."""
    return {name: getattr(plan, name) for name in _OF_PLAN} | {
        "request_bytes": plan.request_bytes(plan.max_model_len),
        "request_slabs": plan.slabs_needed(plan.max_model_len),
        "total_bytes": plan.kv_bytes + plan.other_bytes,
        "other": [{"name": name, "bytes": size} for name, size in plan.other],
        "groups": [
            {name: getattr(group, name) for name in _OF_GROUP}
            | {
                "layers": [part.layer for part in group.layers],
                "num_pages": plan.num_pages(number),
                "pages_per_request": group.pages_needed(plan.max_model_len),
                "waste": plan.group_waste(number),
            }
            for number, group in enumerate(plan.groups)
        ],
    }
