"""Load the models, problems, benchmarks, prompts and engines named in a user's settings."""

from sparrow.cli.loading.benchmarks import HELD_OUT, load_benchmark, load_benchmarks
from sparrow.cli.loading.engines import load_engine, load_scorer
from sparrow.cli.loading.models import (
    OWN_NAMES,
    REASONER,
    Precision,
    context_of,
    load_model,
    model_path,
    with_adapter,
)
from sparrow.cli.loading.objects import load_object
from sparrow.cli.loading.problems import (
    DatasetOptions,
    check_source,
    is_task,
    load_problems,
    load_task_spec,
)
from sparrow.cli.loading.prompts import draw_prompts, encode_prompts, prompt_room, read_prompts
from sparrow.settings import parse_spec
