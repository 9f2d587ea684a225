"""The run directory: its format, defined, written and read here."""

from sparrow.run.directory import LoggedResponse, RunConfig, RunDir, TrainerState
from sparrow.run.log import RunLog
