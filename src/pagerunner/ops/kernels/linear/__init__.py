"""Kernels of products of inputs and weights. `linear.py` chooses; `linear_parts.py` has what they share."""
