"""The command line: `specjax generate`, `specjax demo`, `specjax models`."""

from specjax.cli.app import app, main

__all__ = ["app", "main"]
