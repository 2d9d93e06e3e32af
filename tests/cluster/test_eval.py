"""tandem eval: its figures are those of the same windows scored one by one, whatever the load."""
import json, math, os, random, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, pb, request

with open(os.path.join(DEMO, "..", "stories.py"), "rb") as f:
    TEXT = (b"Once upon a time there was a small dog. It liked the sun. " * 30 + f.read())[:6000].decode("utf-8", "ignore")


def evaluate(c, text, *args, ok=True):
    with tempfile.NamedTemporaryFile("wb") as f:
        f.write(text if isinstance(text, bytes) else text.encode())
        f.flush()
        out = subprocess.run([TANDEM, "eval", "--router", c.router.address, *args, f.name], capture_output=True, text=True, timeout=120 * SLOW)
    assert out.returncode == (0 if ok else 1 if ok is False else ok), out
    return (json.loads(out.stdout) if "--json" in args else out.stdout) if ok is True else out.stderr


def by_hand(client, text, context, stride, limit=None):
    """Sums of -log p and of first ranks over windows, and their number."""
    ids = list(client.tokenize(pb.TokenizeRequest(text=text, add_special_tokens=True)).ids)[:limit]
    end, begin, nats, first, n = 0, 0, 0.0, 0, 0
    while end < len(ids):
        done, end = max(end, 1), min(begin + context, len(ids))
        e = client.all(request(ids=ids[begin:end], max_tokens=0, want_prompt_logprobs=True))[2]
        scored = range(done - begin, end - begin)
        nats -= sum(e.prompt_logprobs[i] for i in scored)
        first += sum(e.prompt_ranks[i] == 1 for i in scored)
        n += len(scored)
        begin += stride
    return nats, first, n, len(ids)


@test
def test_perplexity_is_that_of_windows_scored_by_hand():
    with Cluster(prefill=2, decode=1) as c:
        client = Client(c.router.address)
        for context, stride, limit in ((64, 32, None), (100, 99, None), (50, 1, 120), (256, 100, 700), (64, 32, 65), (64, 32, 2)):
            args = ["--context", str(context), "--stride", str(stride), "--json", *(["--limit", str(limit)] if limit else [])]
            got = evaluate(c, TEXT, *args)
            nats, first, n, n_ids = by_hand(client, TEXT, context, stride, limit)
            assert (got["tokens"], got["scored"], n) == (n_ids, n_ids - 1, n_ids - 1), (got, n, n_ids)
            assert math.isclose(got["perplexity"], math.exp(nats / n), rel_tol=1e-6), (got, math.exp(nats / n))
            assert math.isclose(got["most_probable"], first / n, rel_tol=1e-6), (got, first / n)
            if not limit:
                assert math.isclose(got["bits_per_byte"], nats / math.log(2) / len(TEXT.encode()), rel_tol=1e-6), got
        said = evaluate(c, TEXT)
        assert re.search(r"perplexity +\d+\.\d+ \+- \d", said) and "bits per byte" in said, said
        few = evaluate(c, TEXT, "--concurrency", "1", "--json")
        many = evaluate(c, TEXT, "--concurrency", "64", "--json")
        assert few == {**many, "file": few["file"]}, (few, many)
        c.audit()


@test
def test_refusals_are_waited_for_and_errors_named():
    with Cluster(router_args=["--queue-requests", "2", "--max-calls", "3"]) as c:
        began = time.monotonic()
        alone = evaluate(c, TEXT, "--context", "64", "--concurrency", "1", "--json")
        alone_took, began = time.monotonic() - began, time.monotonic()
        busy = evaluate(c, TEXT, "--context", "64", "--concurrency", "64", "--json")
        took = time.monotonic() - began
        assert busy["scored"] == busy["tokens"] - 1 and busy["perplexity"] == alone["perplexity"], (busy, alone)
        assert took < 3 * alone_took + 1, (took, alone_took)  # it goes on at what the router takes
        assert "perplexity" in evaluate(c, TEXT, "--context", "64", "--stride", "8", "--limit", "300")
        assert "fewer than two tokens" in evaluate(c, "", ok=False)
        missing = subprocess.run([TANDEM, "eval", "/nonexistent"], capture_output=True, text=True)
        assert missing.returncode == 1 and "/nonexistent: No such file" in missing.stderr, missing
        assert "UTF-8" in evaluate(c, b"abc\xff\xfe", ok=False)
        assert "--context" in evaluate(c, TEXT, "--context", "1000000", ok=False)
        assert "stride" in evaluate(c, TEXT, "--context", "64", "--stride", "64", ok=False)
        assert "lora" in evaluate(c, TEXT, "--lora", "nothing", ok=False)


@test
def test_a_text_longer_than_the_context_goes_in_pieces():
    """Pieces end behind lines, where the demo model's tokens end, too: as if it were one."""
    lines = "".join(f"Line {random.Random(i).randrange(10 ** 9)} of many.\n" + "\n" * (i % 3) for i in range(3000))
    out = subprocess.run([TANDEM, "tokenize", "--tokenizer", DEMO, "--jsonl"], input=json.dumps({"text": lines}) + "\n", capture_output=True,
                         text=True, timeout=60)
    with Cluster() as c:
        got = evaluate(c, lines, "--context", "512", "--json")
    assert got["tokens"] == len(json.loads(out.stdout)["ids"]) > 16384 and got["scored"] == got["tokens"] - 1, got


if __name__ == "__main__":
    main()
