"""Small random block networks on small random targets."""

import dataclasses
import functools

import jax

from specjax.drafters.dflash import dflash
from specjax.drafters.dspark import dspark
from specjax.models.block_decoder import BlockConfig, block_network, random_block
from specjax.models.config import DecoderConfig
from specjax.models.decoder import decoder_model, random_weights
from specjax.types import Params
from tests import tiny

BLOCK = BlockConfig(
    decoder=dataclasses.replace(tiny.CONFIG, qk_norm=True),
    features=(1, 2),
    target_size=tiny.CONFIG.hidden_size,
    draft_vocab=tiny.CONFIG.vocab_size,
    block_size=5,
    mask_token_id=60,
)
HEADS = {
    "from_anchor": True,
    "markov_rank": 4,
    "markov_kind": "gated",
    "confidence": True,
    "confidence_markov": True,
}
WINDOWED = dataclasses.replace(
    BLOCK, decoder=dataclasses.replace(BLOCK.decoder, windows=(None, 7)), window_causal=True
)


def network_config(name: str, vocab: int | None = None) -> BlockConfig:
    """A configuration by the name of a drafter, perhaps of few tokens."""
    config = {
        "dflash": BLOCK,
        "windowed": WINDOWED,
        "dspark": dataclasses.replace(BLOCK, **HEADS),
        "dspark-rnn": dataclasses.replace(
            BLOCK, **HEADS | {"markov_kind": "rnn", "from_anchor": False}
        ),
    }[name]
    if vocab is None:
        return config
    decoder = dataclasses.replace(config.decoder, vocab_size=vocab)
    return dataclasses.replace(config, decoder=decoder, draft_vocab=vocab, mask_token_id=vocab - 1)


@functools.cache
def params(name: str, target: DecoderConfig = tiny.CONFIG, **options) -> Params:
    """A target and a drafter."""
    config = network_config(name, target.vocab_size)
    network = block_network(config)
    make = dspark if name.startswith("dspark") else dflash
    return Params(
        target=random_weights(target, jax.random.key(0)),
        draft=random_block(config, jax.random.key(1)),
        model=decoder_model(target),
        drafter=make(network, **options),
        pad_id=target.vocab_size - 1,
    )
