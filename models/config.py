"""What a decoder-only architecture can vary in, as one hashable record."""

from __future__ import annotations

import dataclasses

__all__ = ["DecoderConfig", "ExpertsConfig", "LatentConfig", "RopeConfig"]


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
class ExpertsConfig:
    """Routed experts in place of one feed-forward block."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    normalise: bool = True  # the weights of the chosen experts sum to 1
    scoring: str = "softmax"  # or "sigmoid", with a bias that only the choice sees
    groups: int = 1  # experts are chosen from the best groups only
    groups_kept: int = 1
    scale: float = 1.0  # on the weights
    shared_size: int = 0  # width of an expert that every token visits; 0: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""

    query_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int  # of a head, the part without position
    rope_dim: int  # of a head, the rotated part; its keys are shared by all heads
    value_dim: int
    norm_eps: float = 1e-6


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
    max_position: int = 2048  # longest context that the checkpoint was made for
    tie_embeddings: bool = False
    embed_scale: float | None = None  # on embeddings, not on the head
    logit_softcap: float | None = None  # c: c tanh(logits / c)
    # Norms.
    norm: str = "rms"  # or "layer", with a bias
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the scale; Gemma: 1
    post_norms: bool = False  # also behind attention and feed-forward, before the residual sum
    parallel: bool = False  # attention and feed-forward read the same input
    # Attention.
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    qk_norm: bool = False  # RMS norm of every head's query and key, before rotation
    query_scale: float | None = None  # None: head_dim^-0.5
    attention_softcap: float | None = None  # c: c tanh(scores / c)
    windows: tuple[int | None, ...] = ()  # per layer: sees so many last tokens, itself included
    latent: LatentConfig | None = None  # instead of num_kv_heads and head_dim
    # Positions.
    rope: RopeConfig | None = RopeConfig()
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same
    rotary_dim: int | None = None  # the first dimensions of a head are rotated; None: all
    learned_positions: bool = False  # a table beside the embedding
    # Feed-forward.
    activation: str = "silu"  # or "gelu", "gelu_tanh"
    gated: bool = True  # down(act(gate x) * up x), else down(act(up x))
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()  # which layers have experts; (): all

    def window(self, layer: int) -> int | None:
        """The window of a layer, None if it sees everything."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is made of experts."""
        return self.experts is not None and (not self.expert_layers or self.expert_layers[layer])
