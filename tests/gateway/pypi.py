"""Packages of PyPI, unmodified, in a virtual environment in the build directory, and `tandem up` for them."""
from harness import *


def python_with(*packages):
    """A Python that has the packages, or None if they can't be had. Made once."""
    d = os.path.join(BUILD, "pypi", "+".join(packages))
    python, made = os.path.join(d, "bin", "python"), os.path.join(d, "made")
    if os.path.exists(made):
        return python
    shutil.rmtree(d, ignore_errors=True)
    for command in ([sys.executable, "-m", "venv", d],
                    [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", *packages]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print("# " + done.stdout.strip().replace("\n", "\n# "))
            shutil.rmtree(d, ignore_errors=True)
            return None
    open(made, "w").close()
    return python


class Up:
    """A cluster of `tandem up` with a gateway."""

    def __init__(self, model, *args):
        self.run, self.args = tempfile.mkdtemp(prefix="tandem-test-"), ["--model", model, *args]

    def __enter__(self):
        up = subprocess.run([TANDEM, "up", "--run-dir", self.run, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--detach", "--no-store",
                             "--pool-bytes", "64M", *self.args], capture_output=True, text=True, timeout=120 * SLOW)
        assert up.returncode == 0, up
        self.url = re.search(r"(http://\S+?)/v1", up.stdout).group(1)
        return self

    def __exit__(self, *_):
        subprocess.run([TANDEM, "down", "--run-dir", self.run], capture_output=True, timeout=60 * SLOW)
        shutil.rmtree(self.run, ignore_errors=True)
