"""Which families exist: by Hugging Face `model_type` and by GGUF `general.architecture`.

A new family is a new file with a `Family` record, and its name in the tuple here.
"""

from __future__ import annotations

from specjax.models import deepseek, gemma, gpt2, gpt_neox, llama, mistral, qwen
from specjax.models.family import Family

__all__ = ["FAMILIES", "by_gguf_architecture", "by_model_type"]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.MISTRAL,
    mistral.MIXTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
    gemma.GEMMA2,
    gemma.GEMMA3_TEXT,
    gemma.GEMMA3,
    deepseek.DEEPSEEK_V3,
    gpt2.GPT2,
    gpt_neox.GPT_NEOX,
)

_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
_BY_ARCHITECTURE = {f.gguf_architecture: f for f in FAMILIES if f.gguf_architecture}


def by_model_type(model_type: object) -> Family:
    """Finds the family of a Hugging Face checkpoint.

    Args:
      model_type: `model_type` of its config.json.

    Returns:
      The family's record.

    Raises:
      ValueError: no family has that model type.
    """
    return _find(_BY_MODEL_TYPE, model_type, "model_type")


def by_gguf_architecture(architecture: object) -> Family:
    """Finds the family of a GGUF file.

    Args:
      architecture: its `general.architecture`.

    Returns:
      The family's record.

    Raises:
      ValueError: no family has that architecture.
    """
    return _find(_BY_ARCHITECTURE, architecture, "general.architecture")


def _find(table: dict[str, Family], name: object, key: str) -> Family:
    if isinstance(name, str) and name in table:
        return table[name]
    raise ValueError(
        f"{key} is {name!r}, which specjax does not know; supported: {', '.join(sorted(table))}. "
        "Use a checkpoint of one of these, or add a family beside models/llama.py."
    )
