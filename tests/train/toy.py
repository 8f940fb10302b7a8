"""A tiny target on disk, and texts of its own, small enough to train on in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import specjax
from specjax import Params, drafters
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, random_weights
from specjax.train.recipes import default_features
from specjax.train.texts import Writing, write_texts
from specjax.train.windows import whole_windows

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position=256,
)


def toy_target() -> Params:
    """Random weights; what follows a token depends most on the token, so that it can be learnt."""
    weights = random_weights(CONFIG, jax.random.key(7))
    times = lambda scale, part: jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, part)
    scales = {"embed": 3.0, "layers": 0.7, "head": 3.0, "norm": 1.0}
    return Params(
        target={name: times(scales[name], part) for name, part in weights.items()},
        model=decoder_model(CONFIG),
        drafter=drafters.plain(),
        name="toy",
    )


def saved_target(folder: Path, *, chat: bool = False) -> Path:
    """The toy target as a checkpoint that `specjax.load` reads.

    Args:
      folder: where its folder is made.
      chat: with a tokenizer, of the words w0 w1 ..., and a chat template.
    """
    path = specjax.save(toy_target(), folder / "target").result()
    if chat:
        words = {f"w{i}": i for i in range(CONFIG.vocab_size)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.save(str(path / "tokenizer.json"))
        template = (
            "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}"
            "{% if add_generation_prompt %}w3{% endif %}"
        )
        about = {"chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, CONFIG.vocab_size, (count, 8)).tolist()


def write_toy_texts(folder: Path, shards: int = 6, rows: int = 16) -> Path:
    writing = Writing(
        features=default_features(CONFIG),
        rows=rows,
        answer_tokens=40,
        temperatures=(0.0,),
        data="random",
    )
    own = prompts(shards * rows)
    for _ in write_texts(folder, toy_target(), writing, shards=range(shards), prompts=own):
        pass
    return folder


def states_of(params: Params, tokens: np.ndarray, features: tuple[int, ...]):
    """The target's states of texts `[B, T]`, by one pass."""
    tokens = jnp.asarray(tokens)
    return whole_windows(params.model, params.target, tokens, features=features).features
