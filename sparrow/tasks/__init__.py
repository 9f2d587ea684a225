"""Tasks: problems with verifiable answers."""

from sparrow.tasks.base import Problem, Task
from sparrow.tasks.chase import Chase
from sparrow.tasks.dataset import DatasetTask, load_dataset_task
from sparrow.tasks.mixture import Mixture
from sparrow.tasks.registry import load_task, register_task
from sparrow.tasks.trace import Trace
from sparrow.tasks.vocabulary import build_tokenizer
