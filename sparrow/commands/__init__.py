"""The subcommands of ``sparrow``, one module each: its options as fields, what it does as ``run``.

Options that several share are in ``sampled``; the sections of ``train`` (``--rollout.samples``) in ``train.config``.
Heavy imports live inside functions, so that ``--help`` is instant.
"""
