"""The engine: configuration resolved, parts put together, steps run."""
