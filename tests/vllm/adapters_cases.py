"""Test LoRA adapters in lossless mode in a real vLLM. ``test_lossless.py`` runs this file in its
own process. The engines use vLLM's LoRA code for GPUs. Its kernels can only multiply in 16 bits, so
equivalent torch code replaces them.
"""

import contextlib

import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
import peft
from vllm.lora.punica_wrapper import punica_gpu
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform

from sparrow.audit.run import run_audit
from sparrow.cli.loading import with_adapter
from sparrow.engines.hf import HFEngine
from sparrow.engines.registry import Asked, parse_engine
from sparrow.engines.vllm import VLLMEngine
from sparrow.engines.vllm.stock import StockEngine
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.vllm.lossless.adapters import DraftAdapters
from tests.vllm import tiny_vllm as tiny
from tests.vllm.lossless_cases import (
    assert_greedy_and_dense,
    generate,
    lossless,
    parameters,
    tokens_of,
)

LORA = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
EVERY_LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ASKED = tiny.prompts(150, 17, 64, 33, 90, 40, seed=5)
WHOSE = (0, 1, 2, 2, 0, 1)  # the adapter of each prompt; 0 means no adapter


def rows_by_adapter(token_lora_mapping, sorted_rows, counts, starts, adapters, without, active):
    """Yield each adapter in use and the rows that use it, as vLLM's kernels determine them."""
    if without.item():
        return
    for place in range(int(active)):
        adapter = int(adapters[place])
        if adapter >= 0:
            first = int(starts[place])
            yield adapter, sorted_rows[first : first + int(counts[place])].long()


def shrink(inputs, weights, output, *mapping_and_scale):
    *mapping, scale = mapping_and_scale
    if not mapping[-2].item():
        output.zero_()
    for adapter, rows in rows_by_adapter(*mapping):
        for part, weight in enumerate(weights):
            output[part, rows] = scale * inputs[rows] @ weight[adapter].squeeze(0).T


def expand(inputs, weights, output, *mapping, offset_start=0, add_inputs=False):
    for adapter, rows in rows_by_adapter(*mapping):
        first = offset_start
        for part, weight in enumerate(weights):
            change = inputs[part, rows] @ weight[adapter].squeeze(0).T
            columns = slice(first, first + change.shape[1])
            output[rows, columns] = change + (output[rows, columns] if add_inputs else 0)
            first += change.shape[1]


@pytest.fixture(scope="module", autouse=True)
def gpu_code():
    """Make engines use vLLM's LoRA code for GPUs. The code for CPUs applies another request's
    adapter to requests without an adapter in the same batch.
    """
    name = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "get_punica_wrapper", classmethod(lambda cls: name))
        patch.setattr(punica_gpu, "lora_shrink", shrink)
        patch.setattr(punica_gpu, "lora_expand", expand)
        yield


