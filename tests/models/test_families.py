"""What each family reads from a config.json, what it refuses, and how its tensors are split."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specjax import checkpoints
from specjax.models import families, naming
from specjax.models.config import RopeConfig

COMMON = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 5}
BASES = {
    "mistral": COMMON,
    "mixtral": COMMON | {"num_experts_per_tok": 2, "num_local_experts": 5},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 6},
    "qwen3_moe": COMMON | EXPERTS,
    "gemma2": COMMON | {"head_dim": 10, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": COMMON | {"head_dim": 10, "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3": {
        "text_config": COMMON | {"head_dim": 10, "sliding_window": 8},
        "vision_config": {"anything": 1},
        "image_token_index": 3,
    },
    "deepseek_v3": COMMON
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
    "gpt2": {"vocab_size": 20, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16},
    "gpt_neox": {
        "vocab_size": 20,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rotary_pct": 0.5,
    },
}


# A missing key means what the class of the family in transformers has for it.
KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "gemma2": 4,
            "gemma3_text": 4}  # fmt: skip
MAX_POSITION = {"mistral": 131072, "mixtral": 131072, "qwen2": 32768, "qwen3": 32768,
                "qwen3_moe": 32768, "gemma2": 8192, "gemma3_text": 131072,
                "deepseek_v3": 4096}  # fmt: skip
HEAD_DIM = {"mistral": 16, "mixtral": 16, "qwen2": 16, "qwen3": 128, "qwen3_moe": 16,
            "gemma2": 256, "gemma3_text": 256}  # fmt: skip


def without(model_type, *keys, **changes):
    config = {k: v for k, v in (BASES[model_type] | changes).items() if k not in keys}
    return families.by_model_type(model_type).config_from_hf(config)


def read(model_type, **changes):
    base = BASES[model_type]
    if model_type == "gemma3":
        base = base | {"text_config": base["text_config"] | changes.pop("text", {})}
    return families.by_model_type(model_type).config_from_hf(base | changes)


SLIDES = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
TYPES = ["full_attention", "sliding_attention"] * 2
YARN = {"type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0}


@pytest.mark.parametrize(
    ("model_type", "changes", "fields"),
    [
        ("mistral", {}, {"windows": (4096,) * 4, "tie_embeddings": False}),
        ("mistral", {"sliding_window": 8}, {"windows": (8,) * 4}),
        ("mistral", {"sliding_window": None}, {"windows": ()}),
        ("mixtral", {}, {"windows": (), "rope": RopeConfig(theta=1e6), "expert_layers": ()}),
        ("mixtral", {"rope_parameters": {"rope_theta": 5.0}}, {"rope": RopeConfig(theta=5.0)}),
        ("qwen2", {}, {"attention_bias": True, "output_bias": False, "windows": ()}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, {"windows": ()}),
        ("qwen2", SLIDES, {"windows": (None, None, None, 8)}),
        ("qwen3", {}, {"qk_norm": True, "attention_bias": False, "head_dim": 6}),
        ("qwen3", {"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ("qwen3", SLIDES | {"layer_types": TYPES}, {"windows": (None, 8, None, 8)}),
        ("qwen3_moe", {}, {"expert_layers": (), "qk_norm": True}),
        ("qwen3_moe", SLIDES, {"windows": (8,) * 4}),
        ("qwen3_moe", {"mlp_only_layers": [2]}, {"expert_layers": (True, True, False, True)}),
        ("qwen3_moe", {"decoder_sparse_step": 2}, {"expert_layers": (False, True) * 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, {"experts": None}),
        (
            "gemma2",
            {},
            {
                "windows": (8, None, 8, None),
                "query_scale": 0.25,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "tie_embeddings": True,
                "embed_scale": math.sqrt(32),
                "activation": "gelu_tanh",
                "local_rope": None,
            },
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": 7, "layer_types": TYPES},
            {
                "attention_softcap": None,
                "logit_softcap": 7.0,
                "windows": (None, 8, None, 8),
            },
        ),
        ("gemma2", {"tie_word_embeddings": False}, {"tie_embeddings": False}),
        (
            "gemma3_text",
            {},
            {
                "windows": (8, 8, None, 8),
                "query_scale": 1 / 16,
                "attention_softcap": None,
                "logit_softcap": None,
                "rope": RopeConfig(theta=1e6),
                "local_rope": RopeConfig(theta=1e4),
            },
        ),
        (
            "gemma3_text",
            {
                "rope_theta": 500.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 50.0,
            },
            {
                "rope": RopeConfig(theta=500.0, kind="linear", factor=8.0),
                "local_rope": RopeConfig(theta=50.0),
            },
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
            {
                "rope": RopeConfig(theta=500.0, kind="linear", factor=8.0),
                "local_rope": RopeConfig(theta=50.0),
            },
        ),
        ("gemma3", {}, {"windows": (8, 8, 8, 8), "head_dim": 10}),
        (
            "gemma3",
            {"text": {"sliding_window_pattern": 2}},
            {"windows": (8, None, 8, None), "qk_norm": True},
        ),
        ("deepseek_v3", {}, {"expert_layers": (False, True, True, True), "query_scale": None}),
        ("deepseek_v3", {"first_k_dense_replace": 0}, {"expert_layers": ()}),
        ("deepseek_v3", {"first_k_dense_replace": 4}, {"experts": None, "expert_layers": ()}),
        (
            "deepseek_v3",
            {"rope_scaling": YARN},
            {"query_scale": 10**-0.5 * (0.2 * math.log(4) + 1) ** 2},
        ),
        (
            "deepseek_v3",
            {
                "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
                "aux_loss_alpha": 0.001,
                "seq_aux": True,
            },
            {"output_bias": False},
        ),
        ("gpt2", {}, {"intermediate_size": 128, "rope": None, "tie_embeddings": True}),
        ("gpt2", {"n_inner": 40, "scale_attn_weights": False}, {"query_scale": 1.0}),
        ("gpt2", {"tie_word_embeddings": False}, {"tie_embeddings": False, "max_position": 16}),
        ("gpt_neox", {}, {"rotary_dim": 4, "parallel": True, "attention_bias": True}),
        ("gpt_neox", {"rotary_pct": 1.0}, {"rotary_dim": None}),
        (
            "gpt_neox",
            {"rotary_pct": None, "rope_parameters": {"partial_rotary_factor": 0.25}},
            {"rotary_dim": 2},
        ),
        ("gpt_neox", {"rotary_emb_base": 77}, {"rope": RopeConfig(theta=77.0)}),
        (
            "gpt_neox",
            {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
            {"parallel": False, "output_bias": False, "activation": "gelu_tanh"},
        ),
    ],
)
def test_read(model_type, changes, fields):
    config = read(model_type, **changes)
    for name, wanted in fields.items():
        value = getattr(config, name)
        assert value == (pytest.approx(wanted) if isinstance(wanted, float) else wanted)


@pytest.mark.parametrize("model_type", KV_HEADS)
def test_missing_sizes_are_those_of_the_family(model_type):
    wide = {"num_attention_heads": 32, "hidden_size": 512}
    config = without(
        model_type, "num_key_value_heads", "head_dim", "max_position_embeddings", **wide
    )
    assert config.num_kv_heads == KV_HEADS[model_type]
    assert config.head_dim == HEAD_DIM[model_type]
    assert config.max_position == MAX_POSITION[model_type]
    assert config.tie_embeddings == model_type.startswith("gemma")
    theta = 1e6 if model_type in ("mixtral", "gemma3_text") else 1e4
    assert config.rope == RopeConfig(theta=theta)


def test_null_is_not_a_missing_key():
    for model_type in ("mistral", "mixtral", "qwen2", "qwen3"):
        assert read(model_type, num_key_value_heads=None).num_kv_heads == 4
    for gemma in ("gemma2", "gemma3_text"):
        assert without(gemma, "rms_norm_eps").norm_eps == 1e-6
        with pytest.raises(ValueError, match="rms_norm_eps is missing"):
            read(gemma, rms_norm_eps=None)


def test_missing_keys_of_deepseek():
    config = without("deepseek_v3", "q_lora_rank", "max_position_embeddings")
    assert config.latent.query_rank == 1536
    assert config.max_position == MAX_POSITION["deepseek_v3"]
    assert read("deepseek_v3", q_lora_rank=None).latent.query_rank is None


def test_missing_flags_of_experts():
    assert not read("qwen3_moe").experts.normalise
    assert read("qwen3_moe", norm_topk_prob=True).experts.normalise
    assert read("mixtral").experts.normalise
    assert read("deepseek_v3").experts.normalise


def gguf(architecture, layers=2, **changes):
    family = families.by_gguf_architecture(architecture)
    sizes = {
        "vocab_size": 20,
        "embedding_length": 40,
        "feed_forward_length": 24,
        "block_count": layers,
        "attention.head_count": 4,
        "attention.key_length": 6,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 64,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return family.config_from_gguf({f"{architecture}.{k}": v for k, v in sizes.items()}, {})


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_in_a_gguf_file_of_gemma(architecture, largest):
    """By the head size, but in the 27B releases by the width a head."""
    window = {"attention__sliding_window": 8}
    for layers in (26, 34, 42, 48):
        assert gguf(architecture, layers, **window).query_scale == pytest.approx(6**-0.5)
    assert gguf(architecture, largest, **window).query_scale == pytest.approx(10**-0.5)


def test_caps_in_a_gguf_file_of_gemma():
    window = {"attention__sliding_window": 8}
    config = gguf("gemma2", **window)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    config = gguf("gemma2", **window, attn_logit_softcapping=5.0, final_logit_softcapping=7.0)
    assert (config.attention_softcap, config.logit_softcap) == (5.0, 7.0)
    config = gguf("gemma3", **window)
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    with pytest.raises(ValueError, match=r"gemma2\.rope\.freq_base_swa"):
        gguf("gemma2", **window, rope__freq_base_swa=100.0)
    assert gguf("gemma3", **window, rope__freq_base_swa=9.0).local_rope == RopeConfig(theta=9.0)


def test_a_factor_alone_in_a_gguf_file_is_linear():
    wanted = RopeConfig(kind="linear", factor=4.0)
    assert gguf("qwen3", rope__scaling__factor=4.0).rope == wanted
    off = gguf("qwen3", rope__scaling__factor=4.0, rope__scaling__type="none")
    assert off.rope == RopeConfig()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"layer_types": TYPES}, "layer_types"),
        ("mixtral", {"attention_bias": True}, "attention_bias is True"),
        ("mixtral", {"num_experts_per_tok": 6}, "5 experts"),
        ("qwen2", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("qwen2", {"layer_types": TYPES}, "sets no window"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_moe", {"num_local_experts": 7}, "num_local_experts is 7"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "odd": {}}}, "'odd'"),
        ("gemma3", {"text_config": None}, "text_config is None"),
        ("gemma3", {"audio_config": {}}, "audio_config"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek_v3", {"n_group": 4}, "6 experts in 4 groups"),
        ("deepseek_v3", {"auto_map": {"AutoModel": "other.Model"}}, "auto_map"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"n_head": 5}, "no multiple of 5 heads"),
        ("gpt_neox", {"partial_rotary_factor": 0.25}, "rotary_pct or partial_rotary_factor"),
        ("gpt_neox", {"rotary_pct": 0.375}, "3 are rotated"),
        ("gpt_neox", {"rotary_emb_base": 5, "rope_theta": 6}, "rotary_emb_base"),
    ],
)
def test_refused(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        read(model_type, **changes)


@pytest.mark.parametrize("model_type", BASES)
def test_an_unknown_key_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match="'residual_multiplier'"):
        read(model_type, residual_multiplier=2.0)


def write(folder, config, tensors):
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()},
              folder / "model.safetensors")  # fmt: skip


def stored(model_type, **changes):
    """Random tensors under the names, and in the shapes, of a checkpoint; and its config.json."""
    rng = np.random.default_rng(0)
    found = naming.sources(read(model_type, **changes), families.by_model_type(model_type).hf)
    tensors = {
        name: rng.standard_normal(source.shape).astype(np.float32)
        for source in found.values()
        for name in source.names
    }
    return BASES[model_type] | changes | {"model_type": model_type}, tensors


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [(name, {}) for name in BASES]
    + [
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": None}),
        ("deepseek_v3", {"attention_bias": True}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ],
)
def test_all_tensors_are_read_in_the_shapes_of_the_model(tmp_path, model_type, changes):
    write(tmp_path, *stored(model_type, **changes))
    checkpoint = checkpoints.read(tmp_path)
    wanted = naming.parameters(checkpoint.config)
    assert {path: load().shape for path, load in checkpoint.weights.items()} == wanted


def test_experts_are_stacked_in_their_order(tmp_path):
    config, tensors = stored("mixtral")
    write(tmp_path, config, tensors)
    up = checkpoints.read(tmp_path).weights["layers.2.mlp.up"]()
    for expert in range(5):
        name = f"model.layers.2.block_sparse_moe.experts.{expert}.w3.weight"
        np.testing.assert_array_equal(up[expert], tensors[name])


def test_the_bias_of_the_choice_keeps_its_precision(tmp_path):
    config, tensors = stored("deepseek_v3")
    write(tmp_path, config, tensors)
    weights = checkpoints.read(tmp_path, dtype=np.float16).weights
    assert weights["layers.1.mlp.router.weight"]().dtype == np.float16
    bias = weights["layers.1.mlp.choice_bias"]()
    assert bias.dtype == np.float32
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(bias, tensors[name])


def test_modules_for_further_tokens_are_left_alone(tmp_path):
    config, tensors = stored("deepseek_v3")
    tensors["model.layers.4.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    write(tmp_path, config | {"num_nextn_predict_layers": 1}, tensors)
    checkpoints.read(tmp_path)
    tensors["model.layers.3.eh_proj.weight"] = tensors.pop("model.layers.4.eh_proj.weight")
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.eh_proj\.weight is not expected"):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_a_checkpoint_that_can_also_see(tmp_path, prefix):
    config, tensors = stored("gemma3")
    embedding = tensors["model.embed_tokens.weight"]
    tensors = {name.replace("model.", prefix, 1): array for name, array in tensors.items()}
    tensors["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    tensors["multi_modal_projector.weight"] = np.zeros(3, np.float32)
    write(tmp_path, config, tensors)
    read = checkpoints.read(tmp_path).weights["embed.weight"]()
    np.testing.assert_array_equal(read, embedding)


def test_gpt2_without_a_prefix_and_with_masks(tmp_path):
    config, tensors = stored("gpt2")
    tensors = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    tensors["h.0.attn.bias"] = np.zeros((1, 1, 16, 16), np.uint8)
    write(tmp_path, config, tensors)
    weights = checkpoints.read(tmp_path).weights
    fused = tensors["h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(weights["layers.1.attn.k.weight"](), fused[:, 32:64].T)
    tensors["transformer.wte.weight"] = tensors["wte.weight"]
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="two names of one"):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "wanted"),
    [
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (96, 32), r"\(32, 96\)"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", (95,), r"\(96,\)"),
        ("qwen3_moe", "model.layers.3.mlp.experts.4.up_proj.weight", (12, 31), r"\(12, 32\)"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", (8, 44), r"\(44, 8\)"),
    ],
)
def test_a_wrong_shape_is_told_as_stored(tmp_path, model_type, name, shape, wanted):
    config, tensors = stored(model_type)
    assert name in tensors
    write(tmp_path, config, tensors | {name: np.zeros(shape, np.float32)})
    with pytest.raises(ValueError) as error:  # noqa: PT011
        checkpoints.read(tmp_path)
    text = str(error.value)
    for word in ("model.safetensors", name, str(shape), wanted.replace("\\", "")):
        assert word in text


def test_pairs_become_halves():
    rows = np.arange(16)
    halves = naming.split_pairs(rows, heads=2, start=2)
    assert halves.tolist() == [0, 1, 2, 4, 6, 3, 5, 7, 8, 9, 10, 12, 14, 11, 13, 15]
