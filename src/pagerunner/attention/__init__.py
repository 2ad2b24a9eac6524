"""Attention backends: plan a step on the host, then run every layer."""
