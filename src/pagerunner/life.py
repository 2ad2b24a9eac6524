"""Signs of life: how much this process has got done of what takes long.

From outside, a process that works slowly looks like one that hangs. So whatever may take long counts here: a tensor that was read, a kernel that
was compiled, a shape that was warmed up, a graph that was captured. What the number is means nothing. That it grows means that something moves.
Example: rank 1 reads its weights from a slow disk for ten minutes. Its number grows with each tensor, so nobody takes it for dead.
"""

from __future__ import annotations


class Life:
    """The signs that a process has given. Any thread may give one."""

    def __init__(self) -> None:
        self.moves = 0

    def moved(self) -> None:
        """Something was done."""
        self.moves += 1


LIFE = Life()
"""This process's."""
