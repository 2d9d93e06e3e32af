"""What tests/gpu.sh counts as passed, with programs in place of the suites; and the rows that a bench of the
engine is asked for. No device is needed."""
import os, stat, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

SUITES = ["test_kernels_device", "test_kernels_device_attention", "test_kernels_device_packed", "test_kernels_ranks"]
FINE = 'echo "ok 1 - a"; echo "ok 2 - b # SKIP not here"; echo 1..2'


def gpu(scripts, *options):
    """Runs the stage of the kernels' suites. scripts: what the first of them do; the others are fine."""
    with tempfile.TemporaryDirectory() as build:
        os.makedirs(os.path.join(build, "tests/kernels"))
        for i, name in enumerate(SUITES):
            path = os.path.join(build, "tests/kernels", name)
            with open(path, "w") as f:
                f.write("#!/bin/sh\n" + (scripts[i] if i < len(scripts) else FINE) + "\n")
            os.chmod(path, stat.S_IRWXU)
        out = subprocess.run(["bash", "tests/gpu.sh", "--stage", "kernels", *options], cwd=SOURCE, capture_output=True,
                             text=True, timeout=60 * SLOW, env={**os.environ, "TANDEM_BUILD": build})
        return out.returncode, out.stdout


@test
def test_suites_that_pass_are_counted():
    code, text = gpu([])
    assert code == 0 and text.endswith("4 passed, 0 failed, 4 skipped\n"), text


@test
def test_a_suite_passes_only_if_it_ended_well_and_ran_what_it_planned():
    for script, why in (('echo "ok 1 - a"; kill -ABRT $$', "ran 1 of unknown tests"),
                        ('echo "ok 1 - a"; echo 1..2', "ran 1 of 2 tests"),
                        ('echo "ok 1 - a"; echo 1..1; exit 3', "exit code 3"),
                        ('echo "ok 1 - a"; echo 1..1; exec sleep 600', "ran out of time"),
                        ("exit 0", "ran 0 of unknown tests"),
                        ('echo "not ok 1 - a"; echo 1..1; exit 1', "")):
        code, text = gpu([script], "--limit", str(5 * SLOW))
        assert code == 1 and f"{SUITES[0]}: " in text and why in text, (script, text)
        assert ", 1 failed, 3 skipped" in text.splitlines()[-1], (script, text)


@test
def test_the_table_is_kept_and_stages_are_checked():
    with tempfile.TemporaryDirectory() as above:
        out = os.path.join(above, "made", "by the script")
        code, text = gpu([], "--out", out)
        with open(os.path.join(out, "table.txt")) as f:
            assert code == 0 and all(f"{s}: 1 passed" in text for s in SUITES) and len(f.readlines()) == 6, text
    for options, why in ((["--stage", "smok"], "no stage 'smok'"), (["--limit", "0"], "--limit"), (["--limit"], "needs a value")):
        out = subprocess.run(["bash", "tests/gpu.sh", *options], cwd=SOURCE, capture_output=True, text=True, timeout=30 * SLOW)
        assert out.returncode == 2 and why in out.stderr and not out.stdout, out


@test
def test_a_bench_of_the_engine_measures_the_rows_that_are_asked_for():
    small = ["bench", "engine", "--dummy", "vocab=64,hidden=64,layers=2,heads=2,kv_heads=1,head_dim=32,ffn=64,positions=1024",
             "--seconds", "0.01", "--json"]

    def rows(*options):
        return subprocess.run([TANDEM, *small, *options], capture_output=True, text=True, timeout=120 * SLOW)
    out = rows("--only", "batch 8+batch 32")
    names = [json.loads(line)["name"] for line in out.stdout.splitlines()]
    decoded = [n for n in names if "tokens" in n or n.startswith("decode") and n.count(",") == 1]
    assert decoded == ["decode batch 8, context 16..32", "decode batch 32, context 16..32"], out
    assert "decode batch 8, context 16..32: " in out.stderr, out  # as it goes
    for options, why in ((["--only", "batch 7"], "--only batch 7: no row's name contains it"),
                         (["--only", "batch 8", "--trace", "/dev/null"], "--device cuda")):
        out = rows(*options)
        assert out.returncode == 1 and why in out.stderr, out


main()
