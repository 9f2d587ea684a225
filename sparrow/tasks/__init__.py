"""Tasks: problems with verifiable answers."""

from sparrow.tasks.base import Mixture, Problem, Task, load_task, register_task
from sparrow.tasks.dataset import DatasetTask, load_dataset_task
from sparrow.tasks.trace import Trace
from sparrow.tasks.vocabulary import build_tokenizer
