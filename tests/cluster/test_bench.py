"""Areas of `tandem bench` that no other program measures, over small things: each row says what it found
beside its limit, and the table has the same rows as the JSON."""
import json, math, os, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

DIMS = "vocab=512,hidden=64,layers=2,heads=2,kv_heads=1,head_dim=32,ffn=128,positions=1024"
AREAS = {"engine": (["--dummy", DIMS], 10), "codec": ([], 10), "sample": ([], 8), "tokenize": (["--model", DEMO], 4),
         "index": (["--n-blocks", "20000"], 10), "router": (["--model", DEMO, "--n-blocks", "20000"], 5)}


def bench(*args):
    out = subprocess.run([TANDEM, "bench", *args], capture_output=True, text=True, timeout=200 * SLOW)
    assert out.returncode == 0, (args, out.stderr)
    return out.stdout


@test
def test_rows_have_a_value_and_its_share_of_a_limit():
    for area, (args, least) in AREAS.items():
        began = time.monotonic()
        rows = [json.loads(line) for line in bench(area, *args, "--seconds", "0.01", "--json").splitlines()]
        print(f"# {area}: {len(rows)} rows in {time.monotonic() - began:.1f} s")
        assert len(rows) >= least and len({r["name"] for r in rows}) == len(rows), (area, rows)
        for r in rows:
            assert r["area"] == area and math.isfinite(r["value"]) and r["value"] >= 0, r
            assert (r["limit"] is None) == (r["share"] is None), r
        # So short a time may be over before a thread of readers has begun.
        assert sum(r["value"] > 0 for r in rows) > 0.7 * len(rows), rows
        assert any(r["limit"] or "absent" in r["name"] for r in rows), rows


@test
def test_a_table_has_the_rows_of_the_json():
    args = ["sample", "--seconds", "0.01"]
    table, rows = bench(*args), [json.loads(line) for line in bench(*args, "--json").splitlines()]
    assert all(r["name"] in table and r["unit"] in table for r in rows), table


if __name__ == "__main__":
    main()
