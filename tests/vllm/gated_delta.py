"""Run gated delta nets in float32 in vLLM on a CPU. vLLM's own kernels for them require bfloat16.
Import this module before vLLM builds a hybrid model.
"""

import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

STOCK = gdn_attention.cpu_gdn_attention_core


def attend(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Compute a layer's outputs, and update the states of its sequences. vLLM chose the names of
    the parameters.
    """
    if mixed_qkv.dtype != torch.float32:
        return STOCK(mixed_qkv, b, a, core_attn_out, layer_name)
    context = get_forward_context()
    if context.attn_metadata is None:
        return None
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    step = context.attn_metadata[layer.prefix]
    # [slots, width - 1, channels] and [slots, heads, head dim, head dim]
    conv_states, states = layer.kv_cache
    weight = layer.conv1d.weight  # [channels, 1, width]
    decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    starts = step.non_spec_query_start_loc.tolist()
    slots = step.non_spec_state_indices_tensor.tolist()
    for n in range(step.num_decodes + step.num_prefills):
        at = slice(starts[n], starts[n + 1])
        slot = slots[n]
        if step.num_prefills and not step.has_initial_state[n]:
            conv_states[slot] = 0
            states[slot] = 0
        inputs = torch.cat([conv_states[slot], mixed_qkv[at]])
        conv_states[slot] = inputs[1 - weight.shape[-1] :]
        mixed = F.silu(F.conv1d(inputs.T, weight, layer.conv1d.bias, groups=len(weight))).T
        outputs, state = torch_recurrent_gated_delta_rule(
            *layer.rearrange_mixed_qkv(mixed),
            g=decay[None, at],
            beta=b[None, at].sigmoid(),
            initial_state=states[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        core_attn_out[at] = outputs[0]
        states[slot] = state[0]
    return None


gdn_attention.cpu_gdn_attention_core = attend
