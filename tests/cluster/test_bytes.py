"""KV bytes in status agree with the counters of the network interface, in a network namespace of its own over
TCP."""
import os, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


def interface_bytes(wrap):
    out = subprocess.run([*wrap, "ip", "-s", "-j", "link", "show", "lo"], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)[0]["stats64"]["tx"]["bytes"]


@test
def test_status_agrees_with_the_interface():
    with network() as wrap, Cluster(plan="split", wrap=wrap, worker_args=["--transports", "tcp"]) as c:
        requests = [{"id": str(i), "prompt_ids": [(i * 31 + j) % 1500 for j in range(3000)], "max_tokens": 2,
                     "ignore_eos": True, "greedy": True} for i in range(20)]
        c.generate(requests[:2])
        wait_until(lambda: sum(w["kv_bytes_in"] for w in c.status()["workers"]) > 0, 5, "bytes")
        time.sleep(0.6)
        kv0, if0 = sum(w["kv_bytes_in"] for w in c.status()["workers"]), interface_bytes(wrap)
        c.generate(requests[2:])
        time.sleep(0.6)
        status = c.status()
        kv1, if1 = sum(w["kv_bytes_in"] for w in status["workers"]), interface_bytes(wrap)
        out = sum(w["kv_bytes_out"] for w in status["workers"])
        assert all("tcp" in w["transport"] for w in status["workers"] if w["role"] != "store"), status
        moved, seen = kv1 - kv0, if1 - if0
        print(f"# status {moved} bytes, interface {seen} bytes, ratio {seen / moved:.4f}, sent {out}, received {kv1}")
        assert kv1 == out
        assert 1.0 <= seen / moved <= 1.05
        c.audit()


main()
