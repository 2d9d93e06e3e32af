"""Within five seconds of quiet the router's index is what workers and stores hold, whatever happened to the
events on their way.

One in twenty of the first 400 messages that every worker and store sends after its start is dropped, doubled
or sent after the next one, while workers, the store and the router are killed and started again, or frozen
for longer than they may be silent.

TANDEM_LONG=replan: 60 rounds, a quarter of an hour. The default suite prints the time, and takes 15 s.
"""
import collections, os, sys, threading
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, grpc, request

LONG = os.environ.get("TANDEM_LONG") in ("replan", "all")
ROUNDS = 60 if LONG else 4
FAULTS = "seed=5" + "".join(f" rpc.message:{kind}@1-400" for kind in ("drop=0.02", "duplicate=0.015", "reorder=0.015"))
QUIET_S = 5 if LONG else 15  # the default suite runs beside programs that take every core
DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536"


class Load:
    """Prompts with shared heads in small pools, so that blocks come and go. Calls may fail here."""

    def __init__(self, address):
        self.address, self.stop, self.codes = address, threading.Event(), collections.Counter()
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(4)]
        for t in self.threads:
            t.start()

    def run(self, i):
        client, rnd = Client(self.address), random.Random(i)
        while not self.stop.is_set():
            head = random.Random(rnd.randrange(30))
            prompt = [head.randrange(1500) for _ in range(320)] + [rnd.randrange(1500) for _ in range(80)]
            try:
                for _ in client.generate(request(ids=prompt, max_tokens=4, stopping__ignore_eos=True), timeout=20):
                    pass
                self.codes["OK"] += 1
            except grpc.RpcError as e:
                self.codes[e.code().name] += 1

    def finish(self):
        self.stop.set()
        for t in self.threads:
            t.join(30)
        assert not any(t.is_alive() for t in self.threads)


def strike(c, n):
    """Kills a process and starts it again, or freezes it for longer than it may be silent."""
    victim = (c["prefill-0"], c["decode-0"], c["store-0"], c.router)[n % 4]
    if n % 8 >= 4 and victim is not c.router:
        victim.kill(signal.SIGSTOP)
        time.sleep(1.5 * SLOW)
        victim.kill(signal.SIGCONT)
        return
    victim.kill()
    victim.child.wait()
    victim.start()


@test
def test_index_is_what_is_held_within_five_seconds_of_quiet():
    took, codes = [], collections.Counter()
    with Cluster(dummy=DIMS, prefill=2, decode=2, store=True, plan="auto",
                 worker_args=["--engine", "sim", "--pages", "300", "--sim-prefill", "500,5,0", "--sim-decode", "500,0,5", "--faults", FAULTS],
                 store_args=["--dram-bytes", "2M", "--ssd-bytes", "16M", "--faults", FAULTS],
                 router_args=["--replan-burst", "100000"]) as c:
        blocks = 0
        for n in range(ROUNDS):
            load = Load(c.router.address)
            time.sleep(3)
            strike(c, n)
            time.sleep(1)
            load.finish()
            codes.update(load.codes)
            began = time.monotonic()
            last = None

            def agrees():
                nonlocal last
                try:
                    code, last = c.account()
                except AssertionError as e:
                    last = str(e)
                    return False
                return code == 0 and last["ok"]
            wait_until(agrees, QUIET_S if LONG else QUIET_S * crowded(), lambda: f"round {n}: {last}")
            took.append(time.monotonic() - began)
            blocks += sum(w["blocks"] for w in last["workers"])
    took.sort()
    print(f"# {ROUNDS} rounds, calls {dict(codes)}; whole after {took[len(took) // 2]:.2f} s (median), {took[-1]:.2f} s at most; "
          f"{blocks} blocks compared")
    assert codes["OK"] > 10 * ROUNDS and blocks > 100 * ROUNDS, (codes, blocks)


if __name__ == "__main__":
    main()
