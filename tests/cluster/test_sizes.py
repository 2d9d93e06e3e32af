"""Memory of pools: little for a small model, and no more than is available."""
import contextlib, json, os, shutil, subprocess, tempfile, time

from harness import BUILD, DEMO, SLOW, TANDEM, Skip, main, test, wait_until, within

DECODE, STORE = os.path.join(BUILD, "decode/tandem-decode"), os.path.join(BUILD, "kvstore/tandem-kvstore")


def refuse(args, *words, env=None):
    """Checks that wrong use is refused in one line with these words, before anything is allocated. Returns
    the line."""
    with tempfile.TemporaryDirectory() as d:
        args = [*args, "--run-dir", os.path.join(d, "run"), "--listen", "127.0.0.1:0"] if "up" in args else args
        started = time.monotonic()
        child = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **env or {}))
        try:
            out, errors = child.communicate(timeout=60 * SLOW)
        finally:
            child.kill()
        took = time.monotonic() - started
    assert child.returncode == 2 and not out, (args, child.returncode, out, errors)
    lines = errors.strip().splitlines()
    assert len(lines) == 1 and all(w in lines[0] for w in words), (args, errors)
    # A second on an idle machine; to touch 900 GiB takes minutes anywhere.
    assert took < within(10), (args, took)
    return lines[0]


@test
def test_sizes_that_are_not_there_are_refused_at_once():
    said = refuse([DECODE, "--model", DEMO, "--pool-bytes", "900T"], "--pool-bytes", "900.0 TiB", "available (")
    print("#", said)
    refuse([DECODE, "--model", DEMO, "--pages", "4000000000"], "--pages", "119.2 TiB")
    refuse([DECODE, "--engine", "sim", "--model", DEMO, "--pool-bytes", "900T"], "--pool-bytes")
    refuse([DECODE, "--model", DEMO], "--pool-bytes", env={"TANDEM_DECODE_POOL_BYTES": "900T"})
    refuse([DECODE, "--model", DEMO, "--pool-bytes", "4096"], "--pool-bytes 4096: a page takes 32768")
    refuse([STORE, "--model", DEMO, "--dram-bytes", "100T"], "--dram-bytes", "100.0 TiB")
    refuse([TANDEM, "generate", "--local", "--model", DEMO, "--worker-options", "--pool-bytes 900T", "x"], "--pool-bytes", "900.0 TiB")


def share_of_memory(part):
    """A share of all memory of the machine, since the available memory changes while a test runs."""
    with open("/proc/meminfo") as f:
        return str(int(part * next(int(line.split()[1]) << 10 for line in f if line.startswith("MemTotal"))))


@test
def test_up_adds_up_what_its_processes_will_take():
    up, many = [TANDEM, "up", "--model", DEMO], ["--prefill", "16", "--decode", "16"]
    # 32 times this size, and twice this size, exceed the machine's memory.
    small, half = share_of_memory(0.07), share_of_memory(0.55)
    refuse([*up, "--pool-bytes", "900T"], "tandem up: --pool-bytes", "900.0 TiB")
    refuse([*up, "--store-dram", "900T"], "tandem up: --store-dram", "900.0 TiB")
    refuse([*up, "--pages", "4000000000"], "--pages")
    refuse([*up, *many, "--pool-bytes", small], "--pool-bytes", "with all 33 pools and the weights")
    refuse([*up, *many, "--no-store", "--pool-bytes", small], "--pool-bytes", "with all 32 pools")
    refuse([*up, *many], "--pool-bytes", "with all 33 pools", env={"TANDEM_PREFILL_POOL_BYTES": small, "TANDEM_DECODE_POOL_BYTES": small})
    refuse(up, "--store-dram", env={"TANDEM_KVSTORE_DRAM_BYTES": "900T"})
    refuse([*up, "--prefill", "0", "--pool-bytes", half, "--store-dram", half], "available (")
    refuse([TANDEM, "generate", "--local", "--model", DEMO, "--worker-options", "--pool-bytes " + half, "x"], "available (")