def adapter_of(folder, model_folder, seed, layers=EVERY_LAYER):
    """Write an adapter to a folder, and return a copy of the model with the adapter merged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    torch.manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(folder)
    return tuned.merge_and_unload().eval()


def adapter_on(model_folder, adapter_folder):
    """Return the model in ``model_folder`` with an adapter merged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter_folder).merge_and_unload().eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a model and two adapters. Also return three models: the original one,
    and one with each adapter merged.
    """
    folder = tmp_path_factory.mktemp("model")
    plain = tiny.checkpoint(folder, num_hidden_layers=2)
    models = [plain, *(adapter_of(folder / f"adapter-{n}", folder, n) for n in (1, 2))]
    return folder, models


def requests(folder, whose=WHOSE):
    return [LoRARequest(f"a{n}", n, str(folder / f"adapter-{n}")) if n else None for n in whose]


def answers(llm, folder, tokens=40, asked=ASKED, whose=WHOSE, **sampling):
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in asked],
        parameters(tokens, **sampling),
        lora_request=requests(folder, whose),
        use_tqdm=False,
    )
    return [output.outputs[0] for output in outputs]


def share_accepted(llm):
    counts = cases.counters(llm)
    return counts["accepted"] / counts["drafted"]


@pytest.fixture(scope="module")
def stock(made):
    with cases.engine(made[0], **LORA) as llm:
        return tokens_of(answers(llm, made[0]))


def assert_each_has_its_model(models, completions, asked=ASKED, whose=WHOSE):
    for number, model in enumerate(models):
        own = [i for i, each in enumerate(whose) if each == number]
        assert_greedy_and_dense(model, [asked[i] for i in own], [completions[i] for i in own])


@pytest.mark.parametrize("pages", [2, 1000])
def test_greedy_tokens_of_each_request_match_stock_vllm_with_the_same_adapter(made, stock, pages):
    folder, models = made
    with cases.engine(folder, lossless(4, pages=pages), **LORA) as llm:
        got = answers(llm, folder)
        share = share_accepted(llm)
    assert tokens_of(got) == stock
    assert_each_has_its_model(models, got)
    if pages == 1000:
        with cases.engine(folder, lossless(4, pages=pages)) as llm:
            generate(llm, ASKED, 40)
            assert share == share_accepted(llm) > 0.85, (
                "all drafts must be accepted, except at the ends of responses"
            )
    else:
        assert 0.05 < share < 0.85


def test_drafts_without_the_adapters_are_often_rejected(made, stock, monkeypatch):
    folder, _ = made
    monkeypatch.setattr(DraftAdapters, "by_sequence", lambda self: self.captured(True))
    with cases.engine(folder, lossless(4, pages=1000), **LORA) as llm:
        assert tokens_of(answers(llm, folder)) == stock
        assert share_accepted(llm) < 0.7


def test_batches_with_and_without_adapters_replay_different_graphs(made, stock):
    """Graphs are captured while no row has an adapter. That must not affect later passes."""
    folder, models = made

    @torch.inference_mode()
    def capture(worker):
        drafter = worker.model_runner.speculator.drafter
        adapters = drafter._adapters
        for with_adapters in (True, False):
            with adapters.captured(with_adapters):
                assert adapters.are_used == with_adapters
                drafter._draft(cases.Replayed.rows)
                drafter._graphs[with_adapters][cases.Replayed.rows] = cases.Replayed(drafter)
        drafter._step_index.zero_()

    def replays(worker):
        graphs = worker.model_runner.speculator.drafter._graphs
        return [graphs[with_adapters][cases.Replayed.rows].count for with_adapters in (True, False)]

    with cases.engine(folder, lossless(4, pages=1000), max_num_seqs=8, **LORA) as llm:
        assert tokens_of(answers(llm, folder)) == stock
        llm.collective_rpc(capture)
        llm.reset_prefix_cache()
        cases.counters(llm)
        assert tokens_of(answers(llm, folder)) == stock
        assert share_accepted(llm) > 0.85
        [(with_adapters, without)] = llm.collective_rpc(replays)
        assert with_adapters > 0 == without
        assert_greedy_and_dense(models[0], ASKED, generate(llm, ASKED, 40))
        assert share_accepted(llm) > 0.85
        [(still, without)] = llm.collective_rpc(replays)
        assert still == with_adapters and without > 0


def test_seeded_samples_match_stock_vllm_with_adapters(made):
    """With ``drafter_invariant``, sampled tokens must match in batches whose adapters change as
    requests come and go.
    """
    folder, _ = made
    sampling = dict(temperature=1.0, seed=3, tokens=24, asked=ASKED * 2, whose=WHOSE * 2)
    found = []
    for decoding in (None, lossless(4, pages=4, drafter_invariant=True)):
        with cases.engine(folder, decoding, max_num_seqs=5, **LORA) as llm:
            found.append(tokens_of(answers(llm, folder, **sampling)))
    assert found[0] == found[1]


def test_drafts_use_the_new_adapters_after_a_replacement(made):
    """One adapter is replaced under the same name, and another one is removed and loaded again."""
    folder, models = made
    with cases.engine(folder, lossless(4, pages=1000), **LORA) as llm:
        swapped = (0, 2, 1, 1, 0, 2)
        for whose, order in ((WHOSE, (1, 2)), (swapped, (2, 1))):
            for number, place in zip((1, 2), order, strict=True):
                path = str(folder / f"adapter-{place}")
                llm.llm_engine.remove_lora(number)
                llm.llm_engine.add_lora(LoRARequest(f"a{number}", number, path))
            llm.reset_prefix_cache()
            cases.counters(llm)
            got = answers(llm, folder)
            assert_each_has_its_model(models, got, whose=whose)
            assert share_accepted(llm) > 0.85


def test_drafts_use_updated_base_weights_while_adapters_are_loaded(made, tmp_path):
    folder, _ = made
    plain = tiny.checkpoint(tmp_path, num_hidden_layers=2, seed=1)
    models = [plain, *(adapter_on(tmp_path, folder / f"adapter-{n}") for n in (1, 2))]
    with cases.engine(folder, lossless(4, pages=1000), **LORA) as llm:
        answers(llm, folder, 8)
        weights = str(tmp_path / "model.safetensors")
        llm.collective_rpc("sparrow_load_weights", args=(weights,))
        llm.reset_prefix_cache()
        cases.counters(llm)
        assert_each_has_its_model(models, answers(llm, folder))
        assert share_accepted(llm) > 0.85


def test_drafts_with_8_bit_weights_use_the_adapters(made):
    """The copy contains the weights without adapters. Drafts apply adapters as all other steps do."""
    folder, models = made
    shares = []
    for whose in (WHOSE, (0,) * 6):
        decoding = lossless(4, pages=1000, draft_weights="fp8")
        with cases.engine(folder, decoding, **LORA) as llm:
            described = llm.collective_rpc("sparrow_describe")[0]
            got = answers(llm, folder, whose=whose)
            shares.append(share_accepted(llm))
        assert described["draft_layers"] == 8
        assert_each_has_its_model(models, got, whose=whose)
    with_adapters, without = shares
    assert with_adapters > without - 0.05, (
        "adapters must not lower acceptance (rounding does, in such a small model)"
    )


def test_drafts_use_adapters_on_the_embedding(made, tmp_path):
    folder, _ = made
    for number in (1, 2):
        adapter_of(tmp_path / f"adapter-{number}", folder, number, ["embed_tokens", "o_proj"])
    found = []
    for decoding in (None, lossless(4, pages=1000)):
        with cases.engine(folder, decoding, **LORA) as llm:
            found.append(tokens_of(answers(llm, tmp_path)))
            if decoding is not None:
                assert share_accepted(llm) > 0.85
    assert found[0] == found[1]


def test_adapter_on_the_output_layer_raises_an_error(made, tmp_path):
    folder, _ = made
    adapter_of(tmp_path, folder, 1, ["lm_head", "o_proj"])
    asked = LoRARequest("outputs", 1, str(tmp_path))
    refusal = "does not support the LoRA adapter 1, which changes lm_head: vLLM maps adapters of"
    with cases.engine(folder, lossless(4), **LORA) as llm:
        with pytest.raises(Exception, match=refusal):
            llm.llm_engine.add_lora(asked)
        assert_each_has_its_model(made[1], answers(llm, folder, 8))
    with cases.engine(folder, **LORA) as llm:
        assert llm.llm_engine.add_lora(asked)


@pytest.mark.parametrize("is_scored_with_it", [True, False])
def test_an_audit_with_an_adapter_is_exact_only_if_the_scorer_uses_the_same_adapter(
    tmp_path, is_scored_with_it
):
    folder = tmp_path / "model"
    model = tiny.checkpoint(folder, vocab_size=24, num_hidden_layers=2, initializer_range=0.2)
    adapter_of(tmp_path / "adapter", folder, 1)
    options = dict(adapter=str(tmp_path / "adapter"), skip_tokenizer_init=True, max_num_seqs=192)
    options = {**tiny.OPTIONS, **options, "max_model_len": 256}
    asked = [[token % 24 for token in prompt] for prompt in tiny.prompts(*[90] * 16)] * 12
    if is_scored_with_it:
        model = with_adapter(model, options["adapter"])
    scorer = HFEngine(model, SparsitySchedule.dense(), eos_ids=[])
    audited = run_audit(
        lambda: VLLMEngine(str(folder), lossless(3), **options),
        lambda: StockEngine(str(folder), **options),
        lambda: contextlib.nullcontext(scorer),
        asked,
        Sampling(12, top_n=0, seed=7),
        resolution=0.1,
    )
    drafts = audited.tested_counters["drafts"]
    assert 0 < drafts["accepted"] < drafts["drafted"]
    assert audited.verdict.status == ("exact" if is_scored_with_it else "cannot tell")


def test_missing_adapters_and_adapters_for_training_engines_raise_errors(tmp_path):
    asked = Asked(
        parse_engine("vllm:adapter=tuned"), "m", None, None, lossless(3), "fp32", sleeps=True
    )
    with pytest.raises(ConfigError, match="has an adapter, which only sparrow audit supports"):
        asked.start()
    with pytest.raises(ConfigError, match="is not a folder with a LoRA adapter"):
        StockEngine("m", adapter=str(tmp_path))
