"""Clients from PyPI, unmodified, against `tandem up`; skipped by name where PyPI can't be reached."""
import os, re, subprocess, sys, tempfile
sys.path[:0] = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "cluster")]
from harness import *
from pypi import python_with

HERE = os.path.dirname(os.path.abspath(__file__))
OPENAI = python_with("openai")
if not OPENAI:
    print("1..0 # SKIP openai can't be had from PyPI")
    sys.exit(0)


@test
def test_openai_package():
    with tempfile.TemporaryDirectory() as d:
        run = os.path.join(d, "run")
        up = subprocess.run([TANDEM, "up", "--model", DEMO, "--run-dir", run, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--detach",
                             "--no-store", "--pool-bytes", "32M"], capture_output=True, text=True, timeout=120 * SLOW)
        assert up.returncode == 0, up
        try:
            url = re.search(r"http://\S+?/v1", up.stdout).group()
            done = subprocess.run([OPENAI, os.path.join(HERE, "openai_cases.py"), url, "tandem-demo"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=120 * SLOW)
            assert done.returncode == 0, done.stdout
            print(done.stdout, end="")
        finally:
            subprocess.run([TANDEM, "down", "--run-dir", run], capture_output=True, timeout=60 * SLOW)


if __name__ == "__main__":
    main()
