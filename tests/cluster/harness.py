"""A cluster of real processes for a test, TAP output, and the checks with which every test ends. Python 3.11,
stdlib only.

Environment: TANDEM_BUILD_ROOT (build directory) and TANDEM_SOURCE_ROOT, both set by meson. TANDEM_ROUTERS=N:
suites that know TANDEM_LONG=replan, pools, chaos or faults send their load through N routers.
"""
import atexit, contextlib, json, os, random, re, shutil, signal, socket, subprocess, sys, tempfile, threading, time, traceback, urllib.request

BUILD = os.environ["TANDEM_BUILD_ROOT"]
SOURCE = os.environ["TANDEM_SOURCE_ROOT"]
SHARED = os.environ.get("TANDEM_SHARED", os.path.join(SOURCE, "..", "shared"))
DEMO = os.path.join(SOURCE, "deploy/demo-model/tandem-demo")
TANDEM = os.path.join(BUILD, "cli/tandem")
SLOW = 6 if os.environ.get("TANDEM_SANITIZE") else 1  # under sanitizers everything takes longer
SECRET = "test-secret"


def threads_per_core():
    """How many threads want to run for each core: now, or in the mean of the last minute if that is more."""
    with open("/proc/loadavg") as f:
        running = int(f.read().split()[3].split("/")[0])
    return max(running, os.getloadavg()[0]) / os.cpu_count()


