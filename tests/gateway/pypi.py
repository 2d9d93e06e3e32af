"""Packages of PyPI, unmodified, in a virtual environment in the build directory."""
import os, shutil, subprocess, sys

BUILD = os.environ["TANDEM_BUILD_ROOT"]


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
