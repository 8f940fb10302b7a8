"""Ways of guessing, one file each."""

from specjax.drafters.combine import fallback, merged
from specjax.drafters.dflash import dflash
from specjax.drafters.draft_model import draft_model
from specjax.drafters.draft_tree import draft_tree
from specjax.drafters.dspark import dspark
from specjax.drafters.eagle import eagle
from specjax.drafters.growing import dynamic_tree
from specjax.drafters.medusa import medusa
from specjax.drafters.mtp import mtp
from specjax.drafters.ngram import ngram
from specjax.drafters.plain import plain
from specjax.drafters.sizes import sized
from specjax.drafters.vocabulary import VocabularyMap, onto_target, vocabulary_map

__all__ = [
    "VocabularyMap",
    "dflash",
    "draft_model",
    "draft_tree",
    "dspark",
    "dynamic_tree",
    "eagle",
    "fallback",
    "medusa",
    "merged",
    "mtp",
    "ngram",
    "onto_target",
    "plain",
    "sized",
    "vocabulary_map",
]
