"""Shared test tools; nothing here is a test."""
