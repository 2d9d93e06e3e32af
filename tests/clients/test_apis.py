"""clients/python from its wheel: what people do with it, and routers that die under it. And the examples of
docs/api.md, run as they stand there: what they print must be what the page says. Skipped by name where PyPI
can't be reached."""
import glob, os, re, subprocess, sys, tempfile
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("gateway", "cluster")]
from harness import *
from pypi import python_with

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.environ["TANDEM_SOURCE_ROOT"]
DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
PYTHON = python_with("grpcio", "grpcio-tools", "protobuf", "setuptools", "wheel", "openai")
if not PYTHON:
    print("1..0 # SKIP grpcio and openai can't be had from PyPI")
    sys.exit(0)


def install():
    """Builds the wheel in a copy of the source, and installs it."""
    with tempfile.TemporaryDirectory() as d:
        shutil.copytree(os.path.join(SOURCE, "clients", "python"), os.path.join(d, "python"))
        shutil.copy(os.path.join(SOURCE, "proto", "tandem.proto"), os.path.join(d, "python"))
        pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "-q"]
        for args in (lambda: ["wheel", "--no-deps", "--no-build-isolation", "-w", d, os.path.join(d, "python")],
                     lambda: ["install", "--no-deps", "--force-reinstall", *glob.glob(d + "/*.whl")]):
            done = subprocess.run([*pip, *args()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, done.stdout


def start(case, *addresses):
    return subprocess.Popen([PYTHON, os.path.join(HERE, "client_cases.py"), case, *addresses], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


@test
def test_client_does_what_people_do():
    with Cluster(routers=2) as c:
        client = start("basics", *c.addresses)
        out, _ = client.communicate(timeout=120 * SLOW)
        assert client.returncode == 0, out
        print(out, end="")
        c.audit(20)


@test
def test_client_goes_on_at_another_router_with_the_same_tokens():
    sim = ["--engine", "sim", "--numerics", "bf16", "--pages", "20000", "--max-context", "8192", "--sim-decode", "20000,0,0"]
    with Cluster(routers=2, dummy=DIMS, worker_args=sim) as c:
        client = start("survive", *c.addresses)
        line = client.stdout.readline()
        assert line == "all run\n", line + client.communicate(timeout=60)[0]
        c.routers[0].kill()
        out, _ = client.communicate(timeout=120 * SLOW)
        assert client.returncode == 0, out
        print(out, end="")


def examples():
    """Of docs/api.md: the line, the language, the text, and what it prints."""
    with open(os.path.join(SOURCE, "docs", "api.md")) as f:
        page = f.read()
    fences = re.findall(r"^```(\w+)$", page, re.M)
    assert fences.count("text") * 2 == len(fences), "an example does not say what it prints"
    for m in re.finditer(r"^```(sh|python)\n(.*?)^```\n```text\n(.*?)^```\n", page, re.M | re.S):
        yield page[:m.start()].count("\n") + 2, m.group(1), m.group(2), m.group(3)


def printed_by(language, text, bin_dir):
    env = {**os.environ, "PATH": os.environ["PATH"] + os.pathsep + bin_dir}
    done = subprocess.run(["sh", "-ec", text] if language == "sh" else [PYTHON, "-c", text], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=60 * SLOW)
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def is_like(out, page):
    """The same but for spaces, and [...] for anything."""
    squeeze = lambda s: "".join(s.split())
    return re.fullmatch(".*?".join(map(re.escape, squeeze(page).split("[...]"))), squeeze(out), re.S)


@test
def test_examples_print_what_the_page_says():
    """Debian has no grpcurl: where it is absent, grpcurl.py stands in, which asks for the schema in the same
    way."""
    n, wrong = 0, []
    with tempfile.TemporaryDirectory() as d:
        with open(os.path.join(d, "grpcurl"), "w") as f:
            f.write(f'#!/bin/sh\nexec {sys.executable} {os.path.join(HERE, "grpcurl.py")} "$@"\n')
        os.chmod(f.name, 0o755)
        up = subprocess.run([TANDEM, "up", "--model", DEMO, "--run-dir", d + "/run", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
                             "--detach", "--no-store", "--pool-bytes", "32M"], capture_output=True, text=True, timeout=120 * SLOW)
        try:
            assert up.returncode == 0, up
            http = re.search(r"http://(\S+?)/v1", up.stdout).group(1)
            with open(d + "/run/router.address") as f:
                router = f.read().strip()
            for line, language, text, page in examples():
                n += 1
                out = printed_by(language, text.replace("127.0.0.1:8000", http).replace("127.0.0.1:7470", router), d)
                if not is_like(out, page):
                    wrong.append(f"docs/api.md, line {line}: it prints\n{out}")
        finally:
            subprocess.run([TANDEM, "down", "--run-dir", d + "/run"], capture_output=True, timeout=60 * SLOW)
    print(f"# {n} examples")
    assert n >= 12 and not wrong, "\n".join(wrong)


if __name__ == "__main__":
    install()
    main()
