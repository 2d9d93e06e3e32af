"""What attacks need beside a cluster: memory of processes, keys, and three hosts on one machine."""
import os, shutil, subprocess
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


LINKS = {("attacker", "router"): "10.214.1", ("attacker", "workers"): "10.214.2", ("router", "workers"): "10.214.3"}
ROUTER, WORKERS = "10.214.1.2", "10.214.3.2"  # where the two listen


def ip(*args, check=True):
    return subprocess.run(["ip", *args], check=check, capture_output=True).returncode


class Nets:
    """Network namespaces of an attacker, a router with its clients, and the workers, each joined to the other
    two by a link of its own."""

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

    def inside(self, host, core):
        """The words that run a program on that host, on one core."""
        return ["taskset", "-c", str(core), "ip", "netns", "exec", self.names[host]]
