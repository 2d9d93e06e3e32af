"""Signals of server processes, from their first moment on; and a cluster whose run directory is gone."""
import os, shutil, signal, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

BINARIES = {"prefill": "prefill/tandem-prefill", "decode": "decode/tandem-decode", "router": "router/tandem-router",
            "store": "kvstore/tandem-kvstore"}
LARGE = "layers=16,heads=16,kv_heads=16,head_dim=64,hidden=1024,ffn=4096,vocab=32000"  # takes a second and longer to open


def takes_signals(pid):
    try:
        return any(open(f"/proc/{pid}/task/{t}/comm").read() == "signals\n" for t in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return False


@test
def test_a_start_can_be_interrupted():
    for sig in (signal.SIGINT, signal.SIGTERM):
        child = subprocess.Popen([os.path.join(BUILD, BINARIES["decode"]), "--dummy", LARGE, "--listen", "127.0.0.1:0", "--pool-bytes",
                                  "256M"], stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: takes_signals(child.pid), 10, "it takes signals")
            child.send_signal(signal.SIGHUP)  # means nothing
            child.send_signal(sig)
            _, err = child.communicate(timeout=30 * SLOW)
            assert child.returncode == 128 + sig and "tandem-decode: ended by signal" in err, (child.returncode, err)
        finally:
            child.kill()


@test
def test_other_signals_change_nothing():
    with Cluster(store=True) as c:
        for p in [c.router, *c.workers]:
            for sig in (signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1, signal.SIGPIPE):
                p.kill(sig)
        assert "error" not in c.generate([{"id": "x", "prompt_ids": [1, 2, 3], "max_tokens": 3}])["x"]
        for p in [c.router, *c.workers]:
            p.child.terminate()
            assert p.child.wait(20 * SLOW) == 0, c.log(p.name)


@test
def test_a_named_pipe_is_no_configuration():
    with tempfile.TemporaryDirectory() as d:
        pipe = os.path.join(d, "pipe")
        os.mkfifo(pipe)
        for binary in BINARIES.values():
            out = subprocess.run([os.path.join(BUILD, binary), "--config", pipe], capture_output=True, text=True, timeout=10 * SLOW)
            assert out.returncode == 2 and "named pipe" in out.stderr, out
        out = subprocess.run(["bash", "-c", f"{TANDEM} simulate --config <(echo '{{\"prefill\": 3}}') --print-config"],
                             capture_output=True, text=True, timeout=10 * SLOW)
        assert out.returncode == 0 and json.loads(out.stdout)["prefill"] == 3, out


@test
def test_down_finds_a_cluster_whose_run_directory_is_gone():
    top = tempfile.mkdtemp(prefix="tandem-up-")
    run_dir, pids = os.path.join(top, "run"), []
    try:
        out = subprocess.run([TANDEM, "up", "--model", DEMO, "--run-dir", run_dir, "--listen", "127.0.0.1:0", "--detach", "--no-store",
                              "--pool-bytes", "8M"], capture_output=True, text=True, timeout=60 * SLOW)
        assert out.returncode == 0, out.stderr
        with open(os.path.join(run_dir, "cluster.json")) as f:
            cluster = json.load(f)
        pids = [cluster["pid"], *(p["pid"] for p in cluster["processes"])]
        shutil.rmtree(run_dir)
        out = subprocess.run([TANDEM, "down", "--run-dir", run_dir], capture_output=True, text=True, timeout=60 * SLOW)
        assert out.returncode == 0 and "tandem is down" in out.stderr, out
        wait_until(lambda: not any(alive(pid) for pid in pids), 5, "all have ended")
        out = subprocess.run([TANDEM, "down", "--run-dir", run_dir], capture_output=True, text=True, timeout=60 * SLOW)
        assert out.returncode == 0 and "nothing runs" in out.stderr, out
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(top, ignore_errors=True)


main()
