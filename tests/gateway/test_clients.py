"""Clients from PyPI, unmodified, against `tandem up`; skipped by name where PyPI can't be reached."""
import os, re, subprocess, sys, tempfile
sys.path[:0] = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "cluster")]
from harness import *
from pypi import python_with

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = python_with("openai", "anthropic")
if not PYTHON:
    print("1..0 # SKIP openai and anthropic can't be had from PyPI")
    sys.exit(0)
run = tempfile.mkdtemp(prefix="tandem-test-")
url = None


def cases(script, base):
    done = subprocess.run([PYTHON, os.path.join(HERE, script), base, "tandem-demo"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=120 * SLOW)
    assert done.returncode == 0, done.stdout
    print(done.stdout, end="")


@test
def test_openai_package():
    cases("openai_cases.py", url + "/v1")


@test
def test_anthropic_package():
    cases("anthropic_cases.py", url)


if __name__ == "__main__":
    up = subprocess.run([TANDEM, "up", "--model", DEMO, "--run-dir", run, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--detach",
                         "--no-store", "--pool-bytes", "32M", "--chat-template", os.path.join(HERE, "functions.jinja")],
                        capture_output=True, text=True, timeout=120 * SLOW)
    try:
        assert up.returncode == 0, up
        url = re.search(r"(http://\S+?)/v1", up.stdout).group(1)
        main()
    finally:
        subprocess.run([TANDEM, "down", "--run-dir", run], capture_output=True, timeout=60 * SLOW)
        shutil.rmtree(run, ignore_errors=True)
