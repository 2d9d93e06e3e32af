"""Signals of server processes, from their first moment on; and a cluster whose run directory is gone."""
import os, re, resource, shutil, signal, subprocess, sys, tempfile, time
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

BINARIES = {"prefill": "prefill/tandem-prefill", "decode": "decode/tandem-decode", "router": "router/tandem-router",
            "store": "kvstore/tandem-kvstore"}
# Takes a second or longer to open.
LARGE = "layers=16,heads=16,kv_heads=16,head_dim=64,hidden=1024,ffn=4096,vocab=32000"


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
            child.send_signal(signal.SIGHUP)  # SIGHUP has no effect
            child.send_signal(sig)
            _, err = child.communicate(timeout=30 * SLOW)
            assert child.returncode == 128 + sig and "tandem-decode: ended by signal" in err, (child.returncode, err)
        finally:
            child.kill()


@test
def test_nothing_is_printed_into_files_when_standard_files_are_closed():
    with tempfile.TemporaryDirectory() as d:
        for role, args in (("decode", ["--pool-bytes", "8M"]), ("store", ["--dram-bytes", "8M", "--dir", d]),
                           ("router", ["--workers", "127.0.0.1:1"])):
            binary = os.path.join(BUILD, BINARIES[role])
            read, write = os.pipe()
            child = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", binary, "--model", DEMO, "--listen", "127.0.0.1:0", *args],
                                     env=dict(os.environ, TANDEM_READY_FD=str(write)), pass_fds=[write])
            try:
                os.close(write)
                with os.fdopen(read) as f:
                    assert f.readline(), role + " did not start"
                files = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in range(3)]
                assert files == ["/dev/null"] * 3, (role, files)
                child.terminate()
                assert child.wait(30 * SLOW) == 0, role
            finally:
                child.kill()
    closed = subprocess.run(["sh", "-c", 'exec "$0" --version >&-', TANDEM], stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 1 and "standard output can't be written" in closed.stderr, closed


@test
def test_a_limit_of_the_size_of_files_is_an_error_of_writing_and_no_death():
    def few_bytes():
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as d:
        up = subprocess.run([TANDEM, "up", "--model", DEMO, "--run-dir", d, "--listen", "127.0.0.1:0", "--detach", "--pool-bytes", "8M",
                             "--store-dram", "8M", "--no-packed-cache"], preexec_fn=few_bytes, capture_output=True, text=True, timeout=60 * SLOW)
        try:
            assert up.returncode == 0, up.stderr
            with open(os.path.join(d, "router.address")) as f:
                router = f.read().strip()
            asked = "".join(json.dumps({"id": str(i), "prompt_ids": [5 + i] * 200, "max_tokens": 2}) + "\n" for i in range(40))
            out = subprocess.run([TANDEM, "generate", "--jsonl", "--router", router], input=asked, capture_output=True, text=True, timeout=60 * SLOW)
            assert out.returncode == 0 and "error" not in out.stdout, out.stderr

            def store_failed():
                with open(os.path.join(d, "logs/store-0.log")) as f:
                    return "SSD tier doesn't take writes" in f.read()
            wait_until(store_failed, 20, "the store can't write what it was offered")
            with open(os.path.join(d, "cluster.json")) as f:
                assert all(p["restarts"] == 0 for p in json.load(f)["processes"])
        finally:
            down = subprocess.run([TANDEM, "down", "--run-dir", d], capture_output=True, text=True, timeout=60 * SLOW)
        assert down.returncode == 0, down.stderr


def worker(*args):
    return subprocess.Popen([os.path.join(BUILD, BINARIES["decode"]), "--dummy", LARGE.replace("layers=16", "layers=40"), "--listen", "127.0.0.1:0",
                             "--pool-bytes", "64M", "--threads", "1", *args], stderr=subprocess.PIPE, text=True)


@test
def test_a_long_load_says_how_far_it_is_and_ends_at_once():
    took = []
    for _ in range(3):
        child = worker()
        try:
            line, told = "", []
            while "loading percent=" not in line:
                line = child.stderr.readline()
                assert line and " ready " not in line, "it loaded without a word"
            began = time.monotonic()
            child.terminate()
            _, err = child.communicate(timeout=30 * SLOW)
            took.append(time.monotonic() - began)
            assert child.returncode == 128 + signal.SIGTERM and "ended by signal" in err, (child.returncode, err)
        finally:
            child.kill()
    assert min(took) < 1, took  # best of three: the machine may be busy
    child = worker("--weights", "int8")  # this takes longer
    try:
        said = []
        for line in child.stderr:
            said.append((time.monotonic(), line))
            if " ready " in line:
                break
        shares = [int(re.search(r"percent=(\d+)", line).group(1)) for _, line in said if " loading " in line]
        assert shares and shares == sorted(shares) and shares[-1] <= 100, said
        assert len(shares) <= said[-1][0] - said[0][0] + 2, "at most one line each second"
    finally:
        child.terminate()
        child.communicate(timeout=30 * SLOW)


@test
def test_up_says_how_far_loading_is_and_can_be_interrupted():
    run_dir = tempfile.mkdtemp(prefix="tandem-up-")
    up = subprocess.Popen([TANDEM, "up", "--model", DEMO, "--dummy", LARGE.replace("layers=16", "layers=40"), "--no-store", "--run-dir", run_dir,
                           "--listen", "127.0.0.1:0", "--threads", "2", "--pool-bytes", "64M"], stderr=subprocess.PIPE, text=True)
    try:
        line = ""
        while " loading percent=" not in line:
            line = up.stderr.readline()
            assert line, "it ended"
        began = time.monotonic()
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=30 * SLOW)
        assert time.monotonic() - began < within(5), "it waited for the load"
        assert up.returncode == 1
    finally:
        up.terminate()
        shutil.rmtree(run_dir, ignore_errors=True)


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