def crowded():
    """How many times longer a process may seem silent, since more than four threads for each core want to
    run."""
    return max(1, int(threads_per_core() // 4))


def within(seconds):
    """An upper bound, in seconds, for what takes less than so many seconds on an idle machine. Ask when it is
    over: other tests may have begun meanwhile."""
    return seconds * SLOW * max(1, threads_per_core())


ROUTERS = int(os.environ.get("TANDEM_ROUTERS", "1"))
DEVICE = os.environ.get("TANDEM_DEVICE", "cpu")  # set by tests/gpu.sh
# Packed weights of all processes of this program; removed with it.
CACHE = tempfile.mkdtemp(prefix="tandem-cache-")
os.environ["XDG_CACHE_HOME"] = CACHE
os.environ.setdefault("TANDEM_UP_HTTP", "none")  # tests run beside each other, and there is one port 8000
os.environ.setdefault("TANDEM_UP_SILENCE_MS", str(3000 * SLOW * crowded()))  # by default 1000, and this machine is busy
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
# Sockets of routers' operators, for this program alone.
os.environ["XDG_RUNTIME_DIR"] = RUNTIME = tempfile.mkdtemp(prefix="tandem-run-")
atexit.register(shutil.rmtree, RUNTIME, ignore_errors=True)


class Proc:
    """A server process. Knows the address that the process announced, and can start it again on that address.
    """

    def __init__(self, cluster, role, name, args):
        self.cluster, self.role, self.name, self.args = cluster, role, name, args
        self.address, self.child = None, None
        self.joins = None  # of a router: where workers register
        self.script = os.path.join(cluster.dir, name + ".faults")

    def start(self, wait=True):
        binary = os.path.join(BUILD, {"store": "kvstore"}.get(self.role, self.role),
                              "tandem-" + {"store": "kvstore"}.get(self.role, self.role))
        read, write = os.pipe()
        env = dict(os.environ, TANDEM_READY_FD=str(write))
        for prefix in ("PREFILL", "DECODE", "KVSTORE", "ROUTER"):
            env[f"TANDEM_{prefix}_SECRET"] = SECRET
        log = open(os.path.join(self.cluster.dir, self.name + ".log"), "ab")
        listen = self.address or f"127.0.0.1:{free_port()}"
        args = self.args
        if self.role == "router":
            self.joins = self.joins or f"127.0.0.1:{free_port()}"
            args = [*args, "--cluster-listen", self.joins]
        self.child = subprocess.Popen([*self.cluster.wrap, binary, "--name", self.name, "--listen", listen, *args],
                                      env=env, stdout=log, stderr=log, pass_fds=[write])
        os.close(write)
        self.ready = read
        if wait:
            self.wait()
        return self

    def wait(self):
        with os.fdopen(self.ready) as f:
            address = f.readline().strip()
        if not address:
            raise RuntimeError(f"{self.name} did not start:\n" + self.cluster.log(self.name))
        self.address = address

    @property
    def admin(self):
        """The admin socket of a router, also where it is in another network namespace."""
        return f"unix:{RUNTIME}/tandem/{self.address.rsplit(':', 1)[1]}.admin"

    @property
    def pid(self):
        return self.child.pid

    def kill(self, sig=signal.SIGKILL):
        self.child.send_signal(sig)

    def misbehave(self, script):
        """Gives a worker or store of a cluster with scripts another fault script (base/fault.h); "": no more
        faults."""
        with open(self.script, "w") as f:
            f.write(script)
        if self.child:
            self.kill(signal.SIGUSR1)

    def stop(self, timeout=20):
        self.tell_to_end()
        return self.await_end(timeout)

    def tell_to_end(self):
        if self.child and self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()

    def await_end(self, timeout=20):
        if self.child and self.child.poll() is None:
            try:
                self.child.wait(timeout * SLOW)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        return self.child.returncode if self.child else None


class Cluster:
    def __init__(self, model=DEMO, prefill=1, decode=1, store=False, plan="auto", worker_args=(), store_args=(),
                 router_args=(), wrap=(), roles_args=None, dummy=None, routers=1, scripts=False):
        """scripts: each worker and store reads a fault script of its own, which Proc.misbehave() changes."""
        self.dir = tempfile.mkdtemp(prefix="tandem-test-")
        self.wrap, self.model = list(wrap), model
        self.slow = SLOW * crowded()
        patience = ["--silence-ms", str(1000 * self.slow)]
        worker_args, store_args, router_args = [[*patience, *a] for a in (worker_args, store_args, router_args)]
        router_args = ["--dispatch-ms", str(500 * self.slow), *router_args]
        # The vocabulary still comes from the router's model.
        shape = ["--dummy", dummy] if dummy else ["--model", model]
        workers = [*shape, "--device", DEVICE, "--pool-bytes", "64M", "--threads", "1", "--log-level", "info", *worker_args]
        self.workers = []
        for role, n in (("prefill", prefill), ("decode", decode)):
            for i in range(n):
                extra = (roles_args or {}).get(role, [])
                self.workers.append(Proc(self, role, f"{role}-{i}", [*workers, *extra]))
        for i in range(int(store)):
            self.workers.append(Proc(self, "store", f"store-{i}", [*shape, "--dir", os.path.join(self.dir, f"store-{i}"),
                                                                 "--dram-bytes", "64M", *store_args]))
        for w in self.workers if scripts else ():
            w.misbehave("")
            w.args += ["--faults", "@" + w.script]
        self.plan, self.router_args = plan, list(router_args)
        self.router, self.other_routers, self.n_routers = None, [], routers
        atexit.register(self.close)

    def __enter__(self):
        try:
            for w in self.workers:
                w.start(wait=False)
            for w in self.workers:
                w.wait()
            self.router = Proc(self, "router", "router", ["--model", self.model, "--plan", self.plan, "--workers",
                                                           ",".join(w.address for w in self.workers), *self.router_args])
            self.router.start()
            self.wait_ready()
            for _ in range(1, self.n_routers):
                self.add_router()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def add_router(self, *args):
        """Adds a router of the same workers, which is like the first one except for args."""
        r = Proc(self, "router", f"router-{len(self.other_routers) + 2}", [*self.router.args, *args])
        self.other_routers.append(r)
        r.start()
        self.wait_ready(router=r)
        return r

    @property
    def routers(self):
        return [self.router, *self.other_routers]

    @property
    def addresses(self):
        return [r.address for r in self.routers]

    def close(self):
        stores = [w for w in self.workers if w.role == "store"]
        # Routers first, so that nothing counts as lost; stores last, because workers write to them.
        for group in ([r for r in self.routers if r], [w for w in self.workers if w not in stores], stores):
            for p in group:
                p.tell_to_end()  # once: a second time would not wait for anything
            for p in group:
                p.await_end()
        if self.dir and not os.environ.get("TANDEM_KEEP"):
            shutil.rmtree(self.dir, ignore_errors=True)
        atexit.unregister(self.close)

    def log(self, name):
        with open(os.path.join(self.dir, name + ".log"), errors="replace") as f:
            return f.read()[-3000:]

    def __getitem__(self, name):
        return next(w for w in self.workers if w.name == name)

    def status(self, router=None):
        for _ in range(3):  # on a busy machine a router may take seconds to answer
            out = subprocess.run([*self.wrap, TANDEM, "status", "--json", "--admin", (router or self.router).admin],
                                 capture_output=True, text=True, timeout=30 * SLOW)
            if not out.returncode:
                return json.loads(out.stdout)
        raise RuntimeError(out.stderr)

    def wait_ready(self, timeout=30, router=None):
        """Waits until the routers know all running workers, and each is ready. (A drained worker is in no
        status until it is back.)"""
        def is_ready(r):
            states = {w["name"]: w["state"] for w in self.status(r)["workers"]}
            runs = {w.name for w in self.workers if w.child and w.child.poll() is None}
            return runs <= states.keys() and set(states.values()) <= {"ready"}
        for r in [router] if router else self.routers:
            wait_until(lambda: is_ready(r), timeout, f"{r.name}: all workers ready")

    def generate(self, requests, args=(), timeout=120):
        """Returns results by id; many requests are in flight at a time."""
        text = "".join(json.dumps(r) + "\n" for r in requests)
        out = subprocess.run([*self.wrap, TANDEM, "generate", "--jsonl", "--router", self.router.address, *args], input=text,
                             capture_output=True, text=True, timeout=timeout * SLOW)
        results = {}
        for line in out.stdout.splitlines():
            r = json.loads(line)
            assert r["id"] not in results, "two answers for " + r["id"]
            results[r["id"]] = r
        missing = [r["id"] for r in requests if r["id"] not in results]
        assert not missing, f"no answer for {missing[:3]}: {out.stderr[-500:]}"
        return results

    def audit(self, timeout=10):
        """Checks that every page is accounted for, nothing is leased or held when nothing runs, and every
        router's index is what the workers hold."""
        def clean():
            for w in self.status()["workers"]:
                p = w["pages"]
                if p["free"] + p["cached"] + p["held"] + p["leased"] + p["quarantined"] != p["total"]:
                    raise AssertionError(f"{w['name']}: pages don't add up: {p}")
                if w["role"] != "store" and (p["held"] or p["leased"] or p["quarantined"]):
                    return False
                if w["running"] or w["waiting"] or not p["total"]:
                    return False
            return True
        wait_until(clean, timeout, lambda: "pages come back: " + json.dumps(self.status()["workers"]))
        for r in self.routers:
            found = []

            def is_answered():  # a fault may hit the audit's own messages, and a step may take long
                found[:] = self.account(r)
                return not any("it does not answer" in w["problems"] for w in found[1]["workers"])
            wait_until(is_answered, max(timeout, 30), lambda: json.dumps(found[1]))
            assert found[0] == 0 and found[1]["ok"], (r.name, found[1])

    def account(self, router=None):
        """Checks the present result of `tandem audit`, whatever runs."""
        out = subprocess.run([*self.wrap, TANDEM, "audit", "--json", "--admin", (router or self.router).admin],
                             capture_output=True, text=True, timeout=30 * SLOW)
        assert out.returncode in (0, 1) and out.stdout, out.stderr
        return out.returncode, json.loads(out.stdout)


_claims = []


def free_port():
    """A port below those that the kernel gives to connections, so that a process that is started again finds
    its port free. No two calls return the same port, also in test programs that run at the same time: a
    socket with the port's name claims it until this program ends."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0tandem-test-port-{port}")
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port


def changed_model(name, change, of=DEMO):
    """A directory with a copy of a model of which one file is changed. The change maps bytes to new bytes, or
    to None: the file is left out."""
    d = tempfile.mkdtemp(prefix="tandem-model-")
    atexit.register(shutil.rmtree, d, ignore_errors=True)
    for f in os.listdir(of):
        with open(os.path.join(of, f), "rb") as source:
            data = source.read()
        data = change(data) if f == name else data
        if data is not None:
            with open(os.path.join(d, f), "wb") as copy:
                copy.write(data)
    return d


@contextlib.contextmanager
def network():
    """A network namespace of its own with a loopback device. Yields the words that run a program in it."""
    name = f"tandem-test-{os.getpid()}"
    words = ["ip", "netns", "exec", name]
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        raise Skip("network namespaces can't be made here")
    try:
        if subprocess.run([*words, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
            raise Skip("network namespaces can't be entered here")
        yield words
    finally:
        subprocess.run(["ip", "netns", "del", name])


def metric(address, pattern, wrap=()):
    url = f"http://{address}/metrics"
    if wrap:
        read = f"import urllib.request; print(urllib.request.urlopen('{url}', timeout=10).read().decode())"
        text = subprocess.run([*wrap, sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout
    else:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    found = re.search("^" + pattern + r" ([\d.]+)$", text, re.M)
    return float(found.group(1)) if found else None


def replans_by_reason(metrics):
    """How many re-plans there were, by their reason."""
    reasons = ("lost", "transfer", "refused", "unheard", "stalled", "failed")
    return {r: metric(metrics, f'tandem_replans_total{{reason="{r}"}}') for r in reasons}


def wait_until(condition, timeout, what):
    end, pause = time.monotonic() + timeout * SLOW, 0.02
    while True:
        if condition():
            return
        if time.monotonic() > end:
            raise AssertionError("did not happen in time: " + (what() if callable(what) else what))
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)  # most conditions start a process, which takes a core for 20 ms


def wait_still(value, timeout, what, still_s=0.5):
    """Waits until a figure is above zero and has not changed for a while."""
    seen, since = value(), time.monotonic()

    def is_still():
        nonlocal seen, since
        now = value()
        if now != seen:
            seen, since = now, time.monotonic()
        return seen and time.monotonic() - since >= still_s * SLOW
    wait_until(is_still, timeout, what)


def golden(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def golden_requests(g, prefix=""):
    return [{"id": prefix + c["name"], "prompt_ids": c["prompt_ids"], "max_tokens": g["max_tokens"], "greedy": True,
             "ignore_eos": True} for c in g["cases"]]


def check_golden(g, results, prefix="", tolerance=5e-4):
    for c in g["cases"]:
        r = results[prefix + c["name"]]
        assert "error" not in r, f"{c['name']}: {r['error']}"
        assert r["token_ids"] == c["greedy_ids"], f"{prefix}{c['name']}: {r['token_ids']} expected {c['greedy_ids']}"
        for got, want in zip(r.get("logprobs", []), c.get("greedy_logprobs", [])):
            assert abs(got - want) <= tolerance, f"{c['name']}: log-probability {got}, expected {want}"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


_tests = []


def test(f):
    _tests.append(f)
    return f


class Skip(Exception):
    pass


def main():
    """Runs the tests named on the command line, or all of them, and prints TAP."""
    names = sys.argv[1:]
    chosen = [t for t in _tests if not names or t.__name__ in names]
    failed = 0
    print(f"1..{len(chosen)}", flush=True)
    for i, t in enumerate(chosen, 1):
        started = time.monotonic()
        try:
            t()
            print(f"ok {i} - {t.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except Skip as s:
            print(f"ok {i} - {t.__name__} # SKIP {s}", flush=True)
        except Exception:
            failed += 1
            print(f"not ok {i} - {t.__name__}", flush=True)
            for line in traceback.format_exc().splitlines():
                print("# " + line[:2000], flush=True)
    sys.exit(1 if failed else 0)
