"""Ways of guessing, one file each."""

from specjax.drafters.draft_model import draft_model
from specjax.drafters.ngram import ngram
from specjax.drafters.plain import plain
from specjax.drafters.vocabulary import VocabularyMap, onto_target, vocabulary_map

__all__ = ["VocabularyMap", "draft_model", "ngram", "onto_target", "plain", "vocabulary_map"]
