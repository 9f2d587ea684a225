"""Audit of an engine: a statistical test of whether its samples follow the dense model."""
