"""How much a host tier stores, loads and waits for at a time."""

from __future__ import annotations

MOST_WISHES = 256
"""Prompts that wait to be stored. One more is passed over, and counted."""
LOOK_AHEAD = 32
"""Requests of the waiting line that are looked up before it is their turn."""
LOADED_AT_ONCE = 256
"""Pages that a plan of loads alone begins, about: the next plan comes at once, so the bus needn't wait until the whole line is looked up."""
BUS_SECONDS = 0.05
"""A plan beside requests that run begins no more loads than keep the bus busy for so long: these requests wait meanwhile."""
MOST_SNAPSHOTS = 4
"""Of a prompt with recurrent state, the prefixes that are stored: its end, and where others branched off."""
STORED_AT_ONCE = 0.5
"""The share of the page memory that stores may keep from being evicted. A store ends three or four steps after its prompt, if two steps are in flight: with
pages for seven prompts and one computed in each step, a quarter would store two of three.
"""
MOST_LOST = 3
"""So often what was set aside for a request may be taken by running ones before it is computed."""
PATIENCE = 10.0
LEAST_PATIENCE = 2.0
"""A load that takes PATIENCE times as long as expected, and at least so many seconds, is given up."""
