"""The blocks that model families are made of."""
