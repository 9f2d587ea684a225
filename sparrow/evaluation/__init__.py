"""Evaluate models: ``benchmark`` samples and judges responses; ``scores`` summarises rewards."""
