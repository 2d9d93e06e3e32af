"""tandem up and down: a cluster of real processes under one supervisor."""
import contextlib, glob, json, os, shutil, signal, socket, subprocess, tempfile, time

from harness import DEMO, SLOW, TANDEM, alive, main, test, wait_until

SMALL = ["--pool-bytes", "8M", "--store-dram", "8M", "--store-ssd", "256M"]


class RunDir:
    """A run directory of its own. At the end everything that ran in it has ended, even if a test failed."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="tandem-up-")
        self.seen = set()
        return self

    def __exit__(self, *_):
        try:
            self.tandem("down")
        finally:
            for pid in self.seen:
                with contextlib.suppress(ProcessLookupError):
                    if alive(pid):
                        os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.path, ignore_errors=True)

    def tandem(self, command, *args, env=None, run_dir=True):
        dir_args = ["--run-dir", self.path] if run_dir else []
        return subprocess.run([TANDEM, command, *dir_args, *args], capture_output=True, text=True, errors="replace",
                              timeout=60 * SLOW, env=dict(os.environ, **(env or {})))

    def up(self, *args, env=None):
        return self.tandem("up", "--model", DEMO, "--listen", "127.0.0.1:0", "--detach", *SMALL, *args, env=env)

    def up_well(self, *args):
        out = self.up(*args)
        assert out.returncode == 0, out.stderr
        assert out.stdout.startswith("tandem is up: router " + self.router() + " "), out.stdout
        self.pids()
        return out

    def file(self, name):
        with open(os.path.join(self.path, name), errors="replace") as f:
            return f.read()

    def router(self):
        return self.file("router.address").strip()

    def cluster(self):
        return json.loads(self.file("cluster.json"))

    def pids(self):
        """Process ids by name; the supervisor's name is "up"."""
        cluster = self.cluster()
        pids = {p["name"]: p["pid"] for p in cluster["processes"]}
        pids["up"] = cluster["pid"]
        self.seen.update(pid for pid in pids.values() if pid)
        return pids

    def status(self, *args):
        out = self.tandem("status", "--router", self.router(), "--json", *args, run_dir=False)
        return {w["name"]: w for w in json.loads(out.stdout)["workers"]} if out.returncode == 0 else {}


def none_alive(pids):
    return not any(alive(p) for p in pids.values())


def one_line(out, *words, code=1):
    lines = out.stderr.strip().splitlines()
    assert out.returncode == code and len(lines) == 1 and out.stdout == "", (out.returncode, out.stdout, out.stderr)
    assert all(w in lines[0] for w in words), lines[0]


@test
def test_up_starts_all_and_down_leaves_nothing_but_logs_and_store():
    with RunDir() as r:
        out = r.up_well("--prefill", "2", "--decode", "2", "--threads", "2")
        names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "store-0"]
        for name in [*names, "router"]:
            assert f"{name} ready " in out.stderr, out.stderr
        workers = r.status()
        assert sorted(workers) == sorted(names)
        assert all(w["state"] == "ready" for w in workers.values()), workers
        assert all(w["pages"]["total"] > 0 for w in workers.values() if w["role"] != "store"), workers
        assert "store" in workers["store-0"] and "store" not in workers["decode-0"]
        pids = r.pids()
        assert all(workers[n]["pid"] == pids[n] for n in names)
        answer = r.tandem("generate", "--router", r.router(), "--max-tokens", "4", "Hello", run_dir=False)
        assert answer.returncode == 0, answer.stderr
        down = r.tandem("down")
        assert down.returncode == 0, down.stderr
        assert none_alive(pids), [n for n, p in pids.items() if alive(p)]
        assert sorted(os.listdir(r.path)) == ["logs", "secret", "store"]
        again = r.tandem("down")
        assert again.returncode == 0 and "nothing runs" in again.stderr, again.stderr
        r.up_well()  # logs and store of an earlier run don't hinder


@test
def test_a_killed_process_is_restarted_on_its_address():
    with RunDir() as r:
        r.up_well()
        for name in ("decode-0", "store-0", "prefill-0"):
            before, address = r.pids()[name], r.status()[name]["address"]
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: r.status()[name]["pid"] != before and r.status()[name]["state"] == "ready", 10,
                       name + " is ready again")
            assert r.status()[name]["address"] == address
            assert f"{name} ended (signal 9" in r.file("logs/up.log")
            wait_until(lambda: r.pids()[name] == r.status()[name]["pid"], 5, "cluster.json says so too")
        router = r.router()
        os.kill(r.pids()["router"], signal.SIGKILL)
        wait_until(lambda: r.status("--wait", "1"), 10, "the router answers again")
        assert r.router() == router
        assert {p["name"]: p["restarts"] for p in r.cluster()["processes"]} == dict.fromkeys(
            ["decode-0", "store-0", "prefill-0", "router"], 1)


