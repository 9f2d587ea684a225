"""The run directory: its format, and code that writes and reads it."""

from sparrow.run.directory import LoggedResponse, RunConfig, RunDir, TrainerState
from sparrow.run.log import RunLog
