"""Executors run step plans: in this process, or in one process for each rank."""
