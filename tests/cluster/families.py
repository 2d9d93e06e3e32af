"""Small models of several families (tests/model/golden) in a cluster: shared by the suites that serve them.
"""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

GOLDEN = os.path.join(SOURCE, "tests/model/golden")
_dirs = {}


def model(name):
    """A directory with the model and a tokenizer, which the router needs; the requests here are token ids."""
    if name not in _dirs:
        _dirs[name] = tempfile.mkdtemp(prefix="tandem-family-")
        atexit.register(shutil.rmtree, _dirs[name], True)
        for f in os.listdir(os.path.join(GOLDEN, name)):
            os.symlink(os.path.join(GOLDEN, name, f), os.path.join(_dirs[name], f))
        os.symlink(os.path.join(DEMO, "tokenizer.json"), os.path.join(_dirs[name], "tokenizer.json"))
    return _dirs[name]


def reference(name):
    return golden(os.path.join(GOLDEN, name, "golden.json"))


def own_requests(n=12, max_tokens=60):
    """Requests longer than any window. Every other one begins with the same tokens; some are greedy, some
    seeded."""
    rnd = random.Random(5)
    shared = [rnd.randrange(2, 128) for _ in range(96)]
    out = []
    for i in range(n):
        ids = shared[:64 if i % 2 else 0] + [rnd.randrange(2, 128) for _ in range(20 + 9 * i)]
        how = {"greedy": True} if i % 3 else {"temperature": 1.0, "top_p": 0.9, "seed": i}
        out.append({"id": f"own{i}", "prompt_ids": ids, "max_tokens": max_tokens, "ignore_eos": True, **how})
    return out


def tokens(results):
    return {k: (r["token_ids"], r["logprobs"]) for k, r in results.items() if k.startswith("own")}


def alone(name, requests):
    with Cluster(model=model(name), prefill=0, decode=1) as c:
        return tokens(c.generate(requests, ["--concurrency", "1"]))
