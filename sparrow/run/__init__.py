"""Defines, writes and reads the format of the run directory."""

from sparrow.run.directory import LoggedResponse, RunConfig, RunDir, TrainerState
from sparrow.run.log import RunLog
