"""Adapters of low rank: PEFT directories read, and their products added to those of a model's layers."""
