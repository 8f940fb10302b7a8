"""GGUF files of each architecture, written with the gguf package's own names for tensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from specjax import checkpoints
from specjax.checkpoints.gguf_file import read_gguf
from specjax.models import families, naming
from specjax.models.config import RopeConfig

Q = gguf.GGMLQuantizationType
LAYERS = 3
COMMON = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 5e5,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 10}
CASES = {
    "qwen2": (COMMON, gguf.MODEL_ARCH.QWEN2),
    "qwen3": (COMMON | {"tie_word_embeddings": True}, gguf.MODEL_ARCH.QWEN3),
    "gemma2": (COMMON | GEMMA, gguf.MODEL_ARCH.GEMMA2),
    "gemma3": (COMMON | GEMMA | {"sliding_window_pattern": 2}, gguf.MODEL_ARCH.GEMMA3),
}


def hf_family(architecture):
    return families.by_model_type({"gemma3": "gemma3_text"}.get(architecture, architecture))


def write(path, architecture, **extra):
    """A file as llama.cpp's converter writes it; and the tensors of the Hugging Face checkpoint."""
    config, arch = CASES[architecture]
    family = hf_family(architecture)
    rng = np.random.default_rng(0)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    for key, value in extra.items():
        writer.add_key_value(f"{architecture}.{key}", *value)
    parameters = {}
    for parameter, source in naming.sources(family.config_from_hf(config), family.hf).items():
        (name,) = source.names
        array = rng.standard_normal(source.shape).astype(np.float32)
        parameters[parameter] = array
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


@pytest.mark.parametrize("architecture", CASES)
def test_a_file_says_what_the_folder_says(tmp_path, architecture):
    path = tmp_path / "tiny.gguf"
    parameters = write(path, architecture)
    checkpoint = checkpoints.read(path)
    assert checkpoint.config == hf_family(architecture).config_from_hf(CASES[architecture][0])
    assert set(checkpoint.weights) == set(parameters)
    for name, array in parameters.items():
        np.testing.assert_allclose(checkpoint.weights[name](), array, atol=1e-6, err_msg=name)


UINT, FLOAT, STRING = (gguf.GGUFValueType[name] for name in ("UINT32", "FLOAT32", "STRING"))


@pytest.mark.parametrize("architecture", CASES)
def test_keys_that_are_not_known_are_refused(tmp_path, architecture):
    write(tmp_path / "tiny.gguf", architecture, **{"attention.odd": (1, UINT)})
    with pytest.raises(ValueError, match=rf"{architecture}\.attention\.odd"):
        checkpoints.read(tmp_path / "tiny.gguf")


def test_settings_that_llama_cpp_knows_by_itself():
    def read(architecture, **changes):
        metadata = {
            "block_count": 12,
            "context_length": 64,
            "embedding_length": 48,
            "feed_forward_length": 24,
            "attention.head_count": 4,
            "attention.key_length": 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": 8,
            "vocab_size": 20,
        } | changes
        named = {f"{architecture}.{key}": value for key, value in metadata.items()}
        return families.by_gguf_architecture(architecture).config_from_gguf(named, {})

    small, large = read("gemma2"), read("gemma2", block_count=46)
    assert small.windows == (8, None) * 6
    assert (small.query_scale, large.query_scale) == (16**-0.5, 12**-0.5)
    small, large = read("gemma3"), read("gemma3", block_count=62)
    assert small.windows == (8, 8, 8, 8, 8, None) * 2
    assert (small.query_scale, large.query_scale) == (16**-0.5, 12**-0.5)
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    scaled = read("gemma3", **scaling)
    assert scaled.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert scaled.local_rope == RopeConfig(theta=1e4)
    assert scaled.tie_embeddings


# --- storage types ---------------------------------------------------------------------------

# Blocks of 256 values that the gguf package can decode but not write, made here bit by bit.


def half(value: float) -> np.ndarray:
    return np.array([value], np.float16).view(np.uint8)


def packed_scales(scales, offsets) -> np.ndarray:
    """Eight scales and eight offsets of six bits in twelve bytes."""
    out = np.zeros(12, np.uint8)
    for j in range(4):
        out[j] = scales[j] | (scales[j + 4] >> 4) << 6
        out[j + 4] = offsets[j] | (offsets[j + 4] >> 4) << 6
        out[j + 8] = (scales[j + 4] & 15) | (offsets[j + 4] & 15) << 4
    return out


def block_of_4_or_5_bits(rng, bits: int) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 1 << bits, (8, 32))
    scales, offsets = rng.integers(0, 64, (2, 8))
    low, high = np.zeros((4, 32), np.uint8), np.zeros(32, np.uint8)
    for j in range(8):  # 32 values each; two share the bytes
        low[j // 2] |= ((codes[j] & 15) << 4 * (j % 2)).astype(np.uint8)
        high |= (codes[j] >> 4 << j).astype(np.uint8)
    parts = [half(0.25), half(0.5), packed_scales(scales, offsets)]
    parts += [high] * (bits == 5) + [low.reshape(-1)]
    values = 0.25 * scales[:, None] * codes - 0.5 * offsets[:, None]
    return np.concatenate(parts), values.reshape(-1)


def block_of_6_bits(rng) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 64, (2, 4, 32))
    scales = rng.integers(-128, 128, 16).astype(np.int8)
    low, high = np.zeros((2, 2, 32), np.uint8), np.zeros((2, 32), np.uint8)
    for i in range(2):
        for j in range(4):
            low[i, j % 2] |= ((codes[i, j] & 15) << 4 * (j // 2)).astype(np.uint8)
            high[i] |= (codes[i, j] >> 4 << 2 * j).astype(np.uint8)
    raw = [low.reshape(-1), high.reshape(-1), scales.view(np.uint8), half(0.25)]
    values = 0.25 * scales.astype(float)[:, None] * (codes.reshape(16, 16) - 32)
    return np.concatenate(raw), values.reshape(-1)


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        (Q.Q4_K, lambda rng: block_of_4_or_5_bits(rng, 4)),
        (Q.Q5_K, lambda rng: block_of_4_or_5_bits(rng, 5)),
        (Q.Q6_K, block_of_6_bits),
    ],
)
def test_blocks_of_256(tmp_path, kind, block):
    rng = np.random.default_rng(0)
    blocks = [block(rng) for _ in range(6)]
    raw = np.concatenate([raw for raw, _ in blocks]).reshape(3, -1)
    values = np.concatenate([values for _, values in blocks]).reshape(3, 512)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "none")
    writer.add_tensor("a", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "a.gguf").tensors["a"]
    assert (tensor.shape, tensor.kind) == ((3, 512), kind.name)
    np.testing.assert_allclose(tensor.read(), values, rtol=1e-6)
