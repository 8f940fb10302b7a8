"""The Llama configuration map: both dialects, defaults, RoPE kinds, and what is refused."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest

from specjax.models import families, llama, naming
from specjax.models.config import RopeConfig

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared"
BASE = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
GGUF = {
    "llama.vocab_size": 20,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def read(**changes):
    return llama.config_from_hf(BASE | changes)


def gguf(**changes):
    metadata = GGUF | {key.replace("__", "."): value for key, value in changes.items()}
    return llama.config_from_gguf(metadata, {"output.weight": lambda: np.zeros(())})


def test_dialects_agree():
    folders = sorted((SHARED / "parity").glob("*llama*"))
    if not folders:
        pytest.skip("the folder shared/ is not beside the repository")
    for folder in folders:
        old = llama.config_from_hf(json.loads((folder / "config.json").read_text()))
        new = llama.config_from_hf(json.loads((folder / "config_transformers5.json").read_text()))
        assert old == new
        assert old.head_dim == 16


def test_defaults():
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.tie_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3
    assert config.rope == RopeConfig(theta=10000.0)
    assert read(head_dim=None, num_key_value_heads=None, rope_scaling=None) == config
    assert read(num_key_value_heads=2, head_dim=16).head_dim == 16
    assert gguf() == config


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=500.0)),
        ({"type": "linear", "factor": 4}, RopeConfig(theta=500.0, kind="linear", factor=4.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeConfig(theta=500.0, kind="llama3", factor=8.0, original_max_position=16),
        ),
        (
            {"type": "llama3", **LLAMA3},
            RopeConfig(theta=500.0, kind="llama3", factor=8.0, original_max_position=16),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0},
            RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_max_position=64),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 1.5,
                "truncate": False,
            },
            RopeConfig(
                theta=500.0,
                kind="yarn",
                factor=4.0,
                original_max_position=32,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
    ],
)
def test_rope_kinds_in_both_dialects(scaling, rope):
    assert read(rope_theta=500.0, rope_scaling=scaling).rope == rope
    assert read(rope_parameters=scaling | {"rope_theta": 500.0}).rope == rope


def test_yarn_scales_give_the_attention_factor():
    scaling = {"rope_type": "yarn", "factor": 8.0, "mscale": 2.0, "mscale_all_dim": 0.5}
    wanted = (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1)
    assert read(rope_scaling=scaling).rope.attention_factor == pytest.approx(wanted)
    assert read(rope_scaling=scaling | {"mscale_all_dim": None}).rope.attention_factor is None


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    ],
)
def test_required_keys(key):
    with pytest.raises(ValueError, match=f"{key} is missing"):
        llama.config_from_hf({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize("key", sorted(GGUF))
def test_required_gguf_keys(key):
    with pytest.raises(ValueError, match=f"{key} is missing"):
        llama.config_from_gguf({k: v for k, v in GGUF.items() if k != key}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
        ({"residual_multiplier": 0.2}, "'residual_multiplier'"),
        ({"vocab_size": "20"}, "vocab_size is '20'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
        ({"hidden_size": 33}, "head_dim is missing"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "'beta'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high > low",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "two values"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_parameters",
        ),
    ],
)  # fmt: skip
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_bookkeeping_is_harmless():
    assert read(architectures=["X"], torch_dtype="bfloat16", pretraining_tp=2, use_cache=True) == (
        read(quantization_config=None, sliding_window=None, hidden_act="silu")
    )


def test_gguf_rope_and_sizes():
    linear = gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear.rope == RopeConfig(kind="linear", factor=4.0)
    yarn = gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=16,
    )
    assert yarn.rope == RopeConfig(kind="yarn", factor=4.0, original_max_position=16)
    metadata = {k: v for k, v in GGUF.items() if k != "llama.vocab_size"}
    tokens = {"tokenizer.ggml.tokens": ["a", "b"]}
    assert llama.config_from_gguf(metadata | tokens, {}).vocab_size == 2
    with pytest.raises(ValueError, match="attn_factor is 2"):
        gguf(llama__rope__scaling__attn_factor=2.0)


def test_every_parameter_has_a_name_and_a_shape():
    config = read(attention_bias=True, mlp_bias=True, num_key_value_heads=2)
    shapes = naming.parameters(config)
    stored = naming.sources(config, llama.FAMILY.hf)
    assert set(stored) == set(shapes) == set(naming.sources(config, llama.FAMILY.gguf))
    assert len(stored) == 3 + 2 * (2 + 14)
    assert stored["layers.1.attn.o.bias"].names == ("model.layers.1.self_attn.o_proj.bias",)
    assert stored["norm.scale"].names == ("model.norm.weight",)
    assert shapes["layers.0.attn.k.weight"] == (16, 32)
    assert shapes["layers.0.attn.k.bias"] == (16,)
    assert shapes["layers.1.mlp.down.weight"] == (32, 64)
    assert shapes["head.weight"] == (20, 32)
    assert "head.weight" not in naming.parameters(read(tie_word_embeddings=True))


def test_families():
    assert families.by_model_type("llama") is llama.FAMILY
    assert families.by_gguf_architecture("llama") is llama.FAMILY
    for find in (families.by_model_type, families.by_gguf_architecture):
        for name in ("rwkv", None, ["llama"]):
            with pytest.raises(ValueError, match=r"supported: .*llama"):
                find(name)
