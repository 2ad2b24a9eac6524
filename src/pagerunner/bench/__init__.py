"""Benchmarks over the public `LLM`: fixed workloads on models with random weights, or any model directory."""
