"""Where a model's parameters lie in a checkpoint: names and shapes of tensors, how to turn them.

A format names the tensors of a family by a `Layout`. Most parameters are one tensor under another
name; the functions here describe those that are a part of one, several in one, or in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_weights
from specjax.models.functional import paths

__all__ = [
    "GGUF_DECODER",
    "HF_DECODER",
    "Layout",
    "Parameter",
    "Source",
    "hf_ignored",
    "named",
    "parameters",
    "source_of",
    "sources",
    "split_pairs",
    "stacked",
]

Shape = tuple[int, ...]
Turn = Callable[[np.ndarray], np.ndarray]


class Source(NamedTuple):
    """The tensors that a parameter is made of."""

    names: tuple[str, ...]  # one; or, if it is stacked, one for each entry of the first axis
    shape: Shape  # of each, as stored
    turn: Turn | None = None  # stored tensor -> parameter, or a slice of it; None: as it is
    stacked: bool = False
    exact: bool = False  # keeps its stored type whatever the type of the other weights


class Parameter(NamedTuple):
    """A parameter that is looked for."""

    config: DecoderConfig
    prefix: str  # of its layer's tensors: "model.layers.3."; empty outside of layers
    kind: str  # "weight" or "bias"; empty if the parameter is no part of a module
    shape: Shape


Finder = Callable[[Parameter], Source]


class Layout(NamedTuple):
    """How a format names the tensors of a family."""

    layer: str  # prefix of a layer's tensors, with {} for its number
    modules: Mapping[str, str | Finder]  # what has a weight, and perhaps a bias
    leaves: Mapping[str, str | Finder] = {}  # parameters without a module, by their path
    ignored: Callable[[str, DecoderConfig], bool] = lambda name, config: False  # may be there
    rename: Callable[[str], str] = lambda name: name  # file's name -> the name that is meant


# Names that most checkpoints share.
HF_DECODER: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GGUF_DECODER: Mapping[str, str] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def parameters(config: DecoderConfig) -> dict[str, Shape]:
    """The path and the shape of every parameter; a linear weight is [out, in].

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> config = DecoderConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_layers=1,
      ...                        num_heads=2, num_kv_heads=1, head_dim=4)
      >>> parameters(config)["layers.0.attn.k.weight"]
      (4, 8)
    """
    return paths(abstract_weights(config))


def sources(config: DecoderConfig, layout: Layout) -> dict[str, Source]:
    """Where each parameter of a model is stored.

    Args:
      config: the model's configuration.
      layout: of the checkpoint.

    Returns:
      Parameter path -> source.
    """
    found = {}
    for path, shape in parameters(config).items():
        layer, inner = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)", path).groups()
        prefix = "" if layer is None else layout.layer.format(layer)
        found[path] = source_of(layout, inner, config, prefix, shape)
    return found


def source_of(
    layout: Layout, inner: str, config: DecoderConfig, prefix: str, shape: Shape
) -> Source:
    """Where one parameter is stored.

    Args:
      layout: of the checkpoint.
      inner: the parameter's path, within its layer if it is in one.
      config: the model's configuration.
      prefix: of its layer's tensors; empty outside of layers.
      shape: of the parameter.
    """
    if inner in layout.leaves:
        entry, kind = layout.leaves[inner], ""
    else:
        module, _, kind = inner.rpartition(".")
        entry, kind = layout.modules[module], "weight" if kind == "scale" else kind
    find = named(entry) if isinstance(entry, str) else entry
    return find(Parameter(config, prefix, kind, shape))


def named(
    name: str,
    turn: Callable[[Parameter, np.ndarray], np.ndarray] | None = None,
    stored: Callable[[Parameter], Shape] = lambda parameter: parameter.shape,
    *,
    exact: bool = False,
) -> Finder:
    """One tensor.

    Args:
      name: within the layer; the kind is added to a module's.
      turn: what becomes of it when it is read.
      stored: its shape in the file.
      exact: keeps its stored type.
    """

    def find(parameter: Parameter) -> Source:
        full = parameter.prefix + (f"{name}.{parameter.kind}" if parameter.kind else name)
        turned = None if turn is None else lambda array: turn(parameter, array)
        return Source((full,), stored(parameter), turned, exact=exact)

    return find


def stacked(name: str) -> Finder:
    """One tensor an expert, with {} for its number."""

    def find(parameter: Parameter) -> Source:
        count, *shape = parameter.shape
        names = tuple(parameter.prefix + name.format(i) for i in range(count))
        return Source(names, tuple(shape), stacked=True)

    return find


def split_pairs(array: np.ndarray, heads: int, start: int = 0) -> np.ndarray:
    """Puts rows whose rotary embedding turns neighbours into the order of ours, which turns halves.

    In each head the rows from `start` on are taken apart: 0 1 2 3 4 5 becomes 0 2 4 1 3 5.
    """
    rows = array.reshape(heads, -1, *array.shape[1:])
    pairs = rows[:, start:]
    pairs = pairs.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(pairs.shape)
    return np.concatenate([rows[:, :start], pairs], axis=1).reshape(array.shape)


def hf_ignored(name: str, config: DecoderConfig) -> bool:
    """Tied heads may be stored twice; older releases stored the rotary frequencies. Drafters may
    lie beside the model's own weights."""
    return (
        (config.tie_embeddings and name == "lm_head.weight")
        or name.endswith("rotary_emb.inv_freq")
        or name.startswith(("medusa_head.", "mtp."))
    )
