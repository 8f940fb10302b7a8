"""How DFlash and DSpark drafters are published: z-lab, DeepSpec and speculators folders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.models import config_reading as reading
from specjax.models.block_decoder import BlockConfig, abstract_block
from specjax.models.config import DecoderConfig
from specjax.models.drafting import (
    DraftFormat,
    Found,
    check_features,
    check_size,
    proposal_tokens,
    target_fields,
)
from specjax.models.dspark import MARKOV_KINDS
from specjax.models.functional import paths
from specjax.models.naming import HF_DECODER, Layout, Source, source_of
from specjax.models.qwen import QWEN3

__all__ = ["FORMATS"]

Shapes = Mapping[str, tuple[int, ...]]

_LAYOUT = Layout(
    "layers.{}.",
    {
        **HF_DECODER,
        "embed": "embed_tokens",
        "norm": "norm",
        "fc": "fc",
        "hidden_norm": "hidden_norm",
        "markov.w1": "markov_head.markov_w1",
        "markov.w2": "markov_head.markov_w2",
        "markov.gate": "markov_head.gate_proj",
        "markov.joint": "markov_head.joint_proj",
        "confidence.proj": "confidence_head.proj",
    },
)
_WINDOW_KEYS = frozenset({"layer_types", "max_window_layers", "sliding_window"})
_ZLAB_KEYS = frozenset({"auto_map", "block_size", "dflash_config", "num_target_layers"})
_HEAD_KEYS = frozenset(
    """
    confidence_head_with_markov enable_confidence_head markov_head_type markov_rank
    """.split()
)
_DEEPSPEC_KEYS = _HEAD_KEYS | frozenset(
    "auto_map block_size mask_token_id num_anchors num_target_layers target_layer_ids".split()
)
_SPECULATORS_KEYS = frozenset(
    """
    auto_map aux_hidden_state_layer_ids block_size draft_vocab_size mask_token_id
    sample_from_anchor sliding_window_non_causal speculators_config speculators_model_type
    speculators_version target_hidden_size tie_word_embeddings transformer_layer_config
    """.split()
)
# Settings of training, which leave drafting as it is.
_TRAINING_KEYS = frozenset(
    """
    ce_loss_alpha confidence_head_alpha l1_loss_alpha loss_decay_gamma max_anchors num_anchors
    """.split()
)


def _sources(config: BlockConfig) -> dict[str, Source]:
    """Where each parameter is stored."""
    found = {}
    for path, shape in paths(abstract_block(config)).items():
        layer, inner = re.fullmatch(r"(layers\.\d+\.)?(.*)", path).groups()
        found[path] = source_of(_LAYOUT, inner, config.decoder, layer or "", shape)
    return found


def _found(
    decoder: DecoderConfig,
    shapes: Shapes,
    target: DecoderConfig,
    *,
    draft_vocab: int | None = None,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Found:
    """Checks that a network fits the target, and says where its weights are."""
    check_size("vocab_size", decoder.vocab_size, target.vocab_size)
    draft_vocab = decoder.vocab_size if draft_vocab is None else draft_vocab
    own = {
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_head": "lm_head.weight" in shapes,
    }
    if not all(own.values()):  # it reads the target's embedding, or its head
        check_size("hidden_size", decoder.hidden_size, target.hidden_size)
    mapped = "d2t" in shapes
    if draft_vocab != decoder.vocab_size and not (mapped and own["own_head"]):
        raise ValueError(
            f"draft_vocab_size is {draft_vocab} and the target has {decoder.vocab_size} tokens, "
            "but the drafter's checkpoint lacks the tensor d2t or lm_head.weight; wanted both. "
            "Download it again."
        )
    config = BlockConfig(
        decoder=dataclasses.replace(decoder, tie_embeddings=False),
        target_size=target.hidden_size,
        draft_vocab=draft_vocab,
        **own,
        **fields,
    )
    if not 0 <= config.mask_token_id < decoder.vocab_size:
        raise ValueError(
            f"mask_token_id is {config.mask_token_id}; wanted a token of the target, 0 to "
            f"{decoder.vocab_size - 1}. Correct the drafter's config.json."
        )
    least = 1 if config.from_anchor else 2
    if config.block_size < least:
        raise ValueError(
            f"block_size is {config.block_size}; wanted at least {least}. Correct the drafter's "
            "config.json."
        )
    return Found(
        config=config,
        sources=_sources(config),
        ignored=lambda name: name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq"),
        d2t="d2t" if mapped else None,
        draft_vocab=config.draft_vocab,
        options=options or {},
    )


def _token(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{key} is {value!r}; wanted a token id. Correct the drafter's config.json."
        )
    return value


def _check_layers(config: Mapping[str, Any], target: DecoderConfig) -> None:
    if config.get("num_target_layers") is not None:
        check_size("num_target_layers", config["num_target_layers"], target.num_layers)


def _qwen3(config: Mapping[str, Any], without: Collection[str]) -> DecoderConfig:
    """The layers, from a config.json whose other keys the caller reads."""
    reading.expect(config, model_type="qwen3")
    return QWEN3.config_from_hf(target_fields(config, without))


# --- z-lab -----------------------------------------------------------------------------------


def _read_zlab(config: Mapping[str, Any], shapes: Shapes, target: DecoderConfig) -> Found:
    own = config["dflash_config"]
    known = {"block_size", "mask_token_id", "target_layer_ids"}
    if not isinstance(own, Mapping) or set(own) - known:
        raise ValueError(
            f"dflash_config is {own!r}; wanted an object with the keys {', '.join(sorted(known))}. "
            "Others are not supported: use another checkpoint."
        )
    # The reference shows all of the context to every layer, whatever layer_types says.
    decoder = _qwen3(config, _ZLAB_KEYS | _WINDOW_KEYS | {"use_sliding_window"})
    _check_layers(config, target)
    layers = own.get("target_layer_ids")
    if layers is None:
        layers = _spread(decoder.num_layers, target.num_layers)
    return _found(
        decoder,
        shapes,
        target,
        features=check_features("target_layer_ids", layers, target.num_layers, 1),
        block_size=reading.positive_int({**config, **reading.present(own)}, "block_size"),
        mask_token_id=_token(own, "mask_token_id"),
    )


def _spread(layers: int, target_layers: int) -> list[int]:
    """The layers of the target that a checkpoint means that names none."""
    if layers == 1:
        return [target_layers // 2]
    step = (target_layers - 4) / (layers - 1)
    return [round(1 + i * step) for i in range(layers)]


# --- DeepSpec --------------------------------------------------------------------------------


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_deepspec(config: Mapping[str, Any]) -> bool:
    names = _listed(config.get("architectures"))
    return any(str(name).endswith("DSparkModel") for name in names)


def _has_heads(config: Mapping[str, Any]) -> bool:
    return bool(config.get("markov_rank") or config.get("enable_confidence_head"))


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `BlockConfig` for DSpark's heads."""
    rank = config.get("markov_rank") or 0
    rank = reading.positive_int(config, "markov_rank") if rank else 0
    kind = config.get("markov_head_type") if rank else None
    kind = "vanilla" if kind is None else kind
    if kind not in MARKOV_KINDS:
        raise ValueError(
            f"markov_head_type is {kind!r}; supported: {', '.join(MARKOV_KINDS)}. Use another "
            "checkpoint."
        )
    confidence = reading.flag(config, "enable_confidence_head", False)
    with_markov = confidence and reading.flag(config, "confidence_head_with_markov", False)
    if with_markov and not rank:
        raise ValueError(
            "confidence_head_with_markov is True but markov_rank is 0; wanted a Markov head. "
            "Correct the drafter's config.json."
        )
    return {
        "markov_rank": rank,
        "markov_kind": kind,
        "confidence": confidence,
        "confidence_markov": with_markov,
    }


