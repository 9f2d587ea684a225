"""Errors a user can act on. The command line prints their one sentence and no traceback."""


class SparrowError(Exception):
    """Something the user can fix; the message gives the value, what was expected and the remedy."""


class ConfigError(SparrowError):
    """A setting, schedule or file that cannot be used as it is."""


class UnsupportedModel(SparrowError):
    """A model whose attention cannot be routed through Sparrow."""


class RewardError(SparrowError):
    """A verifier that raised or returned something that is not a finite number."""


class TrainingDiverged(SparrowError):
    """A loss, gradient or importance ratio that is no longer usable."""


class EngineError(SparrowError):
    """A generation engine that died, hangs or refused a request."""


class ProcessLost(SparrowError):
    """A process of the run that died or hangs, so that nothing can be done together any more."""


class CheckpointError(SparrowError):
    """A checkpoint that could not be written or read."""
