"""Lossless mode in vLLM: sparse steps draft, and one of vLLM's own dense passes verifies.

``setup`` configures vLLM for lossless mode before a model is loaded. In the engine, the
``scheduler`` uses a ``chooser`` to decide how many tokens to draft (``draft_length``) and how much
the drafts read (``draft_budget``). The chooser relies on the times and acceptance rates
``measured`` so far, and a ``plan`` carries its decision to the workers. There, vLLM calls the
``speculator``, and a ``drafter`` proposes tokens: the ``sparse_drafter``, with the policy's weights
or a copy of them (``draft_weights``). ``graphs`` lists the CUDA graphs of a cycle, ``verify``
samples tokens that do not depend on the drafts, and ``meter`` measures the acceptance of drafts.
"""
