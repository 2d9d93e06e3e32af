"""What attacks need beside a cluster: memory of processes, keys, certificates, three hosts on one machine."""
import contextlib, os, shutil, subprocess, tempfile
from harness import *

LONG = os.environ.get("TANDEM_LONG") in ("security", "all")
MIB = 1 << 20
LEFT = 64 * MIB  # what an attack may leave taken


def memory(process):
    try:
        with open(f"/proc/{process.child.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+) kB", f.read()).group(1)) * 1024
    except (FileNotFoundError, AttributeError):  # it has ended
        return 0


def make_key(path, tenant, **limits):
    """A key that tandem key prints, with limits added to its entry."""
    out = subprocess.run([TANDEM, "key", tenant, "--file", path], capture_output=True, text=True, timeout=30 * SLOW)
    assert out.returncode == 0 and out.stdout.startswith("td-"), out
    with open(path) as f:
        keys = json.load(f)
    keys["keys"][-1].update(limits)
    assert keys["keys"][-1]["tenant"] == tenant and out.stdout.strip() not in json.dumps(keys)
    with open(path, "w") as f:
        json.dump(keys, f)
    return out.stdout.strip()


CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A CA and what it signs, as files of a directory."""

    def __init__(self, dir, name):
        self.dir, self.name = dir, name
        self.openssl("req", "-x509", *CURVE, "-days", "2", "-subj", "/CN=" + name, "-keyout", self.path("key"),
                     "-out", self.path("pem"))

    @property
    def pem(self):
        return self.path("pem")

    def path(self, what):
        return os.path.join(self.dir, f"{self.name}.{what}")

    def openssl(self, *args):
        done = subprocess.run(["openssl", *args], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def sign(self, name, days="1", names="IP:127.0.0.1,DNS:localhost"):
        """(certificate, key), anew each time."""
        at = os.path.join(self.dir, name)
        self.openssl("req", *CURVE, "-subj", "/CN=" + name, "-keyout", at + ".key", "-out", at + ".csr")
        with open(at + ".ext", "w") as f:
            f.write(f"subjectAltName={names}\n")
        self.openssl("x509", "-req", "-in", at + ".csr", "-CA", self.path("pem"), "-CAkey", self.path("key"),
                     "-CAcreateserial", "-days", days, "-extfile", at + ".ext", "-out", at + ".pem")
        return at + ".pem", at + ".key"


@contextlib.contextmanager
def authorities():
    with tempfile.TemporaryDirectory() as d:
        yield Authority(d, "ours"), Authority(d, "theirs")


def words(pair, ca=None):
    return ["--tls-cert", pair[0], "--tls-key", pair[1], *(["--tls-ca", ca] if ca else [])]


LINKS = {("attacker", "router"): "10.214.1", ("attacker", "workers"): "10.214.2", ("router", "workers"): "10.214.3"}
ROUTER, WORKERS = "10.214.1.2", "10.214.3.2"  # where the two listen


def ip(*args, check=True):
    return subprocess.run(["ip", *args], check=check, capture_output=True).returncode


class Nets:
    """Network namespaces of an attacker, a router with its clients, and the workers, each joined to the other
    two by a link of its own."""

    moves = 0

    def __enter__(self):
        self.names = {host: f"td-{host[0]}-{os.getpid()}" for host in ("attacker", "router", "workers")}
        if os.geteuid() or not shutil.which("ip") or not shutil.which("taskset"):
            raise Skip("network namespaces, or taskset, can't be had here")
        try:
            for name in self.names.values():
                if ip("netns", "add", name, check=False):
                    raise Skip("network namespaces are not permitted here")
                ip("-n", name, "link", "set", "lo", "up")
            for (a, b), subnet in LINKS.items():
                ends = (f"{a[0]}{b[0]}{os.getpid()}", f"{b[0]}{a[0]}{os.getpid()}")
                ip("link", "add", ends[0], "netns", self.names[a], "type", "veth", "peer", "name", ends[1],
                   "netns", self.names[b])
                for host, end, last in ((a, ends[0], 1), (b, ends[1], 2)):
                    ip("-n", self.names[host], "addr", "add", f"{subnet}.{last}/24", "dev", end)
                    ip("-n", self.names[host], "link", "set", end, "up")
            ip("-n", self.names["attacker"], "route", "add", "10.214.3.0/24", "via", "10.214.2.2")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names.values():
            ip("netns", "del", name, check=False)

    def move_attacker(self):
        """Gives the attacker addresses that nobody has seen: a listener lets those of floods wait."""
        self.moves += 1
        last = 10 + self.moves % 240
        routes = [("ar", "10.214.1", ["10.214.1.0/24"]), ("aw", "10.214.2", ["10.214.2.0/24"]),
                  ("aw", "10.214.2", ["10.214.3.0/24", "via", "10.214.2.2"])]
        for end, subnet, route in routes:
            here, dev = ["-n", self.names["attacker"]], ["dev", f"{end}{os.getpid()}"]
            ip(*here, "addr", "add", f"{subnet}.{last}/24", *dev, check=False)
            ip(*here, "route", "replace", *route, *dev, "src", f"{subnet}.{last}")

    def inside(self, host, core):
        """The words that run a program on that host, on one core."""
        return ["taskset", "-c", str(core), "ip", "netns", "exec", self.names[host]]
