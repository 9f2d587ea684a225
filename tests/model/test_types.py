"""Test a tiny random model of every type of causal language model in transformers. Sparrow must
either compute it correctly or reject it with an error that names it. With all pages kept, an
accepted model must decode as it does with its own attention. Under a sparse schedule, step-by-step
decoding, teacher forcing and the reference below must agree. The reference implements the method
independently and does not use the package's code.
"""

import inspect
import zlib

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

from sparrow.errors import UnsupportedModel
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.schedule import SparsitySchedule

pytestmark = pytest.mark.slow

T, PROMPT = 34, 22
WINDOW = 8
LARGEST = 2_000_000  # number of parameters; larger models take too long

# different configs use different names for the same field
NAMES = {
    "width": ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"),
    "inner": (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "ffn_hidden_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "encoder_layers",
    ),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "moe_topk", "moe_k", "num_selected_experts"),
    "window": ("sliding_window",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "init": ("initializer_range", "init_std"),
}


def tiny(kind: str):
    """Build a small random model of this type, or return None if these settings do not give a valid
    config.
    """
    number = torch.Generator().manual_seed(zlib.crc32(kind.encode()))

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=number))]

    heads, head_dim = 4, pick(8, 16)
    values = {
        "width": heads * head_dim,
        "inner": 48,
        "layers": pick(2, 3),
        "heads": heads,
        "kv_heads": pick(1, 2, 4),
        "head_dim": head_dim,
        "experts": 4,
        "chosen": 2,
        "window": WINDOW,
        "context": 128,
        "init": 0.3,
    }
    values = {name: values[meaning] for meaning, names in NAMES.items() for name in names}
    values |= {
        "vocab_size": 97,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    try:
        config_class = type(CONFIG_MAPPING[kind]().get_text_config())
        default = config_class()
        alias = {*default.attribute_map.values()} & set(values)
        known = {
            k: v
            for k, v in values.items()
            if getattr(default, k, None) is not None and default.attribute_map.get(k) not in alias
        }
        if kinds := getattr(default, "layer_types", None):
            mixed = {*kinds} == {"sliding_attention", "full_attention"}
            cycle = ["full_attention", "sliding_attention", "full_attention"]
            known["layer_types"] = cycle[: values["num_hidden_layers"]] if mixed else None
        config, model_class = config_class(**known), getattr(transformers, TYPES[kind])
        with torch.device("meta"):
            if sum(p.numel() for p in model_class(config).parameters()) > LARGEST:
                return None
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            model(input_ids=torch.arange(3, 3 + T)[None], use_cache=False)
        return model
    except Exception:  # a config or model may reject shapes with any kind of error
        return None


def reference(schedule: SparsitySchedule, kinds: list[str] | None):
    """Create an attention function for one full sequence whose first ``PROMPT`` tokens are dense.
    Layers of the kind ``sliding_attention`` follow the model's own mask.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        H, K, P = query.shape[1], key.shape[1], schedule.page_size
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kept_HTT = torch.ones(H, query.shape[2], query.shape[2], dtype=torch.bool).tril()
        windowed = bool(kinds) and kinds[module.layer_idx] == "sliding_attention"
        if windowed:
            kept_HTT = attention_mask[0].expand_as(kept_HTT)
        dense = windowed or module.layer_idx in schedule.dense_layers
        for t in range(PROMPT, 0 if dense else query.shape[2]):
            pages = [range(i, min(i + P, t + 1)) for i in range(0, t + 1, P)]
            last = max(len(pages) - schedule.recent_pages, 0)
            for k in range(K):
                heads = slice(k * H // K, (k + 1) * H // K)  # a group shares a selection
                q = query[0, heads, t].mean(0)
                score = [float(q @ key[0, k, list(page)].mean(0)) for page in pages]
                best = sorted(
                    range(schedule.sink_pages, last), key=lambda i, score=score: -score[i]
                )
                always = [*range(schedule.sink_pages), *range(last, len(pages))]
                columns = [
                    c for i in {*always, *best[: int(schedule.pages(t + 1))]} for c in pages[i]
                ]
                kept_HTT[heads, t] = False
                kept_HTT[heads, t, columns] = True
        k, v = (x[0].repeat_interleave(H // K, 0) for x in (key, value))
        weights = (query[0] @ k.mT * scale).masked_fill(~kept_HTT, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1)[None].contiguous(), None

    return attention


@torch.no_grad()
def stepwise(model, rows, pad):
    """Decode a left-padded batch step by step, and return the log-probs after each token, starting
    with the last prompt token.
    """
    longest = T + pad
    ids, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
    ids[0, pad:], mask[0, pad:] = rows[0], 1
    ids[1], mask[1] = torch.cat([rows[1], rows[1][:pad]]), 1
    positions, prompt = (mask.cumsum(1) - 1).clamp(min=0), PROMPT + pad
    out = model(
        input_ids=ids[:, :prompt],
        attention_mask=mask[:, :prompt],
        position_ids=positions[:, :prompt],
        use_cache=True,
    )
    found = [out.logits[:, -1]]
    for t in range(prompt, longest - 1):
        out = model(
            input_ids=ids[:, t : t + 1],
            attention_mask=mask[:, : t + 1],
            position_ids=positions[:, t : t + 1],
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        found.append(out.logits[:, -1])
    return torch.stack(found, 1).log_softmax(-1)[0]


@torch.no_grad()
def whole(model, row):
    return model(input_ids=row[None], use_cache=False).logits[0, PROMPT - 1 : -1].log_softmax(-1)


def check(model, kind):
    """Return whether sparsity changes the output.

    Raises AssertionError if an accepted model computes a wrong result.
    """
    number = torch.Generator().manual_seed(zlib.crc32(kind.encode()) + 1)
    rows = torch.randint(3, 97, (2, T), generator=number)
    P = 2 + int(torch.randint(3, (1,), generator=number))
    sparse = SparsitySchedule((0, 1), bin_tokens=28, page_size=P, dense_layers=(1,))
    pad = (
        5 if "position_ids" in inspect.signature(model.forward).parameters else 0
    )  # some models use column numbers as positions
    own = whole(model, rows[0])
    set_schedule(model, SparsitySchedule.dense(page_size=P, dense_layers=()))
    torch.testing.assert_close(
        stepwise(model, rows, pad), own, rtol=0, atol=1e-4, msg="every page, step by step"
    )
    set_schedule(model, sparse)
    with teacher_forced(model, [PROMPT]):
        forced = whole(model, rows[0])
    torch.testing.assert_close(
        stepwise(model, rows, pad), forced, rtol=0, atol=1e-4, msg="sparse, step by step"
    )
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    AttentionInterface.register("by_hand", reference(sparse, kinds))
    AttentionMaskInterface.register("by_hand", sdpa_mask)
    model.set_attn_implementation("by_hand")
    torch.testing.assert_close(
        forced, whole(model, rows[0]), rtol=0, atol=1e-4, msg="sparse, teacher-forced"
    )
    return (forced - own).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore")
def test_every_model_type_is_computed_correctly_or_rejected(caplog):
    taken, refused, wrong, shows = [], [], [], []
    caplog.set_level("CRITICAL")
    for kind in sorted(TYPES):
        if not isinstance(TYPES[kind], str) or (model := tiny(kind)) is None:
            continue
        config, before = model.config, whole(model, torch.arange(3, 3 + T))
        try:
            set_schedule(model, SparsitySchedule.dense(dense_layers=()))
        except UnsupportedModel as refusal:
            refused.append(kind)
            unchanged = model.config is config and torch.equal(
                whole(model, torch.arange(3, 3 + T)), before
            )
            if "; " not in str(refusal) or not unchanged:
                wrong.append(f"{kind}: {refusal} ({'un' * unchanged}changed)")
            continue
        model = tiny(kind)
        taken.append(kind)
        try:
            if check(model, kind):
                shows.append(kind)
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(taken) > 40 and len(refused) > 40 and len(shows) > 0.9 * len(taken)
