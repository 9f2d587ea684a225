"""Turn Hugging Face models into sparse actors (``actor``), and compute log-probs of given tokens
(``scoring``).
"""
