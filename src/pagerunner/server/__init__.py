"""The HTTP server: OpenAI-compatible endpoints over AsyncEngine."""
