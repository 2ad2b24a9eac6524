"""Who asks: a name for a client, so that the helper processes give clients equal shares.

The name travels with the task (a context variable): what sits between the server's door and a helper doesn't handle it.
"""

from __future__ import annotations

from contextvars import ContextVar

SOURCE: ContextVar[str] = ContextVar("pagerunner_source", default="")
"""The client whose call this task answers; "" where nobody says."""
