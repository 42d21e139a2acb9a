"""Architectures whose tensors llama.cpp's own loader names: an entry is what it reads beyond ``_KEYS``.

Facts are from llama.cpp's ``src/models/*.cpp`` (``load_arch_hparams``). Keys a loader does not read do no harm, so all
entries begin with the same ones.
"""

from __future__ import annotations

from typing import Any

from moestream.make.architecture import Architecture, KeyValue, PerLayer

Keys = dict[str, KeyValue]

_KEYS: Keys = {
    "feed_forward_length": "ff", "expert_feed_forward_length": "ff", "expert_shared_feed_forward_length": "ff",
    "expert_shared_count": "shared", "expert_gating_func": 2, "expert_weights_norm": True,
    "expert_weights_scale": 1.5, "leading_dense_block_count": "leading_dense",
    "attention.head_count_kv": "kv_heads", "attention.sliding_window": "window",
    "attention.sliding_window_pattern": 2, "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0,
    "logit_scale": 1.0, "use_parallel_residual": False, "residual_scale": 1.0, "full_attention_interval": 2,
    "rope.dimension_sections": [8, 8, 8, 8], "shortconv.l_cache": 3,
}  # fmt: skip
#: Latent attention: keys and values are made from one compressed row.
_MLA: Keys = {
    "attention.head_count_kv": "one", "attention.key_length": "mla_kv", "attention.value_length": "kv_lora",
    "attention.key_length_mla": "mla_head", "attention.value_length_mla": "head_dim",
    "attention.q_lora_rank": "q_lora", "attention.kv_lora_rank": "kv_lora", "rope.dimension_count": "rope_dim",
}  # fmt: skip
#: Sparse attention, which chooses the rows to attend to with a top-k of its own.
_INDEXER: Keys = {
    "attention.indexer.head_count": "heads", "attention.indexer.key_length": "head_dim",
    "attention.indexer.top_k": 32, "attention.indexer.block_size": 4, "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True, "attention.indexer.local_blocks": 1,
    "attention.indexer.types": PerLayer((1, 0)),
}  # fmt: skip
#: Layers with a recurrent state of one kind or the other.
_MAMBA: Keys = {
    "ssm.conv_kernel": 4, "ssm.inner_size": "twice_embd", "ssm.state_size": 128, "ssm.time_step_rank": "heads",
    "ssm.group_count": 2,
}  # fmt: skip
_KDA: Keys = {
    "ssm.conv_kernel": 4, "kda.head_dim": "head_dim", "kda.safe_gate": True, "kda.gate_lower_bound": -5.0,
}  # fmt: skip
#: Every second layer is one of those: it has no heads.
_HYBRID: Keys = {
    "attention.head_count": PerLayer(("heads", 0)), "attention.head_count_kv": PerLayer(("kv_heads", 0)),
}  # fmt: skip
_HYBRID_MLA: Keys = {
    **_MLA, **_KDA, **_HYBRID, "attention.head_count_kv": PerLayer(("one", 0)),
}  # fmt: skip
#: Attention, state and experts take turns as layers of their own.
_TURNS: Keys = {
    **_MAMBA, "attention.head_count": PerLayer(("heads", 0, 0)),
    "attention.head_count_kv": PerLayer(("kv_heads", 0, 0)), "feed_forward_length": PerLayer((0, 0, "ff")),
}  # fmt: skip
_WINDOWS: Keys = {
    "attention.sliding_window_pattern": PerLayer((0, 1)), "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim", "rope.freq_base_swa": 10000.0,
}  # fmt: skip
_WINDOWS_MLA: Keys = {
    **_WINDOWS, "attention.kv_lora_rank_swa": "kv_lora", "attention.key_length_swa": "mla_kv",
    "attention.value_length_swa": "kv_lora", "attention.key_length_mla_swa": "mla_head",
    "attention.value_length_mla_swa": "head_dim",
}  # fmt: skip
_HYPER: Keys = {
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2, "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8, "hyper_connection.magnitude": 2.0,
}  # fmt: skip
_DEEPSEEK4: Keys = {
    **_INDEXER, **_HYPER, "attention.head_count_kv": "one", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "attention.q_lora_rank": "q_lora", "rope.dimension_count": "rope_dim",
    "attention.output_group_count": 4, "attention.output_lora_rank": 32,
    "attention.compress_rope_freq_base": 160000.0, "expert_gating_func": 4, "swiglu_clamp_exp": 10.0,
}  # fmt: skip
#: The last layer guesses the token after the next one; decoding does not run it.
_NEXTN: Keys = {"nextn_predict_layers": 1}
_GROUPS: Keys = {"expert_group_count": 4, "expert_group_used_count": 2}
_CLAMP: Keys = {"swiglu_clamp_exp": 7.0}
#: Of tensors that only files in NVFP4 have. The router's scale is another matter.
_SCALES = r"(?<!ffn_gate_inp)\.(input_)?scale$"


def _ask(*more: Keys, without: str = _SCALES, **entry: Any) -> Architecture:
    keys = dict(_KEYS)
    for some in more:
        keys |= some
    return Architecture(keys=keys, without=without, **entry)