@test
def test_a_process_that_lives_and_does_not_answer_is_started_again():
    with RunDir() as r:
        r.up_well("--deaf-ms", f"{3 * SLOW}s")
        pids = r.pids()
        health = r.tandem("health", *[p["address"] for p in r.cluster()["processes"]], "--json", run_dir=False)
        assert health.returncode == 0, health.stdout + health.stderr
        assert [p["state"] for p in json.loads(health.stdout)["processes"]] == ["serving"] * 4, health.stdout
        for name in ("router", "decode-0"):
            os.kill(pids[name], signal.SIGSTOP)
        health = r.tandem("health", r.router(), run_dir=False)
        assert health.returncode == 1 and "silent" in health.stdout, health.stdout
        wait_until(lambda: all(r.pids()[n] not in (0, pids[n]) for n in ("router", "decode-0")), 30, "restarts")
        assert "has not answered for" in r.file("logs/up.log"), r.file("logs/up.log")
        wait_until(lambda: [w["state"] for w in r.status().values()] == ["ready"] * 3, 30, "the cluster is ready again")
        answer = r.tandem("generate", "--router", r.router(), "--max-tokens", "4", "Hello", run_dir=False)
        assert answer.returncode == 0, answer.stderr
        assert all(r.pids()[n] == pids[n] for n in ("prefill-0", "store-0")), (pids, r.pids())
        gone = r.tandem("health", "127.0.0.1:1", r.router(), run_dir=False)
        assert gone.returncode == 1 and "unreachable" in gone.stdout and " serving" in gone.stdout, gone.stdout


@test
def test_a_router_that_is_started_again_does_not_miss_who_was_scaled_away():
    with RunDir() as r:
        r.up_well("--decode", "2", "--stores", "2")
        assert r.tandem("scale", "decode=1", "store=1", "prefill=2").returncode == 0
        os.kill(r.pids()["router"], signal.SIGKILL)
        wait_until(lambda: sorted(r.status("--wait", "1")) == ["decode-0", "prefill-0", "prefill-1", "store-0"], 15,
                   lambda: f"the router has them all, and no other: {r.status()}")
        audit = r.tandem("audit", "--router", r.router(), run_dir=False)
        assert audit.returncode == 0, audit.stdout


