"""GGUF files: values, the order of rows, and damaged files."""

from __future__ import annotations

import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints
from specjax.checkpoints.gguf_file import read_gguf

Q = gguf.GGMLQuantizationType


def test_round_trip_undoes_the_permutation(write_gguf, parameters):
    checkpoint = checkpoints.read(write_gguf())
    assert checkpoint.name == "tiny"
    assert checkpoint.tokenizer is None
    assert (checkpoint.eos_ids, checkpoint.pad_id) == ((), 0)
    assert set(checkpoint.weights) == set(parameters)
    for path, array in parameters.items():
        read = checkpoint.weights[path]()
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, array, err_msg=path)


def test_config_equals_the_one_of_hugging_face(write_gguf, write_folder):
    assert checkpoints.read(write_gguf()).config == checkpoints.read(write_folder()).config


@pytest.mark.parametrize(
    ("kind", "error"), [(Q.F16, 2e-3), (Q.BF16, 2e-2), (Q.Q8_0, 2e-2), (Q.Q4_0, 0.5), (Q.Q4_1, 0.3)]
)
def test_quantised_types(write_gguf, parameters, kind, error):
    checkpoint = checkpoints.read(write_gguf(quantise=kind))
    for path, array in parameters.items():
        np.testing.assert_allclose(checkpoint.weights[path](), array, atol=error, err_msg=path)


def test_dtype_is_cast(write_gguf, parameters):
    read = checkpoints.read(write_gguf(), dtype=jnp.bfloat16).weights["norm.scale"]()
    np.testing.assert_array_equal(read, parameters["norm.scale"].astype(jnp.bfloat16))


def test_tied_when_there_is_no_head(write_gguf):
    checkpoint = checkpoints.read(write_gguf(edit=lambda tensors: tensors.pop("output.weight")))
    assert checkpoint.config.tie_embeddings
    assert "head.weight" not in checkpoint.weights


def test_biases_show_by_their_names_and_are_permuted(write_gguf):
    sizes = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32,
             "ffn_gate": 64, "ffn_up": 64, "ffn_down": 32}  # fmt: skip

    def edit(tensors):
        for layer in range(2):
            for name, size in sizes.items():
                tensors[f"blk.{layer}.{name}.bias"] = np.arange(size, dtype=np.float32)

    checkpoint = checkpoints.read(write_gguf(edit=edit))
    assert checkpoint.config.attention_bias
    assert checkpoint.config.mlp_bias
    # Head size 8: stored rows 0 1 2 3 ... are halves interleaved.
    first_head = checkpoint.weights["layers.1.attn.q.bias"]()[:8]
    np.testing.assert_array_equal(first_head, [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(checkpoint.weights["layers.1.attn.v.bias"](), np.arange(16))


def test_scaling_factors_are_recognised_or_refused(write_gguf):
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
    factors = []
    for length in wavelength:
        ramp = (8192 / length - 1) / 3
        factors.append(32.0 if ramp < 0 else 1.0 if ramp > 1 else 1 / ((1 - ramp) / 32 + ramp))
    base = [("add_rope_freq_base", 500000.0)]

    def add(tensors):
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)

    def add_other(tensors):
        tensors["rope_freqs.weight"] = np.array([1, 2, 3, 4], np.float32)

    rope = checkpoints.read(write_gguf(edit=add, metadata=base)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        checkpoints.read(write_gguf(edit=add_other, metadata=base, name="other.gguf"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("blk.1.attn_q.weight"),
            r"tiny\.gguf: .*blk\.1\.attn_q\.weight is missing",
        ),
        (lambda t: t.update(odd=np.zeros(4, np.float32)), r"the tensor odd is not expected"),
        (
            lambda t: t.update({"output_norm.weight": np.zeros(31, np.float32)}),
            r"output_norm\.weight has the shape \(31,\).* wants \(32,\)",
        ),
        (
            lambda t: t.update({"rope_factors_long.weight": np.ones(4, np.float32)}),
            r"rope_factors_long\.weight is not expected",
        ),
    ],
)
def test_tensors_that_do_not_fit(write_gguf, edit, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.read(write_gguf(edit=edit))


def test_every_truncation_is_an_error_that_names_the_file(write_gguf, tmp_path):
    whole = write_gguf().read_bytes()
    short = tmp_path / "short.gguf"
    for length in [*range(0, 1200, 7), len(whole) // 2, len(whole) - 1]:
        short.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"short\.gguf"):
            checkpoints.read(short)


def test_damaged_bytes_never_escape_as_another_error(write_gguf, tmp_path):
    whole = bytearray(write_gguf().read_bytes())
    damaged, named = tmp_path / "damaged.gguf", []
    for at in range(4, 1200, 11):
        copy = whole.copy()
        copy[at] ^= 0xFF
        damaged.write_bytes(copy)
        # Some bytes only change a name or a number that nobody reads: no error then.
        try:
            checkpoints.read(damaged)
        except ValueError as error:
            named.append("damaged.gguf" in str(error))
    assert named
    assert all(named)


def test_not_a_gguf_file(tmp_path):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"PK" * 100)
    with pytest.raises(ValueError, match="not a GGUF file"):
        checkpoints.read(file)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_gguf(tmp_path / "none.gguf")


def test_version_is_checked(write_gguf):
    path = write_gguf()
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 1)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="GGUF version 1"):
        checkpoints.read(path)


def test_unsupported_storage_type(write_gguf):
    def edit(tensors):
        tensors["output_norm.weight"] = np.zeros(32, np.int32)

    with pytest.raises(ValueError, match=r"output_norm\.weight has the storage type I32"):
        checkpoints.read(write_gguf(edit=edit))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("add_uint32", "llama.expert_count", 8)], r"llama\.expert_count"),
        (
            [("add_uint32", "llama.attention.sliding_window", 8)],
            r"llama\.attention\.sliding_window",
        ),
        ([("add_uint32", "llama.rope.dimension_count", 4)], r"llama\.rope\.dimension_count is 4"),
        ([("add_string", "llama.rope.scaling.type", "longrope")], "longrope"),
        ([("add_uint16", "split.count", 2)], r"split\.count"),
        ([("add_string", "tokenizer.ggml.model", "t5")], r"tokenizer\.ggml\.model is 't5'"),
    ],
)
def test_metadata_that_is_not_supported(write_gguf, metadata, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.read(write_gguf(metadata=metadata))


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"other\.gguf: general\.architecture is 'rwkv7'.*llama"):
        checkpoints.read(tmp_path / "other.gguf")


def test_smollm2(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert config.rope.theta == 100000.0
    assert config.norm_eps == 1e-5
    assert config.tie_embeddings
    assert (smollm2.name, smollm2.eos_ids, smollm2.pad_id) == ("smollm2-135m", (2,), 2)
    assert smollm2.weights["layers.29.mlp.down.weight"]().shape == (576, 1536)
