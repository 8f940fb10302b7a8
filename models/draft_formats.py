"""Which published formats of drafters exist. A new one is a `DraftFormat`, and its place here."""

from __future__ import annotations

from specjax.models import dflash, eagle_formats, medusa, mtp, own_drafts
from specjax.models.drafting import DraftFormat

__all__ = ["FORMATS"]

FORMATS: tuple[DraftFormat, ...] = (
    *own_drafts.FORMATS,
    *eagle_formats.FORMATS,
    *mtp.FORMATS,
    *medusa.FORMATS,
    *dflash.FORMATS,
)
