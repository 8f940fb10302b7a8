"""What a decoder-only architecture can vary in, as one hashable record."""

from __future__ import annotations

import dataclasses

__all__ = ["DecoderConfig", "RopeConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its context extensions.

    `kind` is one of "default", "linear", "llama3", "yarn". The other fields are read only
    by the kinds that need them; `specjax.models.rope` holds the equations.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn: how many times the original context
    original_max_position: int | None = None  # llama3, yarn: context length before extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None derives it from `factor`
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder-only transformer. Equal configs share one compiled model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position: int = 2048  # longest context that the checkpoint was made for
