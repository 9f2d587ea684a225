"""Evaluation: ``benchmark`` samples and judges responses, and ``scores`` summarises rewards."""
