"""A Hugging Face model wearing the sparse actor (``actor``), and log-probs of given tokens under it (``scoring``)."""
