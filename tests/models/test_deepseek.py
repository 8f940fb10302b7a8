"""DeepSeek-V3 against its equations in NumPy, for settings that the reference data do not have."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models import deepseek, naming
from specjax.models.rope import inverse_frequencies

HEADS, NOPE, ROPE, VALUE, RANK, STEPS = 3, 5, 6, 7, 9, 12
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 31,
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 64,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.7,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 16,
    },
}


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def feed_forward(x, get, name):
    gate, up = (x @ get(f"{name}.{part}_proj.weight").T for part in ("gate", "up"))
    return (gate * sigmoid(gate) * up) @ get(f"{name}.down_proj.weight").T


def experts(x, get):
    out = feed_forward(x, get, "mlp.shared_experts")
    scores = sigmoid(x @ get("mlp.gate.weight").T)
    choice = scores + get("mlp.gate.e_score_correction_bias")
    for t, row in enumerate(choice):
        worth = np.sort(row.reshape(3, 2), axis=1).sum(axis=1)
        allowed = np.repeat(np.isin(np.arange(3), np.argsort(-worth)[:2]), 2)
        for expert in np.argsort(-np.where(allowed, row, -np.inf))[:3]:
            part = feed_forward(x[t : t + 1], get, f"mlp.experts.{expert}")[0]
            out[t] += 1.7 * scores[t, expert] * part
    return out


def turn(x, angles, factor):
    """Neighbours are the real and the imaginary part: `x [T, R]` or `[T, H, R]`."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles) * factor
    out = np.empty(x.shape)
    out[..., 0::2], out[..., 1::2] = z.real, z.imag
    return out


def attention(x, get):
    inv_freq, factor = inverse_frequencies(deepseek.DEEPSEEK_V3.config_from_hf(CONFIG).rope, ROPE)
    angles = np.arange(STEPS)[:, None] * inv_freq
    query = (x @ get("self_attn.q_proj.weight").T).reshape(STEPS, HEADS, NOPE + ROPE)
    compressed = x @ get("self_attn.kv_a_proj_with_mqa.weight").T
    latent = rms(compressed[:, :RANK], get("self_attn.kv_a_layernorm.weight"), 1e-6)
    up = (latent @ get("self_attn.kv_b_proj.weight").T).reshape(STEPS, HEADS, NOPE + VALUE)
    shared = turn(compressed[:, RANK:], angles, factor)[:, None].repeat(HEADS, axis=1)
    key = np.concatenate([up[..., :NOPE], shared], axis=-1)
    turned = turn(query[..., NOPE:], angles[:, None], factor)
    query = np.concatenate([query[..., :NOPE], turned], axis=-1)
    scale = (NOPE + ROPE) ** -0.5 * (0.13 * math.log(4.0) + 1) ** 2
    scores = np.einsum("thd,shd->hts", query, key) * scale
    scores = np.where(np.tri(STEPS, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hts,shd->thd", weights, up[..., NOPE:])
    return out.reshape(STEPS, -1) @ get("self_attn.o_proj.weight").T


def logits(tensors, tokens):
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(2):
        get = lambda name, layer=layer: tensors[f"model.layers.{layer}.{name}"]
        x = x + attention(rms(x, get("input_layernorm.weight"), 1e-3), get)
        y = rms(x, get("post_attention_layernorm.weight"), 1e-3)
        x = x + (experts(y, get) if layer else feed_forward(y, get, "mlp"))
    return rms(x, tensors["model.norm.weight"], 1e-3) @ tensors["lm_head.weight"].T


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("deepseek")
    rng = np.random.default_rng(0)
    family = deepseek.DEEPSEEK_V3
    tensors = {
        name: rng.normal(0, 0.4, source.shape).astype(np.float32)
        for source in naming.sources(family.config_from_hf(CONFIG), family.hf).values()
        for name in source.names
    }
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def test_logits_without_compressed_queries_and_with_scaled_scores(checkpoint):
    folder, tensors = checkpoint
    params = specjax.load(folder, dtype="float32")
    tokens = np.random.default_rng(1).integers(0, 31, STEPS)

    @jax.jit
    def run(weights):
        model = params.model
        positions = jnp.arange(STEPS)[None, :]
        mask = jnp.tril(jnp.ones((1, STEPS, STEPS), bool))
        empty = model.init_cache(weights, 1, 1)
        return model.unembed(
            weights, model.forward(weights, tokens[None], positions, empty, mask).hidden
        )

    wanted = logits({name: t.astype(np.float64) for name, t in tensors.items()}, tokens)
    np.testing.assert_allclose(run(params.target)[0], wanted, atol=2e-4, rtol=2e-4)
