"""The sparse actor of a Hugging Face model (``actor``), and log-probs of given tokens under it
(``scoring``).
"""
