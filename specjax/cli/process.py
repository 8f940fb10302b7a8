"""What the command line sets up for its process: compilation cache, Ctrl-C, errors in a line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import typer

__all__ = ["cache_folder", "errors_in_one_line", "keep_compiled_programs", "stop_on_interrupt"]

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_INTERRUPTED = 130  # what shells report for a process that SIGINT ended


def cache_folder() -> Path:
    """Where compiled programs are kept: `specjax/xla` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says that relative paths are to be ignored
        base = os.path.expanduser("~/.cache")
    return Path(base) / "specjax" / "xla"


def keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache; the user's own JAX_* settings stay."""
    os.environ.setdefault(_FOLDER, str(cache_folder()))
    os.environ.setdefault(_LEAST_SECONDS, "0.1")
    if "jax" in sys.modules:  # it reads the environment once, when it is imported
        config = sys.modules["jax"].config
        config.update("jax_compilation_cache_dir", os.environ[_FOLDER] or None)
        config.update(
            "jax_persistent_cache_min_compile_time_secs", float(os.environ[_LEAST_SECONDS])
        )


def stop_on_interrupt() -> None:
    """Lets Ctrl-C end the process at once, with exit code 130.

    Python handles signals in the main thread and between bytecodes, so while XLA compiles or runs
    nothing would happen for seconds. The wakeup socket is written by the C handler itself. A
    process that was started to ignore SIGINT goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # `watch` does it
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with sender:
            while signal.SIGINT not in receiver.recv(16):
                pass
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # the spinner hides the cursor
            os._exit(_INTERRUPTED)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Shows the library's refusals as one line on stderr, exit code 2; others pass through."""
    try:
        yield
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        message = " ".join(str(error).split())
        typer.secho(f"Error: {message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from error
