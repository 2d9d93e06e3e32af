"""What a cluster leaves for others on its host: no file that they can read, no prompt in a log, no KV in a
core dump. And it needs no privilege itself."""
import fcntl, glob, os, socket, stat, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from harness import *

PRIVATE = "The patient in room twelve is called Ottilie Rumpelmayer"
NOBODY = 65534


def mappings(pid):
    """(size in bytes, flags) of each mapping of a process."""
    size, found = 0, []
    with open(f"/proc/{pid}/smaps") as f:
        for line in f:
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("VmFlags:"):
                found.append((size, line.split()[1:]))
    return found


def cluster():
    return Cluster(plan="split", store=True, worker_args=["--pool-bytes", "32M", "--log-level", "debug"],
                   store_args=["--dram-bytes", "32M", "--log-level", "debug"], router_args=["--log-level", "debug"])


@test
def test_a_run_directory_of_others_is_not_used():
    """Whoever makes /tmp/tandem-UID first must not decide which processes our commands send signals to."""
    if os.geteuid():
        raise Skip("only root can make files of another user")
    with tempfile.TemporaryDirectory() as d:
        run, precious = os.path.join(d, "run"), os.path.join(d, "precious")
        ours = subprocess.Popen(["sleep", "60"])
        try:
            for owner, mode, why in ((NOBODY, 0o700, f"belongs to another user (uid {NOBODY})"),
                                     (os.geteuid(), 0o777, "others may write into it"),
                                     (None, None, "is no directory")):
                if owner is None:
                    os.rename(run, run + "-real")
                    os.symlink(run + "-real", run)
                else:
                    os.makedirs(run, exist_ok=True)
                    os.chmod(run, mode)
                    os.chown(run, owner, owner)
                with open(precious, "w") as f:
                    f.write("work\n")
                if not os.path.lexists(run + "/scale.new"):
                    os.symlink(precious, run + "/scale.new")
                with open(run + "/cluster.json", "w") as f:
                    f.write(json.dumps({"processes": [{"name": "decode-0", "pid": ours.pid}]}))
                with open(run + "/up.pid", "w") as pid:
                    pid.write(f"{ours.pid}\n")
                    pid.flush()
                    fcntl.flock(pid, fcntl.LOCK_EX)
                    for command in (["down"], ["scale", "decode=2", "--wait", "0"], ["up", "--model", DEMO],
                                    ["replay", DEMO + "/config.json", "--at", "1s:kill:decode-0"]):
                        out = subprocess.run([TANDEM, *command, "--run-dir", run], capture_output=True, text=True,
                                             timeout=20 * SLOW)
                        assert out.returncode and why in out.stderr, (command, out)
            assert ours.poll() is None
            with open(precious) as f:
                assert f.read() == "work\n"
        finally:
            ours.kill()
            ours.wait()


@test
def test_an_admin_socket_that_another_user_put_beside_the_routers_is_not_used():
    if os.geteuid():
        raise Skip("only root can make files of another user")
    with tempfile.TemporaryDirectory() as d, socket.socket(socket.AF_UNIX) as client, \
            socket.socket(socket.AF_UNIX) as admin:
        for s, name in ((client, "router"), (admin, "router.admin")):
            s.bind(os.path.join(d, name))
            s.listen()
        os.chown(os.path.join(d, "router.admin"), NOBODY, NOBODY)
        out = subprocess.run([TANDEM, "status", "--router", f"unix:{d}/router"], capture_output=True, text=True,
                             timeout=20 * SLOW)
        assert out.returncode == 1 and f"router.admin: belongs to user {NOBODY}, and" in out.stderr, out


@test
def test_core_dumps_have_no_kv_pages():
    with cluster() as c:
        for p in c.workers:
            arenas = [flags for size, flags in mappings(p.pid) if size >= 32 << 20 and "wr" in flags and "sh" in flags]
            assert arenas and all("dd" in flags for flags in arenas), (p.name, arenas)
            with open(f"/proc/{p.pid}/coredump_filter") as f:
                assert not int(f.read(), 16) & 2, p.name  # shared memory, which UCX makes, too


@test
def test_files_are_the_users_alone_and_logs_have_no_prompts():
    before = os.umask(0o022)
    try:
        with cluster() as c:
            done = c.generate([{"id": str(i), "prompt": PRIVATE + f" {i}", "max_tokens": 8} for i in range(3)])
            assert all(r["finish_reason"] for r in done.values()), done
            refused = c.generate([{"id": "long", "prompt": PRIVATE, "max_tokens": 100000},
                                  {"id": "late", "prompt": PRIVATE, "max_tokens": 8, "ttft_ms": 0.01}])
            assert all("error" in r for r in refused.values()), refused
            at = next(w.args[w.args.index("--dir") + 1] for w in c.workers if w.role == "store")
            wait_until(lambda: glob.glob(at + "/blocks/*"), 10, "the store has files")
            files = [os.path.join(root, name) for root, dirs, names in os.walk(at) for name in ["", *dirs, *names]]
            others = [f for f in files if stat.S_IMODE(os.stat(f).st_mode) & 0o077]
            assert len(files) > 5 and not others, (files, others)
            for p in [c.router, *c.workers]:
                log = c.log(p.name)
                assert log and not any(word in log for word in PRIVATE.split()[-2:]), p.name
    finally:
        os.umask(before)


@test
def test_a_cluster_needs_no_privileges():
    with tempfile.TemporaryDirectory() as d:
        os.chown(d, NOBODY, NOBODY)
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all",
                "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
        env = dict(os.environ, HOME=d, XDG_RUNTIME_DIR=d)

        def tandem(command, *args):
            return subprocess.run([*drop, TANDEM, command, *args], env=env, capture_output=True, text=True,
                                  timeout=60 * SLOW)
        if drop and subprocess.run([*drop, "test", "-r", TANDEM]).returncode:
            raise Skip("another user can't read the programs here")
        up = tandem("up", "--model", DEMO, "--listen", "127.0.0.1:0", "--detach", "--run-dir", d + "/run",
                    "--pool-bytes", "8M", "--store-dram", "8M", "--store-ssd", "64M")
        try:
            assert up.returncode == 0, up.stderr
            with open(d + "/run/cluster.json") as f:
                processes = json.load(f)["processes"]
            assert len(processes) == 4
            for p in processes:
                with open(f"/proc/{p['pid']}/status") as f:
                    status = f.read()
                assert re.search(r"^CapEff:\s*0+$", status, re.M), (p["name"], status)
                assert not drop or re.search(rf"^Uid:\s*{NOBODY}\s", status, re.M), (p["name"], status)
            with open(d + "/run/router.address") as f:
                out = tandem("generate", "--router", f.read().strip(), "--max-tokens", "4", "Hello")
            assert out.returncode == 0 and out.stdout, out.stderr
        finally:
            down = tandem("down", "--run-dir", d + "/run")
        assert down.returncode == 0, down.stderr


if __name__ == "__main__":
    main()
