"""Ways of guessing, one file each."""

from specjax.drafters.draft_model import draft_model
from specjax.drafters.ngram import ngram
from specjax.drafters.plain import plain

__all__ = ["draft_model", "ngram", "plain"]
