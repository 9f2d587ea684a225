"""All of Sparrow's patches to vLLM. Each one says which private name it replaces, in which
versions, and why.

vLLM has no public hooks for any of this. All monkey-patching of vLLM's names belongs in this
module. ``apply`` applies each patch once per process; importing this module changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from sparrow.vllm import config, control, versions
from sparrow.vllm.lossless import graphs, setup
from sparrow.vllm.runtime import find
from sparrow.vllm.selfcheck import engine, names


@dataclass(frozen=True)
class Patch:
    """A name in vLLM, and what replaces it."""

    target: str  # ``module:name`` or ``module:Class.name``
    versions: str  # vLLM versions that need the patch
    reason: str
    replace: Callable[[Any], Any]  # takes vLLM's own object and returns its replacement
    # parameters that vLLM's function must have for the replacement to work
    parameters: tuple[str, ...] = ()

    def find(self) -> tuple[Any, str, Any]:
        """Return the owner of the name, the name itself, and the object it currently refers to.

        Raises ImportError or AttributeError if this vLLM has no such name.
        """
        return names.locate(self.target)

    def applies_to(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def apply(patches: tuple[Patch, ...]) -> None:
    """Apply these patches to vLLM in this process, skipping any already applied."""
    import vllm

    for patch in patches:
        if not patch.applies_to(vllm.__version__):
            continue
        names.check_name(patch.target, patch.parameters)
        owner, name, stock = patch.find()
        if getattr(stock, "replaced_by_sparrow", False):
            continue
        replacement = patch.replace(stock)
        replacement.replaced_by_sparrow = True
        setattr(owner, name, replacement)


def add_controls() -> None:
    """Add the methods in ``control`` to vLLM's workers, for ``collective_rpc``.

    They go on the worker base class, because trainers use ``worker_extension_cls`` for their own
    methods.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    for method in control.METHODS:
        setattr(WorkerBase, method.__name__, method)


def _checked_init_device(stock: Any) -> Any:
    @wraps(stock)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.platforms import current_platform

        decoding = config.requested(self.vllm_config)
        if decoding is not None:
            versions.check(current_platform.is_cpu())
            config.check_supported(self.vllm_config, decoding, current_platform.is_cpu())
            of_model = needed_by(self.vllm_config.model_config)
            names.check_names(
                needed(decoding.mode, current_platform.is_cpu()) + of_model,
                decoding.is_lossless,
                current_platform.is_cpu(),
                has_adapters=self.vllm_config.lora_config is not None,
                has_head=decoding.guess_head is not None,
            )
            if decoding.is_lossless:
                apply(LOSSLESS)
            apply(of_model)
        stock(self, *args, **kwargs)
        if decoding is not None:
            watch(self.worker, self.vllm_config)
            if decoding.draft_weights != "auto":
                follow_weights(self.worker, self.vllm_config)

    return init_device


def watch(worker: Any, vllm_config: Any) -> None:
    """Wrap a worker's methods to count preempted sequences, tell the lossless speculator about each
    step before it runs, and check the engine after warm-up.

    The methods are replaced on instances, because there are several runner classes.
    ``execute_model`` is replaced on the model runner, because some callers, such as Ray's executor,
    bypass the worker.
    """
    runner = worker.model_runner
    step = worker.model_runner.execute_model
    warm_up = worker.compile_or_warm_up_model
    # vLLM's own speculators do not have this method.
    speculator: Any = getattr(runner, "speculator", None)
    begin_step = getattr(speculator, "begin_step", None)
    if getattr(speculator, "reads_history", False):
        speculator.tokens_SN = runner.req_states.all_token_ids.gpu

    @wraps(step)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.preempted_req_ids and (runtime := find(vllm_config)) is not None:
            runtime.count_preempted(len(scheduler_output.preempted_req_ids))
        if begin_step is not None:
            begin_step(scheduler_output)
        return step(scheduler_output, *args, **kwargs)

    @wraps(warm_up)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        worker.compile_or_warm_up_model = warm_up  # check only once, before the cache is used
        if (runtime := find(vllm_config)) is not None:
            engine.check_engine(worker, runtime)
            runtime.begin_serving()
        return result

    runner.execute_model = execute_model
    worker.compile_or_warm_up_model = compile_or_warm_up_model


def follow_weights(worker: Any, vllm_config: Any) -> None:
    """Mark the draft weights as stale whenever vLLM writes, or may write, to a worker's parameters
    without calling the model's ``load_weights``.
    """

    def followed(stock: Any) -> Any:
        @wraps(stock)
        def change_weights(*args: Any, **kwargs: Any) -> Any:
            try:
                return stock(*args, **kwargs)
            finally:
                if (runtime := find(vllm_config)) is not None:
                    runtime.renew_draft_weights()

        return change_weights

    for name in ("reload_weights", "update_weights", "finish_weight_update", "apply_model"):
        setattr(worker, name, followed(getattr(worker, name)))


