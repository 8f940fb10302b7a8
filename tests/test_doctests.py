"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import specjax
from specjax import checkpoints

MODULES = sorted(
    m.name
    for package in ("specjax", "specjax.models", "specjax.checkpoints")
    for m in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    if not m.name.endswith("__main__")
)
NEEDS_WEIGHTS = "smollm2-135m"


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, name)
    if checkpoints.available()[0].path is None:
        tests = [t for t in tests if NEEDS_WEIGHTS not in t.docstring]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_the_public_names_exist():
    for name in specjax.__all__:
        assert hasattr(specjax, name)