def pages(run_dir, address):
    out = subprocess.run([TANDEM, "status", "--json", "--router", address], capture_output=True, text=True, timeout=60 * SLOW)
    return {w["name"]: w["pages"]["total"] for w in json.loads(out.stdout)["workers"]}


@test
def test_pools_of_a_small_model_are_small():
    """Four contexts of 8192 tokens in pages of 16, and sixteen of them in the store; a worker that joins
    later has as many."""
    run_dir = tempfile.mkdtemp(prefix="tandem-up-")
    env = dict(os.environ, TANDEM_DECODE_PAGES="300")
    try:
        up = subprocess.run([TANDEM, "up", "--run-dir", run_dir, "--model", DEMO, "--listen", "127.0.0.1:0", "--detach"], env=env,
                            capture_output=True, text=True, timeout=60 * SLOW)
        assert up.returncode == 0, up.stderr
        with open(os.path.join(run_dir, "cluster.json")) as f:
            router = json.load(f)["router"]
        wait_until(lambda: pages(run_dir, router) == {"prefill-0": 2048, "decode-0": 300, "store-0": 8192}, 10,
                   lambda: str(pages(run_dir, router)))  # each worker reports them with its first heartbeat
        subprocess.run([TANDEM, "scale", "--run-dir", run_dir, "prefill=2"], check=True, capture_output=True, timeout=60 * SLOW)
        wait_until(lambda: pages(run_dir, router).get("prefill-1") == 2048, 30, lambda: str(pages(run_dir, router)))
    finally:
        subprocess.run([TANDEM, "down", "--run-dir", run_dir], timeout=60 * SLOW, capture_output=True)
        shutil.rmtree(run_dir)


@test
def test_small_model_in_one_process_takes_little_memory():
    started = time.monotonic()
    child = subprocess.Popen([TANDEM, "generate", "--local", "--model", DEMO, "--max-tokens", "4", "hello"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    print(f"# {usage.ru_maxrss >> 10} MiB at most, {time.monotonic() - started:.2f} s")
    assert child.returncode == 0
    if not os.environ.get("TANDEM_SANITIZE"):
        assert usage.ru_maxrss >> 10 < 400, usage.ru_maxrss  # with pools of 1 GiB each it was 2100


@contextlib.contextmanager
def cgroup(limit_bytes):
    """A memory cgroup with a limit, of either version. Yields a prefix of command lines that run in it."""
    name = f"tandem-test-{os.getpid()}"
    for path, limit in ((f"/sys/fs/cgroup/{name}", "memory.max"), (f"/sys/fs/cgroup/memory/{name}", "memory.limit_in_bytes")):
        try:
            os.mkdir(path)
            with open(os.path.join(path, limit), "r+") as f:  # its parent may be an ordinary directory
                f.write(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            continue
        try:
            yield ["sh", "-c", f'echo $$ > {path}/cgroup.procs && exec "$0" "$@"']
        finally:
            wait_until(lambda: not open(os.path.join(path, "cgroup.procs")).read(), 30, "the cgroup is empty")
            os.rmdir(path)
        return
    raise Skip("no memory cgroup can be made here")


@test
def test_limit_of_a_cgroup_counts():
    with cgroup(256 << 20) as inside:
        said = refuse([*inside, DECODE, "--model", DEMO, "--pool-bytes", "512M"], "--pool-bytes", "512.0 MiB", "tandem-test-")
        print("#", said)
        refuse([*inside, TANDEM, "generate", "--local", "--model", DEMO, "--worker-options", "--pool-bytes 200M", "x"], "with all 2 pools")
        read, write = os.pipe()
        child = subprocess.Popen([*inside, DECODE, "--model", DEMO, "--listen", "127.0.0.1:0"], stderr=subprocess.DEVNULL,
                                 env=dict(os.environ, TANDEM_READY_FD=str(write)), pass_fds=[write])
        os.close(write)
        try:
            with os.fdopen(read) as f:
                assert f.readline(), "with a default pool it starts"
            child.terminate()
            assert child.wait(60 * SLOW) == 0
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