def _checked_initialize_from_config(stock: Any) -> Any:
    @wraps(stock)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        control.check(self.vllm_config)

    return initialize_from_config


def _prepared_engine_arguments(stock: Any) -> Any:
    @wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.logger import init_logger
        from vllm.platforms import current_platform

        decoding = config.requested(self)
        if decoding is not None:
            config.store(self, decoding, current_platform.is_cpu())
            if decoding.is_lossless:
                setup.prepare(self, decoding, current_platform.is_cpu())
        elif config.is_ours_but_unset(self):
            init_logger("vllm.sparrow").warning(
                "The attention backend is CUSTOM, which is Sparrow's, but Sparrow has no settings, "
                f"so vLLM decodes densely; set {config.KEY!r} in additional_config, or "
                f"{config.MODE_ENVIRONMENT} or {config.ENVIRONMENT} in the environment"
            )
        vllm_config = stock(self, *args, **kwargs)
        if decoding is not None and decoding.is_lossless:
            setup.claim(vllm_config.speculative_config)
        return vllm_config

    return create_engine_config


def _allowing_our_speculator(stock: Any) -> Any:
    @wraps(stock)
    def unsupported_features(self: Any) -> list[str]:
        ours = config.requested_lossless(self) is not None
        return [
            name
            for name in stock(self)
            if not (ours and name == "speculative method 'draft_model'")
        ]

    return unsupported_features


def _adapting_in_each_rank(stock: Any) -> Any:
    @wraps(stock)
    def _maybe_disable_dynamic_sd_for_data_parallel(self: Any) -> None:
        if config.requested_lossless(self) is None or self.model_config.is_moe:
            stock(self)

    return _maybe_disable_dynamic_sd_for_data_parallel


def _checking_by_name(stock: Any) -> Any:
    @wraps(stock)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        asked = self
        if setup.is_ours(speculative_config):
            setup.check_request(self)
            asked = setup.without_verified_options(self)
        stock(asked, speculative_config)

    return _validate_spec_decode


def _our_speculator(stock: Any) -> Any:
    @wraps(stock)
    def init_speculator(vllm_config: Any, device: Any, *args: Any) -> Any:
        if config.requested_lossless(vllm_config) is None:
            return stock(vllm_config, device, *args)
        from sparrow.vllm.lossless.speculator import SparseSpeculator

        return SparseSpeculator(vllm_config, device)

    return init_speculator


def _without_drafting(stock: Any) -> Any:
    @wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        speculator = self.speculator
        state = self.execute_model_state
        if (
            state is None
            or not getattr(speculator, "is_idle", False)
            or state.input_batch.is_prefilling_np.any()
        ):
            return stock(self, *args, **kwargs)
        speculator.runtime.passes.count_plain(state.input_batch.num_computed_tokens_np)
        drafts = self.num_speculative_steps
        self.speculator = None
        self.num_speculative_steps = 0
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.speculator = speculator
            self.num_speculative_steps = drafts

    return sample_tokens


def _candidates_by_drafts(stock: Any) -> Any:
    @wraps(stock)
    def _init_candidates(self: Any) -> None:
        from vllm.config import CUDAGraphMode

        decoding = config.requested_lossless(self.vllm_config)
        if decoding is None:
            stock(self)
            return
        # vLLM captures graphs for the draft lengths of batches of up to ``max_num_reqs`` sequences.
        # Each batch size has one draft length, so few sequences would leave out some of them.
        rows = self.max_num_reqs
        self.max_num_reqs = max(rows, len(setup.draft_choices(decoding)))
        stock(self)
        self.max_num_reqs = rows
        captured = self._capture_descs
        for mode, descriptions in captured.items():
            captured[mode] = [each for each in descriptions if (each.num_reqs or 0) <= rows]
        modes = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        self._candidates = graphs.candidates(
            graph for mode in modes for graph in captured.get(mode, ())
        )

    return _init_candidates


