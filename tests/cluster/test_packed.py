"""Packed weights that all workers of a host share: one copy in memory, written once, the same tokens."""
import glob, json, os, re, shutil, subprocess, tempfile, time

from harness import BUILD, CACHE, DEMO, SLOW, TANDEM, Cluster, golden, golden_requests, main, test

LONG = os.environ.get("TANDEM_LONG") in ("pack", "all")
SHAPE = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2, head_dim=128)


def make_model(path, n_layers):
    """Makes a model with the demo model's tokenizer and larger made-up weights in bf16: small positive and
    negative numbers. Returns their bytes."""
    for f in os.listdir(DEMO):
        if f != "model.safetensors":
            shutil.copy(os.path.join(DEMO, f), path)
    with open(os.path.join(DEMO, "config.json")) as f:
        config = dict(json.load(f), **SHAPE, num_hidden_layers=n_layers)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f)
    h, m, q, kv = config["hidden_size"], config["intermediate_size"], 8 * 128, 2 * 128
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    for i in range(n_layers):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,),
                   p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h),
                   p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q),
                   p + "mlp.gate_proj.weight": (m, h), p + "mlp.up_proj.weight": (m, h), p + "mlp.down_proj.weight": (h, m)}
    header, at = {}, 0
    for name, shape in shapes.items():
        n = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    signs = bytes(0x3c if b & 1 else 0xbc for b in range(256))
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            left = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
            while left:
                n = min(left, 1 << 24)
                piece = bytearray(n)
                piece[0::2] = os.urandom(n // 2)
                piece[1::2] = os.urandom(n // 2).translate(signs)
                f.write(piece)
                left -= n
    return at


class Model:
    def __init__(self, n_layers):
        self.n_layers = n_layers

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="tandem-model-")
        self.bytes = make_model(self.path, self.n_layers)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path)


def packed_files(directory=os.path.join(CACHE, "tandem")):
    return sorted(glob.glob(os.path.join(directory, "*")))


def pss(pid):
    with open(f"/proc/{pid}/smaps_rollup") as f:
        return 1024 * int(re.search(r"^Pss: +(\d+) kB", f.read(), re.M).group(1))


def run(model, args):
    """Returns answers of two prefill and two decode workers, and their memory; shared pages count once."""
    requests = [dict(r, max_tokens=6) for r in golden_requests(golden(os.path.join(DEMO, "golden.json")))]
    with Cluster(model=model.path, prefill=2, decode=2, worker_args=["--pool-bytes", "16M", "--numerics", "bf16", *args]) as c:
        results = c.generate(requests)
        memory = sum(pss(w.pid) for w in c.workers)
        logs = "".join(open(os.path.join(c.dir, w.name + ".log"), errors="replace").read() for w in c.workers)
    return {k: r["token_ids"] for k, r in results.items()}, memory, logs


@test
def test_four_workers_hold_one_copy_of_the_weights():
    with Model(n_layers=4) as m, tempfile.TemporaryDirectory() as d:
        alone, memory_alone, logs = run(m, ["--no-packed-cache"])
        assert "packed weights" not in logs and not packed_files(d), logs
        shared, memory_shared, logs = run(m, ["--packed-cache", d])
        assert logs.count("packed weights: written") == 1 and logs.count("packed weights: mapped") == 3, logs
        assert " warn packed" not in logs and len(packed_files(d)) == 1, logs
        print(f"# {m.bytes >> 20} MiB of weights; memory of the workers {memory_alone >> 20} MiB alone, {memory_shared >> 20} shared: "
              f"{(memory_alone - memory_shared) / m.bytes:.2f} copies less")
        assert alone == shared
        assert memory_alone - memory_shared > 2.7 * m.bytes


def start_time(binary, model, args):
    """Seconds until a worker is ready."""
    read, write = os.pipe()
    began = time.monotonic()
    child = subprocess.Popen([binary, "--model", model, "--pool-bytes", "16M", "--listen", "127.0.0.1:0", *args],
                             env=dict(os.environ, TANDEM_READY_FD=str(write)), pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    with os.fdopen(read) as f:
        assert f.readline(), "it did not start"
    took = time.monotonic() - began
    child.terminate()
    child.wait(30 * SLOW)
    return took


@test
def test_worker_starts_sooner_with_weights_that_are_packed():
    """The model was just written, so neither way reads it from the disk."""
    binary = os.path.join(BUILD, "decode/tandem-decode")
    with Model(n_layers=64 if LONG else 2) as m, tempfile.TemporaryDirectory() as d:
        for weights in ("as-stored", "int4") if LONG else ("int4",):
            args = ["--numerics", "bf16", "--weights", weights]
            writing = start_time(binary, m.path, [*args, "--packed-cache", d])
            for _ in range(3):  # other processes may disturb
                packing = start_time(binary, m.path, [*args, "--no-packed-cache"])
                mapping = start_time(binary, m.path, [*args, "--packed-cache", d])
                print(f"# {m.bytes >> 20} MiB, {weights}: ready after {packing:.2f} s packing, {writing:.2f} s packing and "
                      f"writing, {mapping:.2f} s mapping: {packing / mapping:.1f} times as fast")
                if mapping < packing and not LONG:
                    break
            assert mapping < packing, (weights, packing, mapping)


@test
def test_up_and_local_pass_the_options_on():
    with tempfile.TemporaryDirectory() as d:
        for args, n in ((["--no-packed-cache"], 0), ([], 1), (["--packed-cache", d], 1)):
            place = d if "--packed-cache" in args else os.path.join(CACHE, "tandem")
            shutil.rmtree(place, ignore_errors=True)
            run_dir = tempfile.mkdtemp(prefix="tandem-up-")
            up = subprocess.run([TANDEM, "up", "--run-dir", run_dir, "--model", DEMO, "--listen", "127.0.0.1:0", "--detach",
                                 "--pool-bytes", "8M", "--no-store", *args], capture_output=True, text=True, timeout=60 * SLOW)
            subprocess.run([TANDEM, "down", "--run-dir", run_dir], check=True, timeout=60 * SLOW)
            shutil.rmtree(run_dir)
            assert up.returncode == 0, up.stderr
            assert len(packed_files(place)) == n, (args, packed_files(place))
    for options, n in (("--no-packed-cache", 0), ("", 1)):
        shutil.rmtree(os.path.join(CACHE, "tandem"), ignore_errors=True)
        subprocess.run([TANDEM, "generate", "--local", "--model", DEMO, "--max-tokens", "1", "--worker-options",
                        "--pool-bytes 8M " + options, "hello"], check=True, capture_output=True, timeout=60 * SLOW)
        assert len(packed_files()) == n, packed_files()


@test
def test_weights_that_are_made_up_are_not_kept():
    shutil.rmtree(os.path.join(CACHE, "tandem"), ignore_errors=True)
    with Cluster(dummy="hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,ffn=64,vocab=1536,positions=256") as c:
        assert c.status()["workers"]
    assert not packed_files()


if __name__ == "__main__":
    main()
