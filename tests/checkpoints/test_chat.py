"""Chat templates: what they can use, and what they cannot."""

from __future__ import annotations

import datetime

import pytest

from specjax.checkpoints import chat, tokenizer

MESSAGES = [{"role": "user", "content": "<a> & é"}]


def render(template, messages=MESSAGES, **named):
    return chat.render(template, messages, True, named)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
            "user\n",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<a> & é"}'),
        ("{{ {'b': 1} | tojson(indent=1) }}", '{\n "b": 1\n}'),
        ("{{ bos_token }}{{ tools is none }}", "<s>True"),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}x{{ messages[0].role }}{% endgeneration %}", "xuser"),
    ],
)  # fmt: skip
def test_templates_have_what_they_expect(template, text):
    assert render(template, bos_token="<s>") == text


def test_the_date():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().astimezone().year)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ messages.nothing.more }}", "refuses"),
    ],
)
def test_refusals(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


def test_messages_have_a_form():
    with pytest.raises(ValueError, match="wanted mappings"):
        render("x", ["hello"])


def test_no_template():
    from tokenizers import Tokenizer, models

    plain = tokenizer.Tokenizer(
        backend=Tokenizer(models.BPE()),
        ids=tokenizer.SpecialIds(None, (), 0),
        named_tokens=(),
        chat_template=None,
    )
    with pytest.raises(ValueError, match="no chat template"):
        plain.apply_chat_template(MESSAGES)
