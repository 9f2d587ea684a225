"""Sparrow: fast RL rollouts with sparse attention, without breaking the training."""

from sparrow import _moved
from sparrow.errors import SparrowError
from sparrow.schedule import SparsitySchedule

__version__ = "0.1.0"
__all__ = ["SparrowError", "SparsitySchedule", "__version__"]

_moved.install()
