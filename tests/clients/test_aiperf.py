"""aiperf from PyPI, unmodified, against `tandem up`: over each API that both know, whole and streamed, with
prompts that share prefixes or not. Its own counts must agree with what it asked for.
Skipped by name where PyPI can't be reached."""
import json, os, subprocess, sys, tempfile
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("gateway", "cluster")]
from harness import *
from pypi import python_with
from up import Up

PROMPT, ANSWER, REQUESTS = 60, 20, 24  # tokens


def aiperf(up, endpoint, *more, requests=REQUESTS):
    """What it counted, by its names."""
    with tempfile.TemporaryDirectory() as d:
        done = subprocess.run([os.path.join(os.path.dirname(PYTHON), "aiperf"), "profile", "-m", "tandem-demo", "--tokenizer", DEMO, "--url", up.url,
                               "--endpoint-type", endpoint, "--concurrency", "4", "--ui", "none", "--artifact-dir", d, *more],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300 * SLOW,
                              env={k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))})
        assert done.returncode == 0, done.stdout
        with open(os.path.join(d, "profile_export_aiperf.json")) as f:
            found = json.load(f)
    counts = {k: v["avg"] for k, v in found.items() if isinstance(v, dict) and "avg" in v}
    assert counts["request_count"] == requests and not counts["request_error_rate"] and not found["error_summary"], (endpoint, more, counts)
    return counts


@test
def test_every_api_that_both_know():
    made = ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER)]
    whole = ["--extra-inputs", "ignore_eos:true"]  # not known to the other two APIs
    with Up(DEMO) as up:
        for endpoint, also in (("chat", whole), ("completions", whole), ("responses", []), ("messages", [])):
            for more in ([], ["--streaming"]):
                n = aiperf(up, endpoint, *made, *also, *more)
                assert not more or 0 < n["time_to_first_token"] < n["request_latency"], (endpoint, n)
                if endpoint == "responses" and more:
                    continue  # it does not read the usage of a streamed answer that was cut
                most = REQUESTS * ANSWER
                assert (most if also else most / 2) <= n["total_usage_completion_tokens"] <= most, (endpoint, more, n)
                assert n["total_usage_prompt_tokens"] >= REQUESTS * PROMPT, (endpoint, more, n)
        n = aiperf(up, "chat", *made, *whole, "--streaming", "--use-server-token-count", "--per-chunk-usage")
        assert n["output_sequence_length"] == ANSWER and n["input_sequence_length"] >= PROMPT, n
        aiperf(up, "chat", *made, "--use-legacy-max-tokens", "--wait-for-model-timeout", "20", "--wait-for-model-mode", "both")


@test
def test_prompts_that_share_prefixes():
    """Not with a trace of Mooncake, for which aiperf finds tokenizers at their hub only."""
    with Up(DEMO) as up:
        n = aiperf(up, "completions", "--streaming", "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", str(PROMPT),
                   "--output-tokens-mean", "4", "--num-prefix-prompts", "2", "--prefix-prompt-length", "512")
        assert n["total_usage_prompt_cache_read_tokens"] > 0.7 * REQUESTS * 512, n


if __name__ == "__main__":
    if os.environ.get("TANDEM_LONG") not in ("harness", "all"):
        print("1..0 # SKIP aiperf: only with --long harness")
        sys.exit(0)
    PYTHON = python_with("aiperf")
    if not PYTHON:
        print("1..0 # SKIP aiperf can't be had from PyPI")
        sys.exit(0)
    main()
