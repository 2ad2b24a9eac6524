"""A name for the client of a request, by which the helper processes give clients equal shares.

The name travels with the task, in a context variable. So the code between the server's gate and a helper doesn't handle the
name.
"""

from __future__ import annotations

from contextvars import ContextVar

SOURCE: ContextVar[str] = ContextVar("pagerunner_source", default="")
"""The client whose call this task answers; "" where nobody says."""