ASKED: dict[str, Architecture] = {
    "mistral3": _ask(without=""),
    "minicpm": _ask(),
    "llama-embed": _ask(),
    "refact": _ask(),
    "dbrx": _ask(),
    "grok": _ask(),
    "phimoe": _ask(),
    "llada-moe": _ask(),
    "rnd1": _ask(),
    "mellum": _ask(_WINDOWS),
    "maple": _ask(_WINDOWS, _CLAMP),
    "qwen3vlmoe": _ask(),
    "qwen3next": _ask(_MAMBA),
    "qwen3next-apart": _ask(_MAMBA, apart=True, known_as="qwen3next"),
    "qwen35moe": _ask(_MAMBA, _NEXTN),
    "qwen4exp": _ask(_MAMBA, _HYPER, _INDEXER),
    "gemma4": _ask(_WINDOWS, {"embedding_length_per_layer_input": 0}),
    "gemma4-apart": _ask(
        _WINDOWS, {"embedding_length_per_layer_input": 0}, apart=True, known_as="gemma4"
    ),
    "deepseek": _ask(),
    "deepseek2-ocr": _ask(tiny={"kv_heads": 4}),
    "mistral4": _ask(_MLA),
    "deepseek32": _ask(_MLA, _INDEXER, _GROUPS, _NEXTN),
    "glm-dsa": _ask(_MLA, _INDEXER, _NEXTN, {"attention.indexer.types": 1}),
    "dots3note": _ask(_MLA, _INDEXER, _WINDOWS_MLA),
    # Experts of the first layer are looked up by token; nothing is sorted there.
    "deepseek4": _ask(
        _DEEPSEEK4, {"attention.compress_ratios": PerLayer((0, 0, 4, 128)), "hash_layer_count": 1}
    ),
    # Its latent attention has no positions.
    "glm5-next": _ask(
        _HYBRID_MLA, _INDEXER, _HYPER,
        {"attention.head_count": "heads", "attention.key_length": "kv_lora", "rope.dimension_count": 0,
         "attention.indexer.types": 1},
    ),
    "cohere2moe": _ask(_WINDOWS, _NEXTN),
    "hy_v3": _ask(_NEXTN),
    "hy_v4": _ask(_MLA, _INDEXER, _HYPER, _CLAMP),
    "afmoe": _ask(),
    "laguna": _ask(),
    "exaone-moe": _ask(),
    "bailingmoe": _ask(),
    "bailingmoe2": _ask(_GROUPS),
    "bailingmoe3": _ask(_HYBRID_MLA),
    "kimi-linear": _ask(_HYBRID_MLA),
    "kimi-k3": _ask(
        _HYBRID_MLA,
        {"attn_res.block_size": 12, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0,
         "expert_latent_length": "embd"},
    ),
    "minimax-m3": _ask(_INDEXER, tiny={"kv_heads": 4}),
    "step35": _ask(_WINDOWS, _NEXTN),
    "ernie4_5-moe": _ask({"interleave_moe_layer_step": 1}),
    "hunyuan-moe": _ask(),
    "granite": _ask(),
    "granitehybrid": _ask(_MAMBA, _HYBRID),
    "granite_swa": _ask(_WINDOWS),
    "llama4": _ask({"interleave_moe_layer_step": 2}),
    "arctic": _ask(),
    "minimax-01": _ask(),
    "mimo2": _ask(_WINDOWS, _NEXTN),
    "lfm2moe": _ask(_HYBRID),
    "nemotron_h": _ask(_TURNS, tiny={"layers": 6}),
    "nemotron_h_moe": _ask(_TURNS, {"moe_latent_size": "embd"}, tiny={"layers": 6}),
    "jamba": _ask(_MAMBA, _HYBRID),
    # Two banks a layer: a chunk expert goes with every two of the routed ones.
    "grovemoe": _ask(
        {"experts_per_group": 2, "expert_group_scale": 0.05, "expert_chunk_feed_forward_length": "ff"}
    ),
    "nomic-bert-moe": _ask({"moe_every_n_layers": 2, "tokenizer.ggml.token_type_count": 1}),
    "dflash": _ask(
        _DEEPSEEK4,
        {"target_layers": [0, 1], "attention.compress_ratios": PerLayer((0,)),
         "rope.dimension_sections": [0, 0, 0, 0]},
    ),
}  # fmt: skip

#: What architectures without experts ask for, beside keys that would give them some: see ``census.py``.
_OTHERS: Keys = {
    **_KEYS, "interleave_moe_layer_step": 1, "moe_every_n_layers": 2, "tokenizer.ggml.token_type_count": 1,
    "embedding_length_out": "twice_embd", "extract_layers": [0, 1, 2], "decoder_block_count": "layers",
    "attention.relative_buckets_count": 32, "attention.group_norm_epsilon": 1e-5, "attention.group_norm_groups": 2,
    "xielu.alpha_n": PerLayer((1.0,)), "xielu.alpha_p": PerLayer((1.0,)), "xielu.beta": PerLayer((1.0,)),
    "xielu.eps": PerLayer((1.0,)), "hrm.layers_per_stack": 2, "hrm.h_cycles": 1, "hrm.l_cycles": 1,
    "adapters.count": 2, "adapters.lora_rank": 8, "adapters.token_ids_activate": [1, 2],
    "adapters.token_ids_substitute": [1, 2], "target_layers": [0, 1, 2], "target_hidden_size": "embd",
    "features_length": "embd", "posnet.embedding_length": "embd", "posnet.block_count": 2,
    "convnext.embedding_length": "embd", "convnext.block_count": 2, "wkv.head_size": "head_dim",
    "time_mix_extra_dim": 8, "time_decay_extra_dim": 8, "token_shift_count": 2,
    "attention.decay_lora_rank": 8, "attention.iclr_lora_rank": 8, "attention.value_residual_mix_lora_rank": 8,
    "attention.gate_lora_rank": 8,
}  # fmt: skip
#: One after another, until llama.cpp makes a model of one.
TRIED: tuple[Keys, ...] = ({**_OTHERS, **_MAMBA}, {**_OTHERS, **_MLA}, {**_OTHERS, **_WINDOWS})
