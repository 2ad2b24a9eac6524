"""Kernels of adapters. `lora.py` chooses."""
