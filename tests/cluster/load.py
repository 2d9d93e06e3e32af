"""Clients that keep requests in flight at routers, and compare every answer with that of a single process.

Prompts of a long run (TANDEM_LONG) are twice as long. TANDEM_PROMPTS=100,300,1000: lengths of prompts, for a
slow machine.
"""
import collections, os, random, threading, time
from client import Client, grpc, request
from harness import SLOW

KINDS = 3  # prompts of each client
LONG = os.environ.get("TANDEM_LONG") in ("faults", "chaos", "pools", "all")
LENGTHS = [int(n) for n in os.environ.get("TANDEM_PROMPTS", "100,300,700" if SLOW > 1 else "200,2000,5000" if LONG
                                          else "200,1000,2500").split(",")]


class Load:
    """addresses: routers, among which the clients are divided."""

    def __init__(self, addresses, n, cached=True):
        self.addresses, self.n, self.stop, self.cached = addresses, n, threading.Event(), cached
        self.lock, self.flying, self.wrong, self.codes = threading.Lock(), {}, [], collections.Counter()
        # Failed: (began, ended) of each failed call.
        self.want, self.failed, self.texts, self.slowest = {}, [], collections.Counter(), 0
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(n)]

    def prompt(self, i, k):
        rnd = random.Random(i * 7919 + k % KINDS)
        return [rnd.randrange(1500) for _ in range(rnd.choice(LENGTHS))]

    def reference(self, cluster):
        results = cluster.generate([{"id": f"{i}.{k}", "prompt_ids": self.prompt(i, k), "max_tokens": 100, "greedy": True,
                                     "ignore_eos": True} for i in range(self.n) for k in range(KINDS)])
        self.want = {tuple(map(int, id.split("."))): r["token_ids"] for id, r in results.items()}

    def salt(self, i, k):
        return b"" if self.cached else b"%d.%d" % (i, k)  # without a cache every call has a salt of its own

    def start(self):
        for t in self.threads:
            t.start()

    def run(self, i):
        client, k = Client(self.addresses[i % len(self.addresses)]), 0
        while not self.stop.is_set():
            with self.lock:
                self.flying[i] = [time.monotonic(), "prefill"]
            ids, code = [], "OK"
            want = self.want[i, k % KINDS]
            try:
                for m in client.generate(request(ids=self.prompt(i, k), max_tokens=100, stopping__ignore_eos=True, cache_salt=self.salt(i, k)),
                                         timeout=60):
                    ids += [t.id for t in m.tokens]
                    self.flying[i][1] = "decode"
            except grpc.RpcError as e:
                code = e.code().name
                self.texts[code, e.details()[:80]] += 1
            if ids != (want if code == "OK" else want[:len(ids)]):
                self.wrong.append((i, k, code, ids[:5], want[:5]))
            with self.lock:
                self.codes[code] += 1
                began, _ = self.flying.pop(i)
                self.slowest = max(self.slowest, time.monotonic() - began)
                if code != "OK":
                    self.failed.append((began, time.monotonic()))
            k += 1
            if code != "OK":
                time.sleep(0.02)

    def check(self, limit):
        """Checks that there was no wrong token so far, and that no call hangs."""
        assert not self.wrong, self.wrong[:3]
        with self.lock:
            old = [(i, time.monotonic() - v[0], v[1]) for i, v in self.flying.items() if time.monotonic() - v[0] > limit]
        assert not old, f"calls that don't end: {old}"

    def finish(self):
        self.stop.set()
        for t in self.threads:
            t.join(60)
        assert not any(t.is_alive() for t in self.threads), f"calls that don't end: {self.flying}"
        self.check(0)
