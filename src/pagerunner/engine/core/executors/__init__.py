"""Executors run step plans: in this process, or (later) one process a rank."""
