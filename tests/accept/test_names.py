"""Rules by name."""

import re

import pytest

from specjax import accept
from specjax.accept.names import RULES, rule

NEEDED = {"lenient_sampling": {"lenience": 0.5}, "synthetic_acceptance": {"rates": [0.5, 0.25]}}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_its_name(name):
    made = rule({"rule": name} | NEEDED.get(name, {}))
    assert made.name == name
    assert made is rule(made)
    assert made is RULES[name](**NEEDED.get(name, {}))
    if name not in NEEDED:
        assert made is rule(name)


def test_options():
    spec = {"rule": "typical_acceptance", "epsilon": 0.1, "next_token": "sample"}
    assert rule(spec) is accept.typical_acceptance(0.1, next_token="sample")
    assert len(spec) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("spectre", "rule 'spectre' is not known; known: speculative_sampling, block_verif"),
        ({"rule": "spectre"}, "rule 'spectre' is not known"),
        ({"name": "spectr"}, 'its name as "rule"'),
        ({"rule": ["spectr"]}, 'its name as "rule"'),
        (None, "got None; known: speculative_sampling"),
        (accept.spectr, "the name of one"),
        ({"rule": "spectr", "k": 3}, "'spectr' has no option 'k'; it has none"),
        (
            {"rule": "typical_acceptance", "eps": 0.1, "top": 1},
            "no option 'eps', 'top'; it has: epsilon, delta, next_token",
        ),
        ("lenient_sampling", "'lenient_sampling' needs 'lenience', as in"),
        ({"rule": "synthetic_acceptance"}, "needs 'rates'"),
        ({"rule": "lenient_sampling", "lenience": 2}, "at most 1"),
    ],
)
def test_bad_rules(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rule(spec)
