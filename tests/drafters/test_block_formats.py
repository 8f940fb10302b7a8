"""Configurations of DFlash and DSpark checkpoints: what they mean, and what is refused."""

import copy
import json

import pytest

import specjax
from specjax.checkpoints.safetensors_folder import read_folder
from tests.drafters import block_folders as folders


@pytest.fixture(scope="module")
def target(shared):
    return specjax.checkpoints.read(shared / "parity" / "target-qwen3-deep").config


def config_of(shared, name, changes):
    """A folder's configuration, changed: dots lead into objects, ... removes a key."""
    config = json.loads((shared / "parity" / name / "config.json").read_text())
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        if value is ...:
            node.pop(last)
        else:
            node[last] = value
    return config


def read(shared, name, target, changes, drop=(), extra=None):
    config = config_of(shared, name, changes)
    return folders.understood(shared / "parity" / name, target, config, drop, extra)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"vocab_size": 161}, "vocab_size is 161"),
        ("dflash", {"hidden_size": 32, "head_dim": 16}, "hidden_size is 32"),
        ("dflash", {"num_target_layers": 7}, "num_target_layers is 7"),
        ("dflash", {"dflash_config.target_layer_ids": [1, 6]}, "names the layer 6"),
        ("dflash", {"dflash_config.target_layer_ids": [1, "3"]}, "wanted a list"),
        ("dflash", {"dflash_config.projector": "deep"}, "projector"),
        ("dflash", {"dflash_config.mask_token_id": 160}, "mask_token_id is 160"),
        ("dflash", {"dflash_config.mask_token_id": ...}, "mask_token_id is None"),
        ("dflash", {"block_size": 1}, "block_size is 1"),
        ("dflash", {"block_size": ...}, "block_size is missing"),
        ("dflash", {"model_type": "llama"}, "model_type is 'llama'"),
        ("dflash", {"markov_rank": 12}, "'markov_rank'"),
        ("dflash", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ("dspark-gated", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ("dspark-gated", {"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ("dspark-gated", {"target_layer_ids": ...}, "target_layer_ids is None"),
        ("dspark-gated", {"target_layer_ids": [-2]}, "names the layer -2"),
        ("dspark-gated", {"enable_confidence_head": 1}, "enable_confidence_head is 1"),
        ("dspark-gated", {"markov_rank": 0, "confidence_head_with_markov": True}, "markov_rank"),
        (
            "dspark-gated",
            {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True},
            "layer_types",
        ),
        ("spec-dflash", {"topk_context": 64}, "'topk_context'"),
        ("spec-dflash", {"markov_rank": 4}, "'markov_rank'"),
        ("spec-dflash", {"target_hidden_size": 128}, "hidden_size is 128"),
        ("spec-dflash", {"transformer_layer_config": None}, "transformer_layer_config is None"),
        ("spec-dflash", {"transformer_layer_config.model_type": "llama"}, "model_type is 'llama'"),
        ("spec-dflash", {"transformer_layer_config.new_key": 1}, "'new_key'"),
        ("spec-dflash", {"aux_hidden_state_layer_ids": [7]}, "names the layer 7"),
        ("spec-dspark", {"draft_vocab_size": ...}, "draft_vocab_size is missing"),
    ],
)
def test_refused(shared, target, name, changes, message):
    with pytest.raises(ValueError, match=message):
        read(shared, name, target, changes)


def test_a_smaller_vocabulary_needs_its_offsets(shared, target):
    with pytest.raises(ValueError, match="d2t"):
        read(shared, "spec-dflash", target, {}, drop=("d2t",))


def test_defaults_of_the_oldest_files(shared, target):
    """Layers of the target that no key names: evenly spaced, or the middle one."""
    _, found = read(shared, "dflash", target, {"dflash_config.target_layer_ids": ...})
    assert found.config.features == (2, 4)
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    _, found = read(shared, "dflash", target, one | {"dflash_config.target_layer_ids": ...})
    assert found.config.features == (4,)


def test_newer_files_of_zlab(shared, target):
    """The block's size with the other keys, RoPE as in transformers 5, layers said to slide."""
    kind, found = read(shared, "dflash", target, {})
    changes = {
        "block_size": ...,
        "dflash_config.block_size": 8,
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }
    same_kind, same = read(shared, "dflash", target, changes)
    assert (same_kind.name, same.config) == (kind.name, found.config)
    assert (kind.method, found.config.block_size, found.config.from_anchor) == ("dflash", 8, False)


def test_dflash_as_deepspec_writes_it(shared, target):
    """DSpark's layout without its heads: all slots draft."""
    changes = {"markov_rank": 0, "enable_confidence_head": False}
    changes |= {"markov_head_type": ..., "confidence_head_with_markov": ...}
    kind, found = read(shared, "dspark-gated", target, changes)
    assert kind.method == "dflash"
    assert found.config.from_anchor
    assert found.config.own_embedding
    assert not any("markov" in name or "confidence" in name for name in found.sources)
    _, found = read(shared, "dspark-gated", target, {"target_layer_ids": [-1, 5]})
    assert found.config.features == (0, 6)


def test_speculators_files_of_other_releases(shared, target):
    """Tables that are the target's may be stored or not."""
    changes = {"draft_vocab_size": 160}
    drop = ("d2t", "t2d", "lm_head.weight")
    _, found = read(shared, "spec-dflash", target, changes, drop)
    assert found.d2t is None
    assert not found.config.own_head
    assert not found.config.own_embedding
    extra = {"lm_head.weight": (160, 64), "embed_tokens.weight": (160, 64)}
    _, found = read(shared, "spec-dflash", target, changes, drop, extra)
    assert found.sources["embed.weight"].names == ("embed_tokens.weight",)
    assert found.sources["head.weight"].shape == (160, 64)
    # As many drafts as the file wants, if a block holds them.
    key = "speculators_config"
    _, found = read(shared, "spec-dflash", target, {f"{key}.proposal_methods": []})
    assert found.options == {}
    more = [{"speculative_tokens": 6}]
    _, found = read(shared, "spec-dflash", target, {f"{key}.proposal_methods": more})
    assert found.options == {"num_speculative_tokens": 5}
    _, found = read(shared, "spec-dspark", target, {"sample_from_anchor": ...})
    assert found.config.from_anchor
    _, found = read(shared, "spec-dflash", target, {"sliding_window_non_causal": True})
    assert (found.config.window_causal, found.config.decoder.windows) == (False, (None, 7))


@pytest.mark.parametrize("name", ["dflash", "spec-dflash", "dspark-rnn", "spec-dspark"])
def test_every_tensor_has_its_place(shared, target, name):
    _, found = read(shared, name, target, {})
    stored = read_folder(shared / "parity" / name).tensors
    named = {name for source in found.sources.values() for name in source.names}
    assert all(name in named or found.ignored(name) for name in stored)
    assert named <= stored.keys()
