"""How the ranks of an engine compute sums together and tell each other bytes: one protocol, a file for each way."""
