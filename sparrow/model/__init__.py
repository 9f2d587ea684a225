"""Hugging Face models as sparse actors (``actor``), and the log-probs of given tokens
(``scoring``).
"""
