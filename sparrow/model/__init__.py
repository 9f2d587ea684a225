"""Make Hugging Face models sparse actors (``actor``), and compute log-probs of given tokens
(``scoring``).
"""
