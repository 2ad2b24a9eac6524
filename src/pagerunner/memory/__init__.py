"""Paged memory: what layers keep, how it is planned, handed out, shared and reported. Torch-free."""
