"""Grammars of structured outputs: tried in a process that may die, then followed token by token."""
