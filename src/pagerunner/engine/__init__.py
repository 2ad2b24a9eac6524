"""The engine (L7): requests in, outputs out, and the loop between scheduler and runner."""
