"""Kernels of attention over paged keys and values. `paged_attention.py` chooses; `paged_schedule.py` divides the work."""
