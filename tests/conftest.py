"""Settings that every test shares."""

from __future__ import annotations

import os

# The models of tests are tiny: threads that wait for each other cost more than they compute, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
