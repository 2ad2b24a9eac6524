"""Checkpoints: a model built, given memory, and filled from safetensors."""
