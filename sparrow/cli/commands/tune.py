"""``sparrow tune``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from sparrow.cli.commands.base import Command
from sparrow.errors import ConfigError
from sparrow.settings import Count, require

if TYPE_CHECKING:
    import torch

    from sparrow.attention.triton.saved import Target

Batch = Annotated[int, Field(ge=1, le=4096)]
DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}
"""Torch's names for vLLM's KV cache dtypes."""


@dataclass(frozen=True)
class Tune(Command):
    """Tune the Triton decode kernels for this GPU and one attention shape; engines then use the
    fastest configurations found. This takes minutes, during which nothing else may use the GPU.
    """

    # The model to tune for: qwen3-1.7b or another name that sparrow cost accepts, the name of a
    # model on the hub, or the path of a config.json.
    model: str | None = None
    # Instead of a model: KV_HEADS,GROUP,HEAD_DIM, where GROUP is the number of query heads per kv
    # head, as in 8,4,128.
    shape: str | None = None
    tensor_parallel: Count = 1  # GPUs per engine, which share the model's heads.
    # How the engine stores keys and values, as in vLLM's kv_cache_dtype.
    kv_cache_dtype: Literal["bfloat16", "float16", "fp8", "int8_per_token_head"] = "bfloat16"
    page_size: Count = 16  # Tokens per page, as in the schedule.
    # Batch sizes in sequences. Batches of other sizes use the configuration for the nearest of
    # these.
    batches: Annotated[tuple[Batch, ...], Field(min_length=1)] = (1, 4, 16, 64, 256)
    # Numbers of pages kept by score. For each number, the chosen configuration must be at least as
    # fast as the shipped one.
    pages: Annotated[tuple[Count, ...], Field(min_length=1)] = (64, 256)
    tokens: Count = 16384  # Length of every sequence.

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.shape is None):
            raise ConfigError(
                "heads must come from exactly one of --model NAME and "
                "--shape KV_HEADS,GROUP,HEAD_DIM"
            )
        if self.shape is not None:
            parts = self.shape.split(",")
            is_shape = len(parts) == 3 and all(
                re.fullmatch(r" *0*[1-9]\d{0,3} *", x) for x in parts
            )
            require(self, "shape", is_shape, "KV_HEADS,GROUP,HEAD_DIM, as in 8,4,128")

    def run(self) -> None:
        import torch

        heads = self._heads()
        if not torch.cuda.is_available():
            raise ConfigError(
                "sparrow tune needs a GPU, but torch finds none; run it on the machine that decodes"
            )
        if torch.version.hip is not None:
            raise ConfigError(
                "Sparrow's kernels do not run on AMD GPUs, so there is nothing to tune; decode "
                "with engine 'hf', which needs no kernels"
            )

        from sparrow.attention.triton.search import Grid, tune
        from sparrow.attention.triton.timing import read_limit, timed
        from sparrow.cli.terminal import note, print_tuned

        device = torch.device("cuda", torch.cuda.current_device())
        target = self._target(heads, device)
        grid = Grid(tuple(sorted(set(self.batches))), tuple(sorted(set(self.pages))), self.tokens)
        try:
            limit = read_limit(2**31)
            torch.cuda.empty_cache()
            choices = tune(
                target, grid, device, limit, lambda launches: timed(launches)["us"], note
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU has too little free memory for a cache of 2 GiB and these batches; stop "
                "other programs that use the GPU, or tune smaller batches"
            ) from error
        print_tuned(choices, choices.save())
        self._say_where_used(target, device)

    def _heads(self) -> tuple[int, int, int]:
        """Return the number of kv heads, the group size and the head dim on each GPU of an engine.

        Raises the same errors as ``find_shape``, and ConfigError if the heads can't be split across
        the GPUs.
        """
        if self.shape is not None:
            kv_heads, group, head_dim = map(int, self.shape.split(","))
        else:
            from sparrow.cli.commands.cost import find_shape

            assert self.model is not None
            model = find_shape(self.model)
            kv_heads = model.kv_heads
            group = model.heads // kv_heads
            head_dim = model.head_dim
        heads = kv_heads * group
        ranks = self.tensor_parallel
        # With more GPUs than kv heads, each kv head is replicated on several GPUs.
        own = max(1, kv_heads // ranks)
        divides = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
        require(
            self,
            "tensor_parallel",
            divides,
            f"a number that divides {heads} query heads and {kv_heads} kv heads",
        )
        return own, heads // ranks // own, head_dim

    def _target(self, heads: tuple[int, int, int], device: torch.device) -> Target:
        import torch

        from sparrow.attention.triton.saved import Target

        kv_heads, group, head_dim = heads
        dtype = getattr(torch, DTYPES[self.kv_cache_dtype])
        return Target.on(
            device,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            dtype=dtype,
            page_size=self.page_size,
        )

    def _say_where_used(self, target: Target, device: torch.device) -> None:
        """If the CUDA kernel decodes some batches on this GPU, print which batches the Triton
        kernels decode.
        """
        from sparrow.attention import choose

        choice = choose(
            None,
            page_size=target.page_size,
            head_dim=target.head_dim,
            kv_heads=target.kv_heads,
            group=target.group,
            dtype=target.dtype,
            device=device,
        )
        if choice.implementation == "cuda":
            print(
                f"on this GPU, engines decode with {choice}; sparrow_kernels='triton' selects the "
                "tuned kernels for every batch"
            )
