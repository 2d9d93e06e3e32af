"""tandem audit: every page and block is accounted for, at rest, under load and after faults; it reports those
that are not."""
import os, sys, threading
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


@test
def test_audit_holds_while_requests_run():
    with Cluster(prefill=2, decode=2, store=True, plan="split", worker_args=["--chunk-tokens", "32", "--pages", "400"]) as c:
        rnd = random.Random(3)
        requests = [{"id": str(i), "prompt_ids": [rnd.randrange(1500) for _ in range(rnd.choice((30, 300, 1200)))],
                     "max_tokens": 60, "greedy": True, "ignore_eos": True} for i in range(60)]
        done = []
        t = threading.Thread(target=lambda: done.append(c.generate(requests)))
        t.start()
        busy = 0
        while t.is_alive():
            code, report = c.account()
            assert code == 0 and report["ok"], report
            busy += report["running"] > 0 and sum(w["legs"] for w in report["workers"]) > 0
            for w in report["workers"]:
                p = w["pages"]
                assert p["free"] + p["cached"] + p["held"] + p["leased"] + p["quarantined"] == p["total"], w
        t.join()
        assert done and busy >= 3, busy
        c.audit()
        _, report = c.account()
        assert not report["running"]
        assert all(w["blocks"] == w["index_blocks"] > 0 for w in report["workers"]), report
        def rests():  # the last generated blocks are still on their way to the store
            return all(not w["legs"] and not w["leases"] and not w["pulls"] for w in c.account()[1]["workers"])
        wait_until(rests, 10, lambda: f"nothing moves: {c.account()}")


@test
def test_audit_tells_who_does_not_answer():
    with Cluster(plan="split", router_args=["--silence-ms", "60000"]) as c:
        c["decode-0"].kill(signal.SIGSTOP)
        try:
            code, report = c.account()
        finally:
            c["decode-0"].kill(signal.SIGCONT)
        assert code == 1 and not report["ok"]
        problems = {w["name"]: w["problems"] for w in report["workers"]}
        assert problems == {"prefill-0": [], "decode-0": ["it does not answer"]}, problems
        wait_until(lambda: c.account()[0] == 0, 10, "the audit is clean again")


main()
