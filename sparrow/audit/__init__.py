"""Audits an engine: a statistical test whether its samples are those of the dense model."""
