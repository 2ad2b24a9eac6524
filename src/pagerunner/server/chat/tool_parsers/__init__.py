"""Parsers of tool calls, one for each way that models write them."""
