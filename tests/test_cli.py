"""The command line: what it prints where, what it refuses, and that it measures what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import specjax
from specjax import accept, checkpoints, cli, drafters, stopping
from specjax.accept.names import RULES
from specjax.checkpoints.registry import Availability, entries
from specjax.cli import process, running, showing
from specjax.cli.wrapping import WordWrap
from specjax.types import DecodeResult, Stats, Status

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 256,
}
PROMPT = "abcabcabcabcabcabc"  # the same bucket of lengths with and without the template


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A Hugging Face checkpoint: two random layers, one token a byte, and a chat template."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from specjax.models import llama, naming

    path = tmp_path_factory.mktemp("cli") / "tiny"
    path.mkdir()
    config = llama.config_from_hf(CONFIG)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.3, source.shape).astype(np.float32)
        for source in naming.sources(config, llama.FAMILY.hf).values()
        for name in source.names
    }
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    return str(path)


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words, **options: CliRunner().invoke(cli.app, list(words), **options)


@pytest.fixture
def generate(invoke, folder):
    def run(*words: str, prompt: str = PROMPT, code: int = 0):
        result = invoke("generate", prompt, "--model", folder, "--max-new-tokens", "40", *words)
        assert result.exit_code == code, result.output
        return result

    return run


def flat(text: str) -> str:
    """Without colours, frames and line breaks."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return " ".join(re.sub(r"[─-╿]", " ", text).split())


# --- help and lists --------------------------------------------------------------------------


def test_help(invoke):
    assert {"generate", "demo", "models", "convert"} <= set(flat(invoke("--help").output).split())
    text = flat(invoke("generate", "--help").output)
    assert "standard error" in text
    options = (
        "model dtype raw drafter num-speculative-tokens draft-layers acceptance plain compare "
        "temperature top-k top-p min-p repetition-penalty presence-penalty frequency-penalty seed "
        "max-new-tokens min-new-tokens stop ignore-eos regex json-schema"
    )
    assert all(f"--{name} " in text for name in options.split())
    for panel in ("Model", "Speculation", "Sampling", "Ending", "Grammar"):
        assert f" {panel} --" in text


def test_version(invoke):
    assert invoke("--version").stdout == f"specjax {specjax.__version__}\n"


def test_models(invoke):
    text = flat(invoke("models").stdout)
    for word in ("smollm2-135m", "Apache-2.0", "Hugging Face folder", "GGUF file", "llama"):
        assert word in text
    assert "draft_model model, draft_layers, quantize, num_speculative_tokens" in text
    assert all(f" {name} " in text for name in RULES)
    assert "typical_acceptance epsilon, delta, next_token" in text


def test_models_say_how_to_get_what_is_missing(invoke, monkeypatch):
    entry = entries()["smollm2-135m"]
    monkeypatch.setattr("specjax.checkpoints.available", lambda: [Availability(entry, None)])
    text = invoke("models").stdout
    assert all(word in flat(text) for word in entry.install.split())


def test_models_of_the_hub_come_with_their_drafters(invoke):
    text = flat(invoke("models").stdout)
    for name, entry in entries().items():
        assert f" {name} " in text
        assert all(f" {word} " in text for word in (*entry.drafters, entry.hub) if word)


# --- converting ------------------------------------------------------------------------------


