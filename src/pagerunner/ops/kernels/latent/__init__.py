"""Kernels of attention over latents (MLA), over chosen latents (DeepSeek-V3.2), and over V4's slots."""
