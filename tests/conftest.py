"""One torch thread for every test: the models are tiny, and two threads on two busy cores wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings  # noqa: E402 - torch reads the variables above when a test module imports it

settings.register_profile("machine", deadline=None)  # a loaded machine is not a failing test
settings.load_profile("machine")
