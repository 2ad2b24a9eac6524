"""The engine core: the step loop, its own process, and the messages between it and the frontend."""
