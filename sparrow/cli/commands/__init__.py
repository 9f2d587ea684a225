"""The subcommands of ``sparrow``, one per module. Each is a dataclass whose fields are the options
and whose method ``run`` does the work.

Options that several commands share are in ``sampled``. The option groups of ``train``, such as
``rollout`` in ``--rollout.samples``, are in ``train.config``. Slow imports are inside functions, so
that ``--help`` is instant.
"""