def _read_deepspec(config: Mapping[str, Any], shapes: Shapes, target: DecoderConfig) -> Found:
    if config["architectures"] != ["Qwen3DSparkModel"]:
        raise ValueError(
            f"architectures is {config['architectures']!r}; supported: ['Qwen3DSparkModel']. Use "
            "another checkpoint."
        )
    decoder = _qwen3(config, _DEEPSPEC_KEYS)
    if decoder.windows:
        raise ValueError(
            f"layer_types is {config.get('layer_types')!r}; supported: full_attention only. Use "
            "another checkpoint."
        )
    _check_layers(config, target)
    layers = config.get("target_layer_ids")
    return _found(
        decoder,
        shapes,
        target,
        features=check_features("target_layer_ids", layers, target.num_layers, 1),
        block_size=reading.positive_int(config, "block_size"),
        mask_token_id=_token(config, "mask_token_id"),
        from_anchor=True,
        **_heads(config),
    )


# --- speculators -----------------------------------------------------------------------------


def _read_speculators(config: Mapping[str, Any], shapes: Shapes, target: DecoderConfig) -> Found:
    dspark = config["speculators_model_type"] == "dspark"
    heads = _HEAD_KEYS if dspark else frozenset()
    reading.refuse_unknown(config, _SPECULATORS_KEYS | _TRAINING_KEYS | heads)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"transformer_layer_config is {layers!r}; wanted an object. Correct config.json."
        )
    decoder = _qwen3(layers, ())
    # Here a window of w is w tokens before the block, in `DecoderConfig` it counts the query too.
    windows = tuple(None if w is None else w + 1 for w in decoder.windows)
    if config.get("target_hidden_size") is not None:
        check_size("hidden_size", config["target_hidden_size"], target.hidden_size)
    key = "aux_hidden_state_layer_ids"
    from_anchor = reading.flag(config, "sample_from_anchor", dspark)
    block = reading.positive_int(config, "block_size")
    most = block if from_anchor else block - 1
    return _found(
        dataclasses.replace(decoder, windows=windows),
        shapes,
        target,
        draft_vocab=reading.positive_int(config, "draft_vocab_size"),
        options={name: min(count, most) for name, count in proposal_tokens(config).items()},
        features=check_features(key, config.get(key), target.num_layers),
        block_size=block,
        mask_token_id=_token(config, "mask_token_id"),
        from_anchor=from_anchor,
        window_causal=not reading.flag(config, "sliding_window_non_causal", False),
        **(_heads(config) if dspark else {}),
    )


def _is_speculators(config: Mapping[str, Any], kind: str) -> bool:
    return config.get("speculators_model_type") == kind


FORMATS: tuple[DraftFormat, ...] = (
    DraftFormat(
        "DFlash in the speculators format",
        "dflash",
        lambda config, tensors: _is_speculators(config, "dflash"),
        _read_speculators,
    ),
    DraftFormat(
        "DSpark in the speculators format",
        "dspark",
        lambda config, tensors: _is_speculators(config, "dspark"),
        _read_speculators,
    ),
    DraftFormat(
        "DFlash",
        "dflash",
        lambda config, tensors: "dflash_config" in config,
        _read_zlab,
    ),
    DraftFormat(
        "DSpark",
        "dspark",
        lambda config, tensors: _is_deepspec(config) and _has_heads(config),
        _read_deepspec,
    ),
    DraftFormat(
        "DFlash in DSpark's layout",
        "dflash",
        lambda config, tensors: _is_deepspec(config) and not _has_heads(config),
        _read_deepspec,
    ),
)
