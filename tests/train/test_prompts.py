"""Prompts: those that a target makes itself, and those of a file."""

from __future__ import annotations

import json

import numpy as np
import pytest

import specjax
from specjax.train.prompts import Kind, read_prompts, self_instruction, user_turn
from tests.train import toy


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return specjax.load(toy.saved_target(tmp_path_factory.mktemp("toy"), chat=True))


def test_what_stands_around_a_message(params):
    assert user_turn(params) == ((1,), (2, 3))


def test_the_target_goes_on_from_an_opening(params):
    kind = Kind("toy", ("w7 w8",), 6)
    found = self_instruction(params, kind, 5, seed=3)
    assert found == self_instruction(params, kind, 5, seed=3)
    assert found != self_instruction(params, kind, 5, seed=4)
    for prompt in found:
        assert prompt[:3] == [1, 7, 8]
        assert prompt[-2:] == [2, 3]
        assert 0 < len(prompt) - 5 <= 6


def test_a_closing_comes_behind_what_was_written(params):
    found = self_instruction(params, Kind("toy", ("w7",), 4, ("w9",)), 3, seed=0)
    assert {(len(prompt), *prompt[-3:]) for prompt in found} == {(9, 9, 2, 3)}


def test_a_message_ends_where_the_model_ends_it(params):
    ends = params.replace(eos_ids=tuple(range(24)))
    for prompt in self_instruction(ends, Kind("toy", ("w40",), 8), 16, seed=0):
        assert not set(prompt[2:-2]) & set(range(24))


def test_prompts_of_a_file(params, tmp_path):
    path = tmp_path / "p.jsonl"
    turn = lambda role, text: {"role": role, "content": text}
    lines = [
        "w4",
        {"prompt": "w5"},
        {"text": "w6"},
        {"turns": ["w7", "w8"]},
        {"messages": [turn("user", "w9"), turn("assistant", "w10"), turn("user", "w11")]},
        {"conversations": [{"from": "human", "value": "w12"}, {"from": "gpt", "value": "w13"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_prompts(params, path) == [
        *([1, i, 2, 3] for i in (4, 5, 6, 7)),
        [1, 9, 2, 3],
        [1, 9, 2, 1, 10, 2, 1, 11, 2, 3],
        [1, 12, 2, 3],
    ]
    (tmp_path / "p.txt").write_text("w4\nw5\n")
    assert read_prompts(params, tmp_path / "p.txt") == [[1, 4, 2, 3], [1, 5, 2, 3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{\n", "line 1 is not JSON"),
        ('"a"\n3\n', "line 2 is neither a text nor an object"),
        ('{"messages": [3]}\n', "messages must be a list of objects"),
        ('{"messages": [{"role": "user"}]}\n', "the content of a message must be a text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no message of a user"),
    ],
)
def test_files_that_are_refused(params, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(params, tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="is no file"):
        read_prompts(params, tmp_path / "none.jsonl")


def test_without_a_chat_template_there_are_no_own_prompts():
    with pytest.raises(ValueError, match=r"'toy' has no chat template, .* file of prompts"):
        user_turn(toy.toy_target())
    assert np.asarray(toy.prompts(2)).shape == (2, 8)
