"""The store of a whole cluster: `tandem store` on its directory, and a failing disk that only costs speed."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


def requests(n, first=0, tokens=600):
    rnd = random.Random(7)
    return [{"id": str(i), "prompt_ids": [rnd.randrange(1500) for _ in range(tokens)], "max_tokens": 4, "greedy": True,
             "ignore_eos": True} for i in range(first, first + n)]


def store(*args):
    out = subprocess.run([TANDEM, "store", *args], capture_output=True, text=True, timeout=60 * SLOW)
    return out.returncode, out.stdout, out.stderr


def directory(cluster):
    args = cluster["store-0"].args
    return args[args.index("--dir") + 1]


def fill(cluster):
    results = cluster.generate(requests(6))
    assert all("error" not in r for r in results.values()), results
    cluster["store-0"].stop()  # it writes all dirty blocks first
    return {k: r["token_ids"] for k, r in results.items()}


@test
def test_store_tools_look_into_a_directory_and_find_damage():
    with Cluster(store=True, plan="split", router_args=["--prefix", "load"]) as c:
        code, _, err = store("stat", directory(c))
        assert code == 1 and "a store uses it" in err, (code, err)  # refused while the store runs
        fill(c)
        d = directory(c)
        code, out, err = store("stat", d, "--json")
        assert code == 0, err
        stat = json.loads(out)
        assert stat["blocks"] > 50 and stat["layouts"] == 1 and stat["bad_headers"] == 0, stat
        assert stat["payload_bytes"] <= stat["dir_bytes"], stat
        code, out, err = store("ls", d, "--json")
        listed = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and len(listed) == stat["blocks"], err
        assert len({b["key"] for b in listed}) == len(listed) and all(b["status"] == "ok" for b in listed)
        code, out, err = store("verify", d, "--json")
        report = json.loads(out)
        assert code == 0 and report["right"] == report["blocks"] == stat["blocks"], (report, err)
        assert "blocks" in err  # it prints its progress
        file = os.path.join(c.dir, "blocks.tdkb")
        code, out, err = store("export", d, file, "--json", "--quiet")
        assert code == 0 and os.path.getsize(file) == json.loads(out)["bytes"] and not err, err
        assert open(file, "rb").read(4) == b"TDKB"
        assert store("export", d, file)[0] == 1  # an existing file is not overwritten
        other = os.path.join(c.dir, "other-store")
        code, out, err = store("import", other, file, "--json")
        assert code == 0 and json.loads(out)["right"] == stat["blocks"] and "MiB" in err, (out, err)
        again = [json.loads(line) for line in store("ls", other, "--json")[1].splitlines()]
        assert sorted(again, key=lambda b: b["key"]) == sorted(listed, key=lambda b: b["key"])
        assert json.loads(store("verify", other, "--json")[1])["right"] == stat["blocks"]
        assert store("import", other, file, "--quiet")[0] == 0  # existing blocks are replaced
        assert json.loads(store("stat", other, "--json")[1])["blocks"] == stat["blocks"]
        data = bytearray(open(file, "rb").read())
        data[100] ^= 16  # a byte of the first payload
        open(file, "wb").write(data)
        third = os.path.join(c.dir, "third-store")
        code, out, err = store("import", third, file, "--json")
        assert code == 1 and json.loads(out)["right"] == stat["blocks"] - 1 and "left out" in err, (out, err)
        open(file, "wb").write(data[:-1])
        code, out, err = store("import", third, file)
        assert code == 1 and "no whole block" in err and file in err, err
        code, out, err = store("compact", d, "--json")
        assert code == 0 and json.loads(out)["after_bytes"] >= stat["payload_bytes"], err
        blobs = [os.path.join(d, "blocks", f) for f in os.listdir(os.path.join(d, "blocks")) if f.endswith(".blob")]
        for blob in blobs:  # one bit of each: in some value, or in a file that is not used any more
            with open(blob, "r+b") as f:
                f.seek(os.path.getsize(blob) * 5 // 13)
                byte = f.read(1)[0]
                f.seek(-1, os.SEEK_CUR)
                f.write(bytes([byte ^ 16]))
        code, out, err = store("verify", d, "--json")
        report = json.loads(out)
        bad = report["corrupt"] + report["checksum"] + report["unreadable"] + report["absent"] + report["version"]
        assert code == 1 and 1 <= bad <= len(blobs) and report["right"] == stat["blocks"] - bad, (report, blobs)
        assert "not right" in err, err


@test
def test_store_tools_refuse_what_makes_no_sense():
    with tempfile.TemporaryDirectory() as empty:
        for args, code, words in ((("stat", empty), 1, "no store was ever here"), (("frobnicate", empty), 2, "usage"),
                                  (("stat",), 2, "usage"), (("export", empty), 2, "usage"), ((), 2, "usage")):
            got, _, err = store(*args)
            assert got == code and words in err, (args, got, err)


@test
def test_answers_are_the_same_on_a_disk_that_corrupts_lies_and_fails():
    faults = ("seed=3 disk.put:corrupt=0.1 disk.put:lie=0.1 disk.put:truncate=0.1 disk.put:duplicate=0.1 "
              "disk.read:corrupt=0.1 disk.read:lie=0.1 disk.read:fail=0.1 disk.read:truncate=0.1")
    with Cluster(store=True, plan="split", router_args=["--prefix", "load"],
                 store_args=["--dram-bytes", "4M", "--faults", faults]) as c:
        first = c.generate(requests(12))
        again = c.generate(requests(12))
        failed = [r["error"] for r in [*first.values(), *again.values()] if "error" in r]
        assert not failed, failed
        for k, r in first.items():
            assert again[k]["token_ids"] == r["token_ids"], k
        c.audit()


main()