def _metered_rejection_sample(stock: Any) -> Any:
    from sparrow.vllm.lossless.verify import draw, runtime_of

    @wraps(stock)
    def rejection_sample(
        target_logits: Any,
        draft_logits: Any,
        draft_sampled: Any,
        cu_num_logits: Any,
        pos: Any,
        idx_mapping: Any,
        expanded_idx_mapping: Any,
        expanded_local_pos: Any,
        temperature: Any,
        seed: Any,
        num_speculative_steps: int,
        *args: Any,
        use_fp64: bool = False,
        **kwargs: Any,
    ) -> Any:
        runtime = runtime_of(draft_logits)
        if runtime is not None and runtime.decoding.drafter_invariant:
            sampled, num_sampled = draw(
                target_logits,
                draft_sampled,
                cu_num_logits,
                pos,
                expanded_idx_mapping,
                temperature,
                seed,
                num_speculative_steps,
                use_fp64,
            )
        else:
            sampled, num_sampled = stock(
                target_logits,
                draft_logits,
                draft_sampled,
                cu_num_logits,
                pos,
                idx_mapping,
                expanded_idx_mapping,
                expanded_local_pos,
                temperature,
                seed,
                num_speculative_steps,
                *args,
                use_fp64=use_fp64,
                **kwargs,
            )
        if runtime is not None:
            runtime.drafting.meter.add(
                target_logits,
                draft_logits,
                cu_num_logits,
                pos,
                expanded_idx_mapping,
                expanded_local_pos,
                temperature,
                num_sampled,
            )
        return sampled, num_sampled

    return rejection_sample


def _with_landmarks(stock: Any) -> Any:
    @wraps(stock)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from sparrow.vllm.backend import SparseImpl, attach

        spec = stock(self, vllm_config)
        is_ours = isinstance(self.impl, SparseImpl) and not self.impl.has_window
        return attach(self, spec, vllm_config) if is_ours else spec

    return get_kv_cache_spec


def _marking_prefill(stock: Any) -> Any:
    @wraps(stock)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if (runtime := find(self.vllm_config)) is not None:
            runtime.is_prefilling = torch.from_numpy(input_batch.is_prefilling_np)
        return stock(self, input_batch, *args, **kwargs)

    return prepare_attn


