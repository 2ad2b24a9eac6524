"""Scheduling: which request runs how many tokens in the next step. Torch-free."""
