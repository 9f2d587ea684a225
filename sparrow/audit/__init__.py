"""Audit an engine: test statistically whether its samples follow the dense model."""