def _leaving_other_instances_alone(stock: Any) -> Any:
    @wraps(stock)
    def _decorate_cls_for_torch_compile(self: Any, cls: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        init = cls.__init__
        call = cls.__call__
        stock(self, cls, *args, **kwargs)
        compiled_init = cls.__init__
        compiled_call = cls.__call__
        if compiled_init is init:  # decorated for an earlier engine
            return

        @wraps(init)
        def initialize(model: Any, *args: Any, **kwargs: Any) -> None:
            is_vllms = get_current_vllm_config_or_none() is not None
            (compiled_init if is_vllms else init)(model, *args, **kwargs)

        @wraps(call)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            is_vllms = "compilation_config" in vars(model)  # set by ``compiled_init``
            return (compiled_call if is_vllms else call)(model, *args, **kwargs)

        cls.__init__ = initialize
        cls.__call__ = run

    return _decorate_cls_for_torch_compile


def _lists_in_arrays(stock: Any) -> Any:
    from vllm.logprobs import FlatLogprobs

    from sparrow.vllm.lists import ArrayLogprobs, update

    @wraps(stock)
    def _update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
        begun = isinstance(self.logprobs, ArrayLogprobs)
        if begun or (self.tokenizer is None and isinstance(self.logprobs, FlatLogprobs)):
            update(self, logprobs_lists)
        else:
            stock(self, logprobs_lists)

    return _update_sample_logprobs


def _unpacked_linear(stock: Any) -> Any:
    from torch.nn.functional import linear
    from vllm.config import get_current_vllm_config_or_none

    @wraps(stock)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        vllm_config = get_current_vllm_config_or_none()
        is_ours = vllm_config is not None and config.requested(vllm_config) is not None
        if is_ours and layer.weight.ndim == 2:
            layer.cpu_linear = linear
        else:  # a plain engine started after a Sparrow engine, or a convolution
            stock(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm


ALWAYS = (
    Patch(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
        ">=0.24",
        "Refuse unsupported versions and models before memory is allocated, because a backend sees "
        "only single layers. Watch the worker: vLLM counts preemptions only with statistics that "
        "take host time for every token, versions before 0.32 do not tell a speculator how many "
        "tokens to draft, and no version passes on what Sparrow's scheduler adds to a step. Keep "
        "warm-up prompts from setting the scales of an fp8 KV cache, and renew the 8-bit copy of "
        "the weights when the weights change.",
        _checked_init_device,
    ),
    Patch(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config",
        ">=0.26",
        "Check that every layer uses Sparrow's backend, and log how the engine decodes.",
        _checked_initialize_from_config,
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        versions.SUPPORTED,
        "Fix an engine's mode when it starts, so that later changes to the environment do not "
        "affect it. In lossless mode, configure vLLM's speculative decoding for the user.",
        _prepared_engine_arguments,
    ),
    Patch(
        "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        ">=0.26,<0.32",
        "In these versions, the V2 model runner refuses draft models, but lossless mode replaces "
        "vLLM's speculator with Sparrow's.",
        _allowing_our_speculator,
    ),
    Patch(
        "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
        versions.SUPPORTED,
        "Let the number of drafts adapt under data parallelism. vLLM fixes the number for every "
        "model, although the ranks of a dense model never wait for each other.",
        _adapting_in_each_rank,
    ),
    Patch(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        versions.SUPPORTED,
        "Refuse requests that lossless mode cannot serve, at the point where vLLM checks requests "
        "against the limits of its own speculative decoding. Allow min_p and logit_bias, which "
        "vLLM refuses although its V2 model runner verifies them.",
        _checking_by_name,
        ("speculative_config",),
    ),
)
"""Patches applied wherever the plugin is loaded. They have no effect on engines without Sparrow."""

ATTENTION = (
    Patch(
        "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
        ">=0.26",
        "Make room for landmarks in every KV block. vLLM 0.32 lets a backend customise the spec, "
        "but gives it neither the layer nor the engine's configuration.",
        _with_landmarks,
        ("vllm_config",),
    ),
)
"""Patches applied when one of Sparrow's backends is chosen for a model."""

LOSSLESS = (
    Patch(
        "vllm.v1.worker.gpu.model_runner:init_speculator",
        ">=0.26",
        "Draft with the model itself rather than with a second copy.",
        _our_speculator,
        ("vllm_config", "device"),
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        ">=0.26",
        "Run a step without drafts as stock vLLM does, because preparing for drafts costs host "
        "time.",
        _without_drafting,
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        ">=0.26",
        "Find a CUDA graph for any number of drafts: vLLM considers only graphs of the nearest "
        "size, which may have been captured for a different number, and captures graphs for at "
        "most ``max_num_seqs`` different numbers.",
        _candidates_by_drafts,
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
        ">=0.26",
        "Measure the acceptance of drafts where both distributions are available. With "
        "drafter_invariant, draw the tokens that dense decoding would draw instead of accepting "
        "drafts by their probability.",
        _metered_rejection_sample,
        (
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
            "seed",
            "num_speculative_steps",
            "use_fp64",
        ),
    ),
)
"""Patches applied in a lossless engine's workers, before the model is loaded."""

HYBRID = (
    Patch(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
        f">={versions.OLDEST_WITH_HYBRID}",
        "Read all pages for prompt tokens. For a hybrid model, vLLM's V2 model runner describes a "
        "prompt chunk of one token as a decode row.",
        _marking_prefill,
        ("input_batch",),
    ),
)
"""Patches applied in the workers of an engine with a hybrid model, before the model is loaded."""

TRANSFORMERS = (
    Patch(
        "vllm.model_executor.models.transformers.base:Base._decorate_cls_for_torch_compile",
        ">=0.32",
        "Leave the trainer's own model alone. For a model that vLLM runs with transformers' class, "
        "such as Olmo 3, vLLM adds compilation to the class itself, after which other instances in "
        "the process fail.",
        _leaving_other_instances_alone,
        ("cls",),
    ),
)
"""Patches applied in the workers of an engine that runs transformers' class of the model."""

CPU_WEIGHTS = (
    Patch(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        ">=0.32",
        "Multiply by the weights as they were loaded. vLLM packs them for its CPU kernels and "
        "drops the originals, so that a later update fails or, if the output layer is tied to the "
        "embedding, is silently lost.",
        _unpacked_linear,
        ("layer", "remove_weight"),
    ),
)
"""Patches applied when Sparrow's CPU backend is chosen for a model."""

LISTS = (
    Patch(
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        ">=0.26",
        "Keep top lists in arrays. vLLM keeps every id, log-prob and rank as a Python object, "
        "which needs ten times the memory and more time.",
        _lists_in_arrays,
        ("logprobs_lists",),
    ),
)
"""Patches applied when a trainer's engine requests top lists for every token."""


def needed(mode: str, on_cpu: bool) -> tuple[Patch, ...]:
    """List the patches that an engine in this mode applies before serving requests, for any
    model.
    """
    return (
        ALWAYS
        + ATTENTION
        + (LOSSLESS if mode == "lossless" else ())
        + (CPU_WEIGHTS if on_cpu else ())
    )


def needed_by(model: Any) -> tuple[Patch, ...]:
    """List the patches that only this kind of model needs. ``model`` is vLLM's ``ModelConfig``."""
    hybrid = HYBRID if model.is_hybrid else ()
    transformers = TRANSFORMERS if model.using_transformers_backend() else ()
    return hybrid + transformers
