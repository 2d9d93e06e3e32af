"""A cluster of `tandem up` with a gateway, for programs that know its URL alone."""
from harness import *


class Up:
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
