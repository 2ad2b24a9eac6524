"""One torch thread for every test: the models are tiny, and two threads on two busy cores wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
