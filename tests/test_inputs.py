"""Bad input: an error that names the argument and the fix, before anything is compiled."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import Sampling, drafters
from tests import tiny

BAD = [
    ({"prompt": []}, "prompt has no rows|empty"),
    ({"prompt": [[1, 2], []]}, "row 1 is empty"),
    ({"prompt": np.zeros((1, 0), np.int32)}, "empty"),
    ({"prompt": [1, 61]}, "token id 61, outside the model's vocabulary"),
    ({"prompt": [[1], [2, -1]]}, "row 1 holds token id -1"),
    ({"prompt": [1.0, 2.0]}, "integer token ids"),
    ({"prompt": [[[1]]]}, "flat list"),
    ({"prompt": np.zeros((1, 1, 1), np.int32)}, r"\[T\] or \[B, T\]"),
    ({"prompt": [1, [2]]}, "mixes"),
    ({"prompt": "hello"}, "specjax.generate"),
    ({"prompt": None}, "prompt must be"),
    ({"prompt": [1] * 20, "max_len": 19}, "more than max_len=19"),
    ({"prompt": [1] * 2049}, "context length is 2048"),
    ({"max_len": 4096}, "context length is 2048"),
    ({"max_len": 0}, "max_len must be"),
    ({"max_new_tokens": 0}, "max_new_tokens must be"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be"),
    ({"max_new_tokens": True}, "max_new_tokens must be"),
    ({"sampling": 0.7}, "sampling must be"),
    ({"sampling": Sampling(temperature=-1.0)}, "temperature must be finite and >= 0"),
    ({"sampling": Sampling(temperature=[0.0, 1.0])}, "one value a row"),
    ({"key": 3}, "jax.random.key"),
    ({"key": np.zeros(2, np.uint32)}, "jax.random.key"),
    ({"key": jax.random.split(jax.random.key(0), 3)}, "one a row"),
    ({"eos_ids": [61]}, "eos_ids must lie in"),
    ({"eos_ids": "x"}, "eos_ids must be"),
    ({"prompt_lengths": [9]}, "prompt_lengths"),
    ({"prompt_lengths": [1, 1]}, "prompt_lengths"),
    ({"params": {}}, "params must come from specjax.load"),
    ({"max_new_tokens": 1 << 31}, "max_new_tokens must be"),
    ({"acceptance": "greedy"}, "acceptance rule 'greedy' is not known"),
    ({"acceptance": 5}, "acceptance must be a rule"),
    ({"mesh": 4}, "mesh must come from"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change, message, monkeypatch):
    params = tiny.params()

    def never(*args):
        raise AssertionError("something was traced")

    model = params.model._replace(forward=never)
    arguments = {"params": params.replace(model=model), "prompt": [1, 2, 3], **change}
    with pytest.raises(ValueError, match=message):
        specjax.decode(**arguments)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngrams", "ngrams"),
        ({"method": "telepathy"}, "known: ngram"),
        ({"num_speculative_tokens": 3}, '"method"'),
        ({"method": "ngram", "num_speculative_token": 3}, "num_speculative_token'; it has"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "must not be above"),
        ({"method": "draft_model"}, 'one of "model"'),
        ({"method": "draft_model", "draft_layers": 2}, "between 1 and 1"),
        ({"method": "draft_model", "draft_layers": 1, "num_speculative_tokens": -1}, "at least 1"),
        (7, "drafter must be"),
        ({"method": ["ngram"]}, "known: ngram"),
        ({"method": "draft_model", "model": 5}, "must be a name or a path"),
        ({"method": "draft_model", "draft_layers": "x"}, "draft_layers must be an integer"),
        ("ngrm", r"neither a method \(ngram, draft_model, .*\) nor a draft model"),
    ],
)
def test_bad_drafter(shared, drafter, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        specjax.load(shared / "parity" / "hf-llama-untied", drafter)


def test_a_draft_with_another_vocabulary(shared):
    with pytest.raises(ValueError, match=r"49152 tokens, the target .* has 160"):
        specjax.load(shared / "parity" / "hf-llama-untied", "smollm2-135m")


@pytest.mark.parametrize("dtype", ["float64", "int8", "fp32", 3])
def test_bad_dtype(shared, dtype):
    with pytest.raises(ValueError, match="dtype must be one of"):
        specjax.load(shared / "parity" / "hf-llama-untied", dtype=dtype)


def test_a_drafter_without_its_weights():
    params = tiny.params("draft_model")
    with pytest.raises(ValueError, match=r"params\.draft is None"):
        specjax.decode(params.replace(draft=None), [1, 2])
    mapped = drafters.draft_model(tiny.markov_model(30), 2, mapped=True)
    with pytest.raises(ValueError, match=r"must be .weights, vocabulary map"):
        specjax.decode(params.replace(drafter=mapped), [1, 2])
    ids = drafters.vocabulary_map(np.zeros(30, int), 40)
    with pytest.raises(ValueError, match=r"maps 30 draft tokens to 40, .* target 61"):
        specjax.decode(params.replace(drafter=mapped, draft=(params.draft, ids)), [1, 2])


@pytest.mark.parametrize("rounds", [0, -1, 1.5])
def test_bad_rounds(rounds):
    with pytest.raises(ValueError, match="rounds must be"):
        next(specjax.stream_tokens(tiny.params(), [1], rounds=rounds))


def test_integer_weights_are_refused(shared, tmp_path):
    source = shared / "parity" / "hf-llama-untied"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8"):
        specjax.load(tmp_path)


@pytest.mark.parametrize("target", [None, 3, "", b"x"])
def test_bad_target(target):
    with pytest.raises(ValueError, match="target must be a name or a path"):
        specjax.load(target)


def test_missing_target():
    with pytest.raises(FileNotFoundError, match="neither a known checkpoint nor an existing path"):
        specjax.load("no-such-model")