def test_convert(invoke, folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    for source, words, path in [
        (folder, [], "folder"),
        (folder, ["--to", "orbax", "--dtype", "bfloat16"], "saved"),
        (str(bare), ["--to", "gguf", "--dtype", "q8_0"], "tiny.gguf"),
    ]:
        result = invoke("convert", source, str(tmp_path / path), *words)
        assert result.exit_code == 0, result.output
        assert re.fullmatch(rf"\S+{path}: [\d.]+ MB\n", result.stdout)
        made, wanted = checkpoints.read(tmp_path / path), checkpoints.read(source)
        assert (made.config, made.eos_ids) == (wanted.config, (256,))
        assert made.tokenizer == wanted.tokenizer


def test_convert_refuses_in_one_line(invoke, folder, tmp_path):
    for words, message in [
        ([folder, folder], "exists already and is not overwritten. Remove it"),
        ([str(tmp_path / "none"), str(tmp_path / "there")], "neither a known checkpoint"),
        ([folder, str(tmp_path / "there"), "--dtype", "q8_0"], "dtype must be one of float32"),
        ([folder, str(tmp_path / "there"), "--to", "gguf"], "the tokenizer has no merges"),
        (["qwen3-32b", str(tmp_path / "there")], "hf download Qwen/Qwen3-32B --local-dir DIR"),
    ]:
        result = invoke("convert", *words, env={"HF_HOME": str(tmp_path), "HF_HUB_CACHE": ""})
        assert result.exit_code == 2
        assert message in flat(result.stderr)
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "there").exists()


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plain", "--compare"], "with --plain there is no drafter"),
        (["--plain", "--drafter", "ngram"], "cannot go with --drafter"),
        (
            ["--plain", "--num-speculative-tokens", "3", "--draft-layers", "2"],
            "cannot go with --num-speculative-tokens, --draft-layers",
        ),
        (["--drafter", "ngrm"], "'ngrm' is neither a method (ngram, draft_model, eagle"),
        (["--drafter", "{method: ngram}"], "--drafter is not valid JSON"),
        (["--drafter", '{"num_speculative_tokens": 3}'], 'needs a "method", one of ngram'),
        (["--drafter", '{"method": ["ngram"]}'], 'needs a "method", one of ngram'),
        (["--drafter", "ngram", "--draft-layers", "2"], "goes only with --drafter draft_model"),
        (
            ["--drafter", '{"method": "draft_model", "draft_layers": 1}', "--draft-layers", "2"],
            "--draft-layers is 2, but --drafter says 1",
        ),
        (["--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["--num-speculative-tokens", "0"], "'--num-speculative-tokens'"),
        (["--temperature", "-1"], "'--temperature'"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--seed", str(2**32)], "4294967296 is not in the range"),
        (["--dtype", "float64"], "'float32', 'bfloat16', 'float16'"),
        (["--top-k", "-1"], "'--top-k'"),
        (["--top-p", "1.5"], "'--top-p'"),
        (["--acceptance", "{rule: spectr}"], "--acceptance is not valid JSON"),
        (["--plain", "--acceptance", "spectr"], "with --plain there are none"),
        (["--regex", "a", "--json-schema", "{}"], "cannot go together"),
        (["--json-schema", "{type: null}"], "--json-schema is not valid JSON"),
        (["--json-schema", "nowhere.json"], "'nowhere.json' is neither a file nor a JSON text"),
    ],
)
def test_bad_options(generate, words, message):
    result = generate(*words, code=2)
    assert message in flat(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafter", '{"method": "eagle9"}'], "drafter method 'eagle9' is not known"),
        (["--drafter", '{"method": "ngram", "model": "x"}'], "has no option 'model'"),
        (["--draft-layers", "2"], "draft_layers must be between 1 and 1, got 2"),
        (["--temperature", "inf"], "sampling.temperature must be finite"),
        (["--model", "nowhere"], "'nowhere' is neither a known checkpoint nor an existing path"),
        (["--acceptance", "spectre"], "acceptance rule 'spectre' is not known; known: spec"),
        (["--acceptance", '{"rule": "spectr", "k": 2}'], "'spectr' has no option 'k'"),
        (["--acceptance", "lenient_sampling"], "needs 'lenience'"),
        (["--repetition-penalty", "0"], "sampling.repetition_penalty must be finite and above 0"),
        (["--stop", ""], "stop has an empty text"),
        (["--regex", "a("], "wanted a regular expression"),
        (["--json-schema", '{"type": "nothing"}'], "outlines-core cannot make it a regular"),
    ],
)
def test_refusals_of_the_library_are_one_line(generate, words, message):
    result = generate(*words, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_grammar_without_its_package(generate, monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    result = generate("--json-schema", '{"type": "boolean"}', code=2)
    assert result.stderr.startswith("Error: regex and json_schema need the package outlines-core")
    assert result.stderr.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer(invoke, folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(folder) / name)
    result = invoke("generate", PROMPT, "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr


def test_an_unexpected_exception_passes_through(invoke, monkeypatch):
    def load(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("specjax.loading.load", load)
    assert isinstance(invoke("generate", PROMPT).exception, RuntimeError)


def test_logits_that_are_not_finite(invoke, folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(Path(folder) / name)
    weights = load_file(Path(folder) / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    words = ["--model", str(tmp_path), "--max-new-tokens", "40"]
    result = invoke("generate", PROMPT, *words)
    assert result.exit_code == 1
    assert "logits not finite" in flat(result.stderr)
    assert "Error: the model's logits were not finite" in result.stderr


# --- generating ------------------------------------------------------------------------------


def test_only_the_text_goes_to_standard_output(generate, folder):
    params = specjax.load(folder, drafter="ngram", dtype="float32")
    text = "".join(specjax.stream(params, PROMPT, max_new_tokens=40))
    result = generate("--dtype", "float32")
    assert result.stdout == text + "\n" * (not text.endswith("\n"))
    figures = flat(result.stderr)
    assert "tiny in float32 on cpu, prompt of 32 tokens" in figures
    assert "ngram, K = 5 tokens 40 rounds" in figures
    assert "ended by --max-new-tokens rule speculative_sampling lossless yes" in figures
    assert "speed-up" not in figures


def test_plain_decoding(generate):
    plain, drafted = generate("--plain"), generate()
    assert plain.stdout == drafted.stdout
    assert "tokens 40 rounds 40 tau, tokens a round 1.00 ms a round" in flat(plain.stderr)


def test_compare(generate):
    result = generate("--compare")
    figures = flat(result.stderr)
    assert "ngram, K = 5 plain tokens 40 40 rounds" in figures
    assert re.search(r"tokens/s [\d.]+ [\d.]+ speed-up [\d.]+x 1.00x", figures)
    assert "Texts: equal, all 40 tokens." in figures
    assert result.stdout == generate("--plain").stdout


def test_compare_at_a_temperature_claims_nothing_about_the_texts(generate):
    words = ["--compare", "--temperature", "1", "--seed", "7"]
    result = generate(*words)
    assert "two draws from the same law" in flat(result.stderr)
    assert "equal" not in flat(result.stderr)
    assert "Drawn with --seed 7." in result.stderr
    assert generate(*words).stdout == result.stdout


def test_a_fresh_seed_is_shown_and_repeats_the_run(generate):
    first = generate("--temperature", "1")
    seed = re.search(r"--seed (\d+)", first.stderr)[1]
    assert generate("--temperature", "1", "--seed", seed).stdout == first.stdout


def test_sampling_stops_and_a_rule(generate, folder):
    """As `stream` with the same options, up to a stop string."""
    sampling = specjax.Sampling(
        temperature=1.0,
        top_k=200,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        min_new_tokens=4,
        ignore_eos=True,
    )
    params = specjax.load(folder, drafter="ngram")
    options = {"sampling": sampling, "seed": 7, "max_new_tokens": 40}
    options["acceptance"] = accept.block_verification()
    free = "".join(specjax.stream(params, PROMPT, stop="not to be found", **options))
    pairs = [free[i : i + 2] for i in range(8, 30)]
    stops = [p for p in pairs if p.isascii() and p.isprintable() and free.find(p) >= 8][:2]
    words = (
        "--temperature 1 --top-k 200 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty -0.3 --min-new-tokens 4 --ignore-eos --seed 7 "
        "--acceptance block_verification"
    )
    result = generate(*words.split(), "--stop", stops[0], "--stop", stops[1])
    text = stopping.cut(free, stops)
    assert result.stdout == text + "\n" * (not text.endswith("\n"))
    figures = flat(result.stderr)
    assert "ended by stop sequence rule block_verification lossless yes" in figures
    assert "Drawn with --seed 7." in figures


def test_grammars(generate, tmp_path):
    pytest.importorskip("outlines_core")
    result = generate("--regex", "[a-c]{3,5}", "--acceptance", "traversal_verification")
    assert re.fullmatch("[a-c]{3,5}\n", result.stdout)
    figures = flat(result.stderr)
    assert "ended by end token rule traversal_verification lossless yes" in figures
    schema = '{"type": "boolean"}'
    file = tmp_path / "schema.json"
    file.write_text(schema)
    shown = generate("--json-schema", schema).stdout
    assert shown in ("true\n", "false\n")
    assert generate("--json-schema", str(file)).stdout == shown


def test_compare_with_a_lossy_rule(generate):
    rule = '{"rule": "synthetic_acceptance", "rates": [1, 1, 1]}'
    figures = flat(generate("--compare", "--seed", "3", "--acceptance", rule).stderr)
    assert "rule synthetic_acceptance - lossless no yes" in figures
    assert "Likely cause: the rule synthetic_acceptance is lossy." in figures
    assert "bug" not in figures
    assert "Drawn with --seed 3." in figures


@pytest.mark.parametrize(
    "words",
    [
        ["--draft-layers", "1", "--num-speculative-tokens", "3"],
        ["--drafter", "draft_model", "--draft-layers", "1", "--num-speculative-tokens", "3"],
        ["--drafter", "FOLDER", "--num-speculative-tokens", "3"],
        ["--drafter", '{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 3}'],
    ],
)
def test_draft_models(generate, folder, words):
    result = generate(*(word.replace("FOLDER", folder) for word in words))
    assert "draft_model, K = 3" in flat(result.stderr)
    assert result.stdout == generate("--plain").stdout


def test_a_perfect_draft_accepts_everything(generate, folder):
    figures = flat(generate("--drafter", folder, "--num-speculative-tokens", "3").stderr)
    assert "tokens 40 rounds 10 tau, tokens a round 4.00" in figures
    assert "% accepted, depth 1, 2, ... 100 100 100" in figures


def test_raw_and_standard_input(generate, invoke, folder):
    raw = generate("--raw")
    assert "prompt of 18 tokens" in raw.stderr
    words = ["generate", "-", "--raw", "--model", folder, "--max-new-tokens", "40"]
    assert invoke(*words, input=PROMPT).stdout == raw.stdout


# --- figures ---------------------------------------------------------------------------------


def finished(
    tokens: list[int], proposed=(), accepted=(), rule=None, status=Status.LENGTH
) -> running.Run:
    stats = Stats(
        rounds=np.array([4]),
        histogram=np.zeros((1, 1 + len(proposed))),
        proposed=np.array([proposed], np.int32),
        accepted=np.array([accepted], np.int32),
        hits=np.array([accepted], np.int32),
        rule="" if rule is None else rule.name,
        lossless=rule is None or rule.lossless,
    )
    result = DecodeResult(
        tokens=np.array([[*tokens, 0]]),
        lengths=np.array([len(tokens)]),
        status=np.array([status]),
        stats=stats,
    )
    return running.Run(result, running.Timing(tokens=6, rounds=3, seconds=2.0), 1.0)


def test_rates():
    timing = running.Timing(tokens=6, rounds=3, seconds=2.0)
    assert timing.tokens_per_second == 3.0
    assert timing.milliseconds_per_round == pytest.approx(2000 / 3)
    nothing = running.Timing(tokens=0, rounds=0, seconds=0.1)
    assert nothing.tokens_per_second is None
    assert nothing.milliseconds_per_round is None
    run = finished([1])
    assert showing.speed_up(run, run) == 1.0
    assert showing.speed_up(run, run._replace(timing=nothing)) is None


def test_acceptance_by_depth():
    run = finished([1, 2], proposed=[4, 2, 0], accepted=[3, 1, 0])
    assert showing.acceptance_by_depth(run.result.stats) == [0.75, 0.5, None]


@pytest.mark.parametrize(("dtype", "cause"), [("float32", "near tie"), ("bfloat16", "rounding")])
def test_texts_that_differ(dtype, cause):
    text = showing.same_text(finished([1, 2, 3]), finished([1, 5]), greedy=True, dtype=dtype).plain
    assert "differ from token 1 on (of 3 and 2" in text
    assert dtype in text
    assert cause in text


@pytest.mark.parametrize("greedy", [True, False])
def test_texts_of_a_lossy_rule(greedy):
    run = finished([1, 2, 3], rule=accept.typical_acceptance())
    text = showing.same_text(run, finished([1, 5]), greedy=greedy, dtype="float32").plain
    assert "the rule typical_acceptance is lossy" in text
    assert "bug" not in text
    assert "same law" not in text


@pytest.mark.parametrize(
    ("rule", "word"),
    [(accept.speculative_sampling(), "yes"), (accept.lenient_sampling(0.5), "no")],
)
def test_the_rule_and_whether_it_is_lossless(rule, word, capsys):
    from rich.console import Console

    runs = {"x": finished([1], [1], [1], rule=rule), "plain": finished([1])}
    Console().print(showing.run_table(runs))
    assert capsys.readouterr().out.split()[-6:] == ["rule", rule.name, "-", "lossless", word, "yes"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.EOS, "end token"),
        (Status.STOP, "stop sequence"),
        (Status.LENGTH, "--max-new-tokens"),
        (Status.CACHE_FULL, "context length"),
        (Status.NONFINITE, "logits not finite"),
    ],
)
def test_how_a_run_ended(status, words, capsys):
    from rich.console import Console

    Console().print(showing.run_table({"x": finished([1], status=status)}))
    assert f"ended by {words} rule" in flat(capsys.readouterr().out)


def test_measuring_takes_turns_and_stops_in_time(folder):
    params = specjax.load(folder, drafter="ngram")
    both = {"ngram": (params, {}), "plain": (params.replace(drafter=drafters.plain()), {})}
    ids = params.tokenizer.encode(PROMPT)
    runs, made = running.measure(both, ids, max_new_tokens=40)
    assert list(runs) == ["ngram", "plain"]
    assert made == 3
    assert runs["plain"].timing.tokens == runs["plain"].timing.rounds == 39
    _, made = running.measure(both, ids, enough=0.0, max_new_tokens=40)
    assert made == 1


# --- a terminal's lines ----------------------------------------------------------------------


def wrapped(text: str, width: int, size: int) -> str:
    wrap = WordWrap(width)
    pieces = [wrap.push(text[i : i + size]) for i in range(0, len(text), size)]
    return "".join(pieces) + wrap.flush()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_broken_between_words(size):
    text = "a bb ccc\n\n    dddd e ffffff g  h"
    assert wrapped(text, 8, size) == "a bb ccc\n\n    dddd\ne ffffff\ng  h"
    assert wrapped(text, 80, size) == text


def test_a_text_without_spaces_does_not_wait_for_its_end():
    wrap = WordWrap(80)
    assert wrap.push("字" * 30) == "字" * 30
    assert wrap.push("字" * 30) == "\n" + "字" * 30


# --- the process -----------------------------------------------------------------------------


def test_where_compiled_programs_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert process.cache_folder() == tmp_path / "specjax" / "xla"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert process.cache_folder() == Path.home() / ".cache" / "specjax" / "xla"


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what the tests' own settings put there."""
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    return {name: value for name, value in os.environ.items() if name not in ours} | changes


def test_as_a_process(generate, folder, tmp_path):
    """Piped: the text alone on stdout, no control characters, and a cache for the next run."""
    words = ["generate", PROMPT, "--model", folder, "--max-new-tokens", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "specjax", *words],
        env=environment(XDG_CACHE_HOME=str(tmp_path), PYTHONIOENCODING="utf-8"),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == generate().stdout
    assert b"\x1b" not in done.stderr
    assert b"\r" not in done.stderr
    assert list((tmp_path / "specjax" / "xla").iterdir())


def test_interrupt():
    """Ctrl-C ends the process even while the main thread is in compiled code, as XLA's is."""
    script = (
        "import hashlib, signal; from specjax.cli import process; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); process.stop_on_interrupt(); "
        "print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors == b""


@pytest.mark.smollm2
def test_demo():
    done = subprocess.run(
        [sys.executable, "-m", "specjax", "demo", "--dtype", "float32"],
        env=environment(JAX_COMPILATION_CACHE_DIR=jax.config.jax_compilation_cache_dir),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "The lighthouse stands on a rock" in done.stdout
    assert "Texts: equal, all 77 tokens." in done.stderr
    assert "rounds 11 77 tau, tokens a round 7.00 1.00" in flat(done.stderr)
