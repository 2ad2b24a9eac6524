"""The plan as text and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from helpers.plans import one_group, two_groups
from pagerunner.memory.report import plan_json, plan_table
from pagerunner.memory.units import human_bytes


def test_human_bytes() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1536, 10 * 2**20, 3 * 2**30, 5 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "10.00 MiB",
        "3.00 GiB",
        "5120.00 TiB",
    ]


def test_table_has_a_line_per_group_and_everything_outside_the_pages() -> None:
    plan = replace(two_groups(20), other=(("weights", 5 << 20), ("page tables", 4096)))
    lines = plan_table(plan).splitlines()
    first = lines.index("")
    assert [line.split()[0] for line in lines[:3]] == ["capacity", "concurrency", "max_model_len"], (
        "what a person asks for"
    )
    group_lines = lines[first + 1 : lines.index("", first + 1)]
    assert [line.split()[0] for line in group_lines] == ["group", "full", "other"]
    assert len({len(line) for line in group_lines}) == 1, "columns are aligned"
    text = "\n".join(lines)
    assert "weights" in text and "5.00 MiB" in text and "page tables" in text and "4.00 KiB" in text
    assert f"{plan.max_model_len:,} tokens" in text


def test_json_is_exact_and_serialisable() -> None:
    plan = replace(one_group(49), other=(("weights", 123),))
    values = json.loads(json.dumps(plan_json(plan)))
    assert values["tokens"] == 784 and values["kv_bytes"] == 49 * 1024
    assert values["groups"][0]["num_pages"] == 49 and values["groups"][0]["layers"] == [0, 1]
    assert values["total_bytes"] == 49 * 1024 + 123
    assert values["other"] == [{"name": "weights", "bytes": 123}]
