"""The subcommands of ``sparrow``, one module each: options are fields, and ``run`` does the work.

Options that several commands share are in ``sampled``; the sections of ``train`` (such as
``rollout`` in ``--rollout.samples``) are in ``train.config``. Heavy imports are inside functions,
so ``--help`` is instant.
"""
