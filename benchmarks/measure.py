"""What the benchmark scripts share: the machine, and the time of one generation."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax

__all__ = ["environment", "timed_stream", "write_report"]


def environment() -> dict[str, Any]:
    """On what this ran."""
    cpu = platform.processor() or platform.machine()
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            text = file.read()
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        named = {key.strip(): value for key, value in lines.items()}
        cpu = named.get("model name", cpu).strip()
        wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        flags = " ".join(f for f in named.get("flags", "").split() if f in wanted)
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cpu": cpu,
        "cpu_flags": flags,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def timed_stream(
    params: specjax.Params, ids: list[int], max_new_tokens: int, temperature: float = 0.0
) -> dict[str, Any]:
    """Decodes one prompt; times it from the first committed tokens to the last.

    Returns:
      seconds, timed_tokens, timed_rounds (what the time covers), emitted, rounds, acceptance
      (accepted / proposed at each depth), tokens.
    """
    stream = specjax.stream_tokens(
        params,
        ids,
        rounds=4,
        max_new_tokens=max_new_tokens,
        sampling=specjax.Sampling(temperature=temperature),
        key=jax.random.key(0),
    )
    first = next(stream)
    begin = time.perf_counter()
    results = [first, *stream]
    seconds = time.perf_counter() - begin
    last = results[-1]
    stats = last.stats
    proposed, accepted = np.asarray(stats.proposed[0]), np.asarray(stats.accepted[0])
    emitted = int(last.lengths[0])
    return {
        "seconds": seconds,
        "timed_tokens": max(emitted - int(first.lengths[0]), 1),
        "timed_rounds": max(int(stats.rounds[0] - first.stats.rounds[0]), 1),
        "emitted": emitted,
        "rounds": int(stats.rounds[0]),
        "acceptance": [
            round(a / p, 3) if p else None for a, p in zip(accepted, proposed, strict=True)
        ],
        "tokens": np.asarray(last.tokens)[0, :emitted].tolist(),
    }


def write_report(report: dict[str, Any], out: Path | None) -> None:
    """Prints a report as JSON, and writes it to a file if one is named."""
    text = json.dumps(report, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
