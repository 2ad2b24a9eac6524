"""Kernels of layers with a state instead of keys and values: convolution, gated delta rule, Mamba-2."""
