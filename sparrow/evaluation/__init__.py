"""Evaluation of answers: ``scores`` of rewards, and ``benchmark``, which samples and judges."""
