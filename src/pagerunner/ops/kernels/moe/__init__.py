"""Kernels of mixtures of experts. `moe.py` chooses; `moe_routing.py` orders pairs of tokens and experts."""
