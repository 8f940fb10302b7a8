"""Plain decoding here and in Hugging Face transformers, in turns: JSON on standard output.

    uv run python benchmarks/against_transformers.py --python PATH_TO_ANOTHER_PYTHON

transformers and torch are not dependencies: PATH names a Python that has both (and `gguf`). It
stays loaded in a process of its own and is asked for one generation at a time, so that both sides
see the same machine. Time is from the first token to the last of a greedy generation, batch 1,
float32, the same weights and prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import jax
from measure import environment, timed_stream, write_report

import specjax
from specjax import checkpoints

PROMPT = "Why is the sky blue? Explain it to a child in a few sentences."

THEIRS = """
import json, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM
folder, name, threads, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps(versions), flush=True)

class Clock:
    def __init__(self): self.times = []
    def put(self, value): self.times.append(time.perf_counter())
    def end(self): pass

for line in sys.stdin:
    ids = torch.tensor([json.loads(line)])
    clock = Clock()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                             do_sample=False, streamer=clock, pad_token_id=0)
    tokens = out[0, ids.shape[1]:].tolist()
    times = clock.times[1:]  # the first entry is the prompt
    print(json.dumps({"ms": 1e3 * (times[-1] - times[0]) / (len(times) - 1), "tokens": tokens}),
          flush=True)
"""


def main() -> None:
    """Reads the arguments, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="a Python with torch and transformers")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    file = checkpoints.resolve(args.model)
    params = specjax.load(args.model, dtype="float32")
    ids = specjax.text.encode_prompt(params, PROMPT)
    arguments = [str(file.parent), file.name, str(args.threads), str(args.max_new_tokens)]
    with subprocess.Popen(
        [args.python, "-c", THEIRS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        versions = json.loads(other.stdout.readline())
        ours, theirs = [], []
        for repeat in range(args.repeats + 1):  # the first one warms up
            one = timed_stream(params, ids, args.max_new_tokens)
            other.stdin.write(json.dumps(ids) + "\n")
            other.stdin.flush()
            two = json.loads(other.stdout.readline())
            if repeat:
                ours.append(1e3 * one["seconds"] / one["timed_tokens"])
                theirs.append(two["ms"])
        other.stdin.close()
    report = {
        "environment": environment() | versions,
        "model": args.model,
        "specjax_ms_per_token": {"median": statistics.median(ours), "best": min(ours)},
        "transformers_ms_per_token": {"median": statistics.median(theirs), "best": min(theirs)},
        "ratio_of_medians": statistics.median(theirs) / statistics.median(ours),
        "ratio_of_best": min(theirs) / min(ours),
        "same_tokens": one["tokens"] == two["tokens"],
    }
    write_report(report, args.out)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache"))
    main()