@test
def test_a_process_is_restarted_also_when_the_logs_are_gone():
    with RunDir() as r:
        r.up_well("--no-store")
        pid = r.pids()["decode-0"]
        shutil.rmtree(os.path.join(r.path, "logs"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: r.status().get("decode-0", {}).get("state") == "ready" and r.status()["decode-0"]["pid"] != pid, 10,
                   "decode-0 is ready again")
        assert " ready address=" in r.file("logs/decode-0.log")


@test
def test_cluster_json_is_written_when_it_can_be_again():
    with RunDir() as r:
        r.up_well("--no-store")
        path = os.path.join(r.path, "cluster.json")
        pids = r.pids()
        os.unlink(path)
        os.mkdir(path)  # as a full disk: nothing can be put there
        os.kill(pids["decode-0"], signal.SIGKILL)
        wait_until(lambda: r.status().get("decode-0", {}).get("state") == "ready" and r.status()["decode-0"]["pid"] != pids["decode-0"], 10,
                   "decode-0 is ready again")
        wait_until(lambda: "can't be written" in r.file("logs/up.log"), 5, "it says so")
        assert not os.path.exists(path + ".new")
        os.rmdir(path)
        wait_until(lambda: os.path.exists(path), 5, "cluster.json is there")
        assert r.pids()["decode-0"] == r.status()["decode-0"]["pid"]
        assert r.file("logs/up.log").count("can't be written") == 1


@test
def test_a_second_up_on_the_run_dir_is_refused():
    with RunDir() as r:
        r.up_well("--no-store")
        pids = r.pids()
        one_line(r.up("--no-store"), "runs here already", str(pids["up"]))
        assert all(alive(p) for p in pids.values()) and r.pids() == pids


@test
def test_a_wrong_model_is_one_clear_line():
    with RunDir() as r, tempfile.TemporaryDirectory() as empty:
        one_line(r.tandem("up", "--model", "/no/such/model", "--detach"), "--model", "/no/such/model", code=2)
        one_line(r.tandem("up", "--model", empty, "--detach"), empty)
        one_line(r.tandem("up", "--detach"), "--model", code=2)
        one_line(r.up("--silence-ms", "499"), "--silence-ms: 499 is not in 500 ..", code=2)  # two heartbeats


@test
def test_more_workers_than_devices_are_one_clear_line():
    few = {"CUDA_VISIBLE_DEVICES": "0"}
    with RunDir() as r:
        one_line(r.up("--device", "cuda", env=few), "--device cuda: 2 devices are needed (workers: 2, ranks of each: 1)",
                 "1 are there", "--device cuda:N", code=2)
        one_line(r.up("--device", "cuda", "--tensor-parallel", "2", "--decode", "3", env=few), "8 devices are needed",
                 code=2)
        one_line(r.up("--device", "cuda", "--prefill", "0", "--tensor-parallel", "2", env=few),
                 "2 devices are needed (workers: 1, ranks of each: 2)", code=2)


@test
def test_a_busy_port_is_one_clear_line():
    with RunDir() as r, socket.create_server(("127.0.0.1", 0)) as busy:
        address = "127.0.0.1:%d" % busy.getsockname()[1]
        one_line(r.up("--listen", address), "--listen", address, "in use")
        assert os.listdir(r.path) == ["logs"]


@test
def test_a_worker_that_can_not_start_stops_the_whole():
    with RunDir() as r:
        out = r.up("--no-store", env={"TANDEM_ROUTER_DISPATCH_MS": "249"})  # heartbeats acknowledge legs every 250 ms
        assert out.returncode == 1 and "--dispatch-ms: 249 is not in 250 .." in out.stderr, out.stderr
        out = r.up("--no-store", env={"TANDEM_DECODE_MAX_ROWS": "1"})
        assert out.returncode == 1 and out.stdout == "", out.stdout
        assert "decode-0 ended before it was ready (exit code 2)" in out.stderr, out.stderr
        assert "--max-rows 1 is less than --max-batch" in out.stderr, out.stderr
        assert sorted(os.listdir(r.path)) == ["logs", "secret"]


@test
def test_workers_share_out_the_model_among_ranks_or_say_why_not():
    with RunDir() as r:
        r.up_well("--no-store", "--tensor-parallel", "2", "--pipeline-parallel", "2", "--rank-devices", "same")
        for name in ("prefill-0", "decode-0"):
            assert "ranks tensor=2 pipeline=2 exchange=" in r.file(f"logs/{name}.log")
        answer = r.tandem("generate", "--router", r.router(), "--max-tokens", "4", "Hello", run_dir=False)
        assert answer.returncode == 0, answer.stderr
    with RunDir() as r:
        out = r.up("--no-store", "--tensor-parallel", "7")
        assert out.returncode == 1 and "kv heads can't be shared evenly among 7 tensor-parallel ranks" in out.stderr, out.stderr


@test
def test_up_makes_weights_up_and_takes_another_chat_template():
    with RunDir() as r, tempfile.NamedTemporaryFile("w", suffix=".jinja") as f:
        f.write("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
        f.flush()
        dims = "layers=2,kv_heads=1,heads=2,head_dim=32,hidden=64,ffn=128,vocab=1536,positions=700"
        r.up_well("--dummy", dims, "--chat-template", f.name)
        answer = r.tandem("generate", "--router", r.router(), "--json", "--max-tokens", "2", "Hello", run_dir=False)
        assert answer.returncode == 0, answer.stderr
        once = r.tandem("generate", "--router", r.router(), "--json", "--no-chat", "--max-tokens", "2", "HelloHello", run_dir=False)
        both = [json.loads(a.stdout)["usage"]["prompt_tokens"] for a in (answer, once)]
        assert both[0] == both[1] or both[0] + 1 == both[1], both  # a text begins with the first token


@test
def test_a_worker_that_stands_still_is_killed_when_it_is_scaled_away():
    with RunDir() as r:
        assert r.up("--no-store", "--decode", "2", env={"TANDEM_DECODE_DRAIN_MS": "100"}).returncode == 0
        pid = r.pids()["decode-1"]
        os.kill(pid, signal.SIGSTOP)
        out = r.tandem("scale", "decode=1", "--wait", str(40 * SLOW))
        assert out.returncode == 0 and "decode=1" in out.stderr, out.stderr
        assert not alive(pid) and "decode-1 has not ended yet: killed" in r.file("logs/up.log")
        assert r.tandem("scale", "decode=2").returncode == 0  # its number is free again


@test
def test_down_waits_until_processes_that_stand_still_are_killed():
    with RunDir() as r:
        r.up_well()
        pids = r.pids()
        for name in ("router", "decode-0", "store-0"):  # router, workers and stores have 10 s each
            os.kill(pids[name], signal.SIGSTOP)
        down = r.tandem("down")
        assert down.returncode == 0, down.stderr
        assert none_alive(pids), [n for n, p in pids.items() if alive(p)]


@test
def test_a_run_dir_that_is_empty_is_refused_and_files_of_others_stay():
    with RunDir() as r:
        for command in ("up", "down", "scale"):
            args = {"up": ["--model", DEMO, "--detach", "--no-store"], "down": [], "scale": ["decode=2"]}[command]
            out = subprocess.run([TANDEM, command, *args, "--run-dir", ""], cwd=r.path, capture_output=True, text=True, timeout=60 * SLOW)
            assert out.returncode == 2 and "--run-dir: is empty" in out.stderr, (command, out)
        assert os.listdir(r.path) == []
        one_line(r.up("--store-dir", ""), "--store-dir: is empty", code=2)
        os.mkdir(os.path.join(r.path, "faults"))
        for name in ("notes.txt", "store-0x", "decode-0"):
            open(os.path.join(r.path, "faults", name), "w").close()
        r.up_well("--no-store")
        assert r.tandem("down").returncode == 0
        assert sorted(os.listdir(os.path.join(r.path, "faults"))) == ["notes.txt", "store-0x"]
        one_line(r.up("--no-store", "--faults"), "faults: can't be removed: Directory not empty")


@test
def test_a_run_dir_may_have_any_bytes_in_its_name():
    with RunDir() as r:
        name = os.fsdecode(os.fsencode(r.path) + b"\xff")
        os.rename(r.path, name)
        r.path = name
        r.up_well("--no-store")
        out = r.tandem("scale", "decode=2")
        assert out.returncode == 0 and "decode=2" in out.stderr, out.stderr
        assert len(r.cluster()["processes"]) == 4


@test
def test_faults_can_be_set_where_asked_for_and_do_not_outlive_the_cluster():
    with RunDir() as r:
        faults = os.path.join(r.path, "faults")
        os.mkdir(faults)
        with open(os.path.join(faults, "decode-0"), "w") as f:
            f.write("wire.connect:fail")
        r.up_well("--faults")
        assert os.listdir(faults) == [] and os.stat(faults).st_mode & 0o777 == 0o700
        assert r.tandem("scale", "decode=2").returncode == 0
        wait_until(lambda: r.pids().get("decode-1"), 10, "decode-1 is there")
        for name, pid in r.pids().items():
            with open(f"/proc/{pid}/cmdline") as f:
                asked = [a for a in f.read().split("\0") if a.startswith("--faults=")]
            assert asked == ([f"--faults=@{faults}/{name}"] if name not in ("up", "router") else []), (name, asked)
        os.kill(r.pids()["router"], signal.SIGUSR1)  # the router has no script to read, and goes on
        assert r.status()
        assert r.tandem("down").returncode == 0 and sorted(os.listdir(r.path)) == ["logs", "secret", "store"]


@test
def test_ctrl_c_stops_a_cluster_in_the_foreground():
    with RunDir() as r:
        up = subprocess.Popen([TANDEM, "up", "--model", DEMO, "--run-dir", r.path, "--listen", "127.0.0.1:0", *SMALL],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert up.stdout.readline().startswith("tandem is up: ")
        pids = r.pids()
        os.killpg(up.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        up.communicate(timeout=30 * SLOW)
        assert up.returncode == 0 and none_alive(pids)
        log = r.file("logs/up.log")
        ends = [log.index(f"{n} ended (exit code 0)") for n in ("router", "decode-0", "store-0")]
        assert ends == sorted(ends), log


@test
def test_processes_do_not_outlive_a_killed_supervisor():
    with RunDir() as r:
        r.up_well()
        pids = r.pids()
        os.kill(pids["up"], signal.SIGKILL)
        wait_until(lambda: none_alive(pids), 20, "all processes end")
        down = r.tandem("down")
        assert down.returncode == 0 and "nothing runs" in down.stderr, down.stderr
        r.up_well()


@test
def test_a_second_signal_does_not_wait_for_a_frozen_worker():
    with RunDir() as r:
        r.up_well("--no-store")
        pids = r.pids()
        os.kill(pids["prefill-0"], signal.SIGSTOP)
        os.kill(pids["up"], signal.SIGTERM)
        wait_until(lambda: not alive(pids["decode-0"]), 10, "the others drain")
        assert alive(pids["prefill-0"]) and alive(pids["up"])
        end = time.monotonic() + 8 * SLOW  # sooner than the ten seconds that it has for draining
        while alive(pids["up"]) and time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["up"], signal.SIGTERM)
            time.sleep(0.2)
        assert none_alive(pids)


@test
def test_the_secret_is_random_and_on_no_command_line():
    secrets = set()
    for _ in range(2):
        with RunDir() as r:
            r.up_well("--no-store")
            for name, pid in r.pids().items():
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    line = f.read()
                if name == "up":
                    continue
                with open(f"/proc/{pid}/environ", "rb") as f:
                    env = dict(v.split(b"=", 1) for v in f.read().split(b"\0") if b"=" in v)
                secret = env[b"TANDEM_" + name.split("-")[0].upper().encode() + b"_SECRET"]
                assert len(secret) == 64 and secret not in line
                for log in glob.glob(os.path.join(r.path, "logs", "*")):
                    assert secret.decode() not in open(log).read()
                secrets.add(secret)
                with open(os.path.join(r.path, "secret"), "rb") as f:
                    assert f.read() == secret + b"\n" and os.fstat(f.fileno()).st_mode & 0o777 == 0o600
    assert len(secrets) == 2


def ask(r, prompt):
    """Asks with the same prompt. Returns its cached tokens by source, and the answer."""
    out = subprocess.run([TANDEM, "generate", "--jsonl", "--router", r.router()], capture_output=True, text=True,
                         input=json.dumps({"id": "a", "prompt_ids": prompt, "max_tokens": 4, "greedy": True, "ignore_eos": True}),
                         timeout=60 * SLOW)
    answer = json.loads(out.stdout)
    assert "error" not in answer, answer
    return answer["usage"]["cached_tokens"], answer["token_ids"]


@test
def test_a_restarted_cluster_finds_its_prefixes_on_ssd_also_with_another_secret():
    prompt = [i * 7 % 1500 for i in range(600)]
    whole = 37 * 16  # at least the last token is computed
    with RunDir() as r, tempfile.TemporaryDirectory(prefix="tandem-ssd-") as ssd:
        args = ("--store-dir", os.path.join(ssd, "store"), "--plan", "split")
        secrets, first = set(), None
        for run in ("first", "same run directory", "run directory gone", "secret gone"):
            if run == "run directory gone":
                shutil.rmtree(r.path)
            elif run == "secret gone":
                os.unlink(os.path.join(r.path, "secret"))
            out = r.up(*args, env={"TANDEM_ROUTER_PREFIX": "load"})
            assert out.returncode == 0, out.stderr
            r.pids()
            secrets.add(r.file("secret"))
            if run == "first":
                assert not ask(r, prompt)[0]["ssd"]
                wait_until(lambda: r.status()["store-0"]["store"]["blocks_ssd"] >= 37, 20, "the prompt is on SSD")
                first = ask(r, prompt)[1]
            else:
                cached, answer = ask(r, prompt)
                assert cached["ssd"] == whole and answer == first, (run, cached)
            assert os.stat(os.path.join(ssd, "store", "cache.key")).st_mode & 0o777 == 0o600
            assert r.tandem("down").returncode == 0
        assert len(secrets) == 3


@test
def test_a_secret_that_others_may_read_or_that_is_none_is_refused():
    with RunDir() as r:
        secret = os.path.join(r.path, "secret")
        for text, mode, words in (("0" * 64 + "\n", 0o644, "nobody else may read it"), ("letmein\n", 0o600, "64 hex digits")):
            with open(secret, "w") as f:
                f.write(text)
            os.chmod(secret, mode)
            one_line(r.up("--no-store"), secret, words)


main()
