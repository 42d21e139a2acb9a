"""Architectures whose tensors are written here, for models of any shape.

Facts are from llama.cpp's ``src/models/*.cpp`` (``load_arch_hparams`` for the keys, ``load_arch_tensors`` for the
tensors). A tensor is written ``name extent,extent,...`` where an extent is an attribute of ``Shape``, ne0 first; a
name without a dot ends in ``.weight``.
"""

from __future__ import annotations

from dataclasses import replace

from moestream.make.architecture import Architecture, KeyValue

_GQA = ("attn_norm embd", "attn_q embd,q", "attn_k embd,kv", "attn_v embd,kv", "attn_output q,embd")
_GQA_BIAS = ("attn_q.bias q", "attn_k.bias kv", "attn_v.bias kv")
_ROUTED = (
    "ffn_gate_inp embd,experts",
    "ffn_gate_exps embd,ff,experts",
    "ffn_up_exps embd,ff,experts",
    "ffn_down_exps ff,embd,experts",
)
_MERGED = (
    "ffn_gate_inp embd,experts",
    "ffn_gate_up_exps embd,twice_ff,experts",
    "ffn_down_exps ff,embd,experts",
)
_SHARED = ("ffn_gate_shexp embd,shared_ff", "ffn_up_shexp embd,shared_ff", "ffn_down_shexp shared_ff,embd")
_DENSE = ("ffn_gate embd,dense_ff", "ffn_up embd,dense_ff", "ffn_down dense_ff,embd")
_GQA_KEYS: dict[str, KeyValue] = {
    "attention.head_count_kv": "kv_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
}  # fmt: skip
#: Sigmoid routing with a selection bias, as DeepSeek-V3 introduced it.
_SIGMOID_KEYS: dict[str, KeyValue] = {
    "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5,
    "expert_shared_count": "shared", "leading_dense_block_count": "leading_dense",
    "expert_feed_forward_length": "ff",
}  # fmt: skip

WRITTEN: dict[str, Architecture] = {
    "olmoe": Architecture(
        (*_GQA, "attn_q_norm q", "attn_k_norm kv", "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "feed_forward_length": "ff"},
        square_attention=True, equal_heads=True, tiny={"kv_heads": 4},
    ),
    "llama": Architecture((*_GQA, "ffn_norm embd"), _ROUTED, {**_GQA_KEYS, "feed_forward_length": "ff"}),
    "qwen2moe": Architecture(
        (*_GQA, *_GQA_BIAS, "ffn_norm embd"), (*_ROUTED, "ffn_gate_inp_shexp embd", *_SHARED),
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "expert_shared_feed_forward_length": "shared_ff"},
        square_attention=True,
    ),
    "qwen3moe": Architecture(
        (*_GQA, "attn_q_norm head_dim", "attn_k_norm head_dim", "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "expert_feed_forward_length": "ff"},
    ),
    "deepseek2": Architecture(
        ("attn_norm embd", "attn_q_a embd,q_lora", "attn_q_a_norm q_lora", "attn_q_b q_lora,mla_q",
         "attn_kv_a_mqa embd,mla_kv", "attn_kv_a_norm kv_lora", "attn_k_b head_dim,kv_lora,heads",
         "attn_v_b kv_lora,head_dim,heads", "attn_output q,embd", "ffn_norm embd"),
        (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_SIGMOID_KEYS, "attention.head_count_kv": "one", "attention.key_length": "mla_kv",
         "attention.value_length": "kv_lora", "attention.key_length_mla": "mla_head",
         "attention.value_length_mla": "head_dim", "attention.q_lora_rank": "q_lora",
         "attention.kv_lora_rank": "kv_lora", "rope.dimension_count": "rope_dim"},
        dense=_DENSE,
    ),
    "gpt-oss": Architecture(
        (*_GQA, *_GQA_BIAS, "attn_output.bias embd", "attn_sinks heads", "post_attention_norm embd"),
        (*_ROUTED, "ffn_gate_inp.bias experts", "ffn_gate_exps.bias ff,experts",
         "ffn_up_exps.bias ff,experts", "ffn_down_exps.bias embd,experts"),
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "attention.sliding_window": "window"},
    ),
    "glm4moe": Architecture(
        (*_GQA, *_GQA_BIAS, "post_attention_norm embd"), (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_GQA_KEYS, **_SIGMOID_KEYS}, dense=_DENSE,
    ),
    "dots1": Architecture(
        (*_GQA, "attn_q_norm head_dim", "attn_k_norm head_dim", "ffn_norm embd"),
        (*_ROUTED, "exp_probs_b.bias experts", *_SHARED),
        {**_GQA_KEYS, **_SIGMOID_KEYS}, dense=_DENSE, equal_heads=True, tiny={"kv_heads": 4},
    ),
    "granitemoe": Architecture(
        (*_GQA, "ffn_norm embd"), (*_ROUTED, *_SHARED),
        {**_GQA_KEYS, "feed_forward_length": "ff", "expert_shared_feed_forward_length": "shared_ff",
         "logit_scale": 1.0},
    ),
    "minimax-m2": Architecture(
        (*_GQA, "attn_q_norm q", "attn_k_norm kv", "ffn_norm embd"), (*_ROUTED, "exp_probs_b.bias experts"),
        {**_GQA_KEYS, "feed_forward_length": "ff", "expert_feed_forward_length": "ff",
         "expert_gating_func": 2},
    ),
    # Its router runs on the layer's input, before attention.
    "smallthinker": Architecture(
        (*_GQA, "ffn_norm embd"), _ROUTED,
        {**_GQA_KEYS, "expert_feed_forward_length": "ff", "expert_gating_func": 2},
    ),
}  # fmt: skip

# Gate and up as one tensor, which newer converters write and the loader tries first.
WRITTEN["deepseek2-merged"] = replace(
    WRITTEN["deepseek2"],
    experts=(*_MERGED, "exp_probs_b.bias experts", *_SHARED),
    known_as="deepseek2",
)
