"""Evaluation tasks for small models, with deterministic seeded generators."""
