"""Continuous batching: which tokens each step runs. Free of torch."""
