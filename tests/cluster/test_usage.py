"""The commands as a user sees them: wrong use, failed writes, options from the environment, and everything
that --help promises."""
import json, os, re, shlex, socket, subprocess, sys, tempfile, time
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

SERVERS = {"tandem-prefill": "prefill/tandem-prefill", "tandem-decode": "decode/tandem-decode", "tandem-router": "router/tandem-router",
           "tandem-kvstore": "kvstore/tandem-kvstore", "tandem-gateway": "gateway/tandem-gateway"}
RUN = RUNTIME


def call(args, **kw):
    env = {k: v for k, v in os.environ.items() if not re.match("TANDEM_(ROUTER|UP|GENERATE)", k)}
    env.update({"XDG_RUNTIME_DIR": RUN, **kw.pop("env", {})})
    kw.setdefault("stdin", subprocess.DEVNULL) if "input" not in kw else None
    program = os.path.join(BUILD, SERVERS[args[0]]) if args and args[0] in SERVERS else TANDEM
    args = args[1:] if args and args[0] in SERVERS else args
    return subprocess.run([program, *args], **{"capture_output": True, "text": True, "timeout": 60 * SLOW, "env": env, **kw})


# arguments, text that the error quotes
WRONG = [
    (["foo"], "'foo'"), (["--foo"], "'--foo'"), (["help", "foo"], "'foo'"), ([""], "''"),
    (["generate", "--foo", "x"], "--foo"), (["generate", "--temperature", "hot", "x"], "'hot'"),
    (["generate", "--temperature", "101", "x"], "--temperature"), (["generate", "--max-tokens", "1.5", "x"], "'1.5'"),
    (["generate", "--greedy", "--temperature", "1", "x"], "--greedy"), (["generate", "--timing", "false", "x"], "--timing=false"),
    (["generate", "--concurrency", "0", "x"], "0"), (["generate", "--jsonl", "x"], "'x'"), (["generate", "--n", "2", "x"], "--n"),
    (["generate"], "empty"), (["generate", ""], "empty"), (["generate", "--json", "true", "x"], "--json=true"), (["generate", "--local", "x"], "--model"), (["generate", "--seed", "-1", "x"], "'-1'"),
    (["generate", "--router", "127.0.0.1:70000", "x"], "127.0.0.1:70000"), (["chat", "x"], "'x'"), (["chat", "--seed", "x"], "'x'"),
    (["up"], "--model"), (["up", "x"], "'x'"), (["up", "--model", DEMO, "--listen", "127.0.0.1:70000"], "127.0.0.1:70000"),
    (["up", "--model", DEMO, "--listen", "nonsense"], "nonsense"), (["up", "--model", "/nonexistent"], "/nonexistent"), (["down", "x"], "'x'"),
    (["status", "--router", "nonsense"], "'nonsense'"), (["status", "x"], "'x'"), (["status", "--router", "127.0.0.1:65536"], "127.0.0.1:65536"), (["scale", "prefil=3"], "'prefil=3'"),
    (["scale"], "prefill=N"), (["drain"], "WORKER"), (["drain", "a", "b"], "'b'"), (["explain", "a", "b"], "'b'"), (["audit", "x"], "'x'"),
    (["cache", "pinn", "x"], "'pinn'"), (["cache"], "pin"), (["cache", "pin", "--all"], "--all"), (["cache", "flush", "--all", "x"], "'x'"),
    (["cache", "pin", "--request", "[]"], "--request"), (["tokenize"], "TEXT"), (["eval"], "FILE"), (["tokenize", "--jsonl"], "--tokenizer"),
    (["store"], "COMMAND"), (["store", "lst", "/x"], "'lst'"), (["store", "ls"], "DIR"), (["store", "ls", "/x", "y"], "'y'"),
    (["store", "export", "/x"], "FILE"), (["trace"], "KIND"), (["trace", "statt", "x"], "'statt'"), (["trace", "stat"], "TRACE"),
    (["trace", "stat", "a", "b"], "'b'"), (["trace", "synth", "a"], "'a'"), (["bench"], "AREA"), (["bench", "foo"], "'foo'"),
    (["compare", "a"], "two reports"), (["replay"], "TRACE"), (["replay", "a", "b"], "'b'"), (["simulate"], "TRACE"), (["simulate", "a", "b"], "'b'"),
    (["tandem-decode", "--nonsense"], "--nonsense"), (["tandem-decode", "x"], "'x'"), (["tandem-decode"], "--model"),
    (["tandem-decode", "--model", DEMO, "--listen", "127.0.0.1:70000"], "127.0.0.1:70000"), (["tandem-router"], "--model"),
    (["tandem-router", "--model", DEMO, "--listen", "127.0.0.1:99999999"], "127.0.0.1:99999999"),
    (["tandem-router", "--model", DEMO, "--workers", "127.0.0.1:1,127.0.0.1:70000"], "127.0.0.1:70000"),
    (["tandem-router", "--model", DEMO, "--metrics-listen", "127.0.0.1:70000"], "127.0.0.1:70000"), (["tandem-kvstore", "--x"], "--x"),
    (["tandem-gateway", "--routers", ""], "--routers"), (["tandem-gateway", "--routers", "a:1,,b:1"], "--routers"),
    (["tandem-gateway", "--listen", "127.0.0.1:70000"], "127.0.0.1:70000"), (["tandem-gateway", "--tls-cert", "/none"], "--tls-key"),
    (["tandem-prefill", "--model", DEMO, "--pages", "minus"], "minus"), (["tandem-kvstore", "--model", DEMO, "--faults", "x"], "x"),
]


@test
def test_wrong_use_ends_with_2_and_quotes_the_word():
    wrong = []
    for args, word in WRONG:
        out = call(args)
        if out.returncode != 2 or word not in out.stderr or out.stdout:
            wrong.append(f"{args}: {out.returncode}, expected {word}: {(out.stderr or out.stdout)[:300]!r}")
    assert not wrong, f"{len(wrong)} of {len(WRONG)}:\n" + "\n".join(wrong)
    out = call(["status"], env={"TANDEM_ROUTER": "127.0.0.1:70000"})
    assert out.returncode == 2 and "127.0.0.1:70000" in out.stderr, out
    assert call([]).returncode == 2


@test
def test_help_of_a_command_is_that_of_the_command():
    for command in ("up", "generate", "store", "trace", "bench"):
        for args in (["help", command], [command, "--help"]):
            out = call(args)
            assert out.returncode == 0 and f"usage: tandem {command}" in out.stdout, (args, out)
            assert command == "trace" or f"TANDEM_{command.upper()}_NAME" in out.stdout, out.stdout
    assert call(["help"]).stdout == call(["--help"]).stdout
    assert call(["generate", "--timing=false", "--print-config"]).returncode == 0


@test
def test_options_come_from_the_environment():
    def config(*args, **env):
        out = call([*args, "--print-config"], env=env)
        assert out.returncode == 0, out
        return json.loads(out.stdout)
    assert config("generate", TANDEM_GENERATE_MAX_TOKENS="7", TANDEM_GENERATE_TIMING="false")["max-tokens"] == "7"
    assert config("up", TANDEM_UP_PREFILL="3")["prefill"] == 3 and config("up", "--prefill", "2", TANDEM_UP_PREFILL="3")["prefill"] == 2
    assert config("trace", "stat", TANDEM_TRACE_JSON="true")["json"] is True
    out = call(["generate", "x"], env={"TANDEM_GENERATE_SEED": "x"})
    assert out.returncode == 2 and "seed" in out.stderr, out


@test
def test_print_config_keeps_secrets():
    for server in SERVERS:
        if server == "tandem-gateway":  # it has none
            continue
        out = call([server, "--secret", "hunter2", "--print-config"])
        assert out.returncode == 0 and "hunter2" not in out.stdout and "secret" not in json.loads(out.stdout), (server, out)
    out = call(["bench", "transfer", "--secret", "hunter2", "--print-config"])
    assert out.returncode == 0 and "hunter2" not in out.stdout, out


@test
def test_failed_writes_end_with_1():
    with Cluster() as c, open("/dev/full", "w") as full:
        trace = os.path.join(RUN, "trace.jsonl")
        assert call(["trace", "synth", "--requests", "5", "--output", trace]).returncode == 0
        to = ["--router", c.router.address]
        for args in (["help"], ["--version"], ["up", "--help"], ["tandem-router", "--help"], ["tandem-decode", "--version"],
                     ["generate", "--print-config"],
                     ["trace", "synth", "--requests", "5"], ["trace", "stat", trace], ["simulate", trace], ["tokenize", "--tokenizer", DEMO, "x"],
                     ["tokenize", *to, "x"], ["status", *to], ["status", "--json", *to], ["audit", *to], ["generate", *to, "--max-tokens", "2", "x"],
                     ["generate", *to, "--json", "--max-tokens", "2", "x"], ["generate", *to, "--jsonl"], ["chat", "--max-tokens", "2", *to],
                     ["explain", *to], ["eval", "--limit", "9", __file__, *to], ["cache", "flush", "--all", *to],
                     ["bench", "sample", "--seconds", "0.01"]):
            line = json.dumps({"prompt_ids": [1], "max_tokens": 1}) + "\n"
            out = call(args, input=line, stdout=full, stderr=subprocess.PIPE, capture_output=False)
            assert out.returncode == 1 and "standard output" in out.stderr, (args, out)


@test
def test_an_error_names_the_command_to_try_next():
    to = ["--router", f"127.0.0.1:{free_port()}"]
    for args in (["status"], ["status", "--wait", "0.1"], ["generate", "--wait-ms", "0", "x"], ["chat"], ["audit"], ["explain"],
                 ["drain", "decode-0"], ["cache", "flush", "--all"], ["cache", "pin", "--wait-ms", "0", "x"], ["tokenize", "x"],
                 ["eval", "--wait-ms", "0", __file__]):
        out = call([*args, *to], input="hello\n")
        assert out.returncode == 1 and "tandem up" in out.stderr, (args, out)
    for args in (["scale", "decode=2"], ["down"]):
        out = call(args)
        assert "tandem up" in out.stderr or out.returncode == 0, (args, out)


@test
def test_waiting_for_a_router_is_told_and_ends():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # takes connections, and says nothing
        for args in (["generate", "x"], ["cache", "pin", "x"], ["eval", __file__]):
            began = time.monotonic()
            out = call([*args, "--wait-ms", "2500", "--router", f"127.0.0.1:{silent.getsockname()[1]}"])
            took = time.monotonic() - began
            assert out.returncode == 1 and "DEADLINE_EXCEEDED" in out.stderr.splitlines()[-1], out
            assert out.stderr.count("waiting for 127.0.0.1:") == 1 and "for 2.5 s at most" in out.stderr, out
            assert 2.4 < took < 2.5 + 2 * SLOW, (args, took)


VALUES = {"N": ["1", "16", "100"], "BYTES": ["1M"], "TIME": ["1s"], "X": ["0.5", "1"], "HOST:PORT": ["127.0.0.1:1"],
          "HOST:PORT,...": ["127.0.0.1:1,127.0.0.1:2"], "ADDR,...": ["127.0.0.1:1"], "SECONDS": ["1"], "DIR": ["/x"]}
SECRETS = ("secret", "cache-key", "admin-key", "api-key")
NUMBERS = ("N", "BYTES", "TIME", "X", "SECONDS")


def programs():
    """Everything that has a --help, as arguments: commands, kinds of traces, servers."""
    listed = call(["help"]).stdout.split("Examples")[0]
    commands = re.findall(r"^  (\w+) +\S", listed, re.M)
    kinds = re.findall(r"^  (\w+) +\S", call(["trace", "--help"]).stdout, re.M)
    assert len(commands) == 20 and len(kinds) == 4, (commands, kinds)
    return [[c] for c in commands if c != "trace"] + [["trace", k] for k in kinds] + [[s] for s in SERVERS]


def options_of(program):
    out = call([*program, "--help"])
    assert out.returncode == 0 and out.stdout.startswith("usage: tandem"), (program, out)
    found = re.findall(r"^  --([\w-]+)(?: (\S+|'[^']*'))?(?:  .*)?$", out.stdout, re.M)
    return [(name, kind) for name, kind in found if name not in ("config", "print-config", "version", "help")]


def setting(program, name):
    prefix = program[0].upper().replace("-", "_") if program[0] in SERVERS else "TANDEM_" + program[0].upper()
    return f"{prefix}_{name.upper().replace('-', '_')}"


def taken(program, chosen):
    """The configuration with these options as flags, if it is the same with them from the environment."""
    by_flag = call([*program, *(f"--{name}={value}" for name, value in chosen.items()), "--print-config"])
    by_env = call([*program, "--print-config"], env={setting(program, name): value for name, value in chosen.items()})
    if by_flag.returncode or by_flag.stdout != by_env.stdout:
        return None
    config = json.loads(by_flag.stdout)
    return config if all(name in config or name in SECRETS for name in chosen) else None


def untaken(program, chosen, configs):
    """Names of the options that are not taken, each by itself: some exclude each other, so sets that are
    refused are halved."""
    config = taken(program, chosen) if chosen else {}
    if config is not None:
        configs.update({name: config.get(name) for name in chosen})
        return []
    names = list(chosen)
    if len(names) == 1:
        return names
    halves = names[:len(names) // 2], names[len(names) // 2:]
    return [n for half in halves for n in untaken(program, {name: chosen[name] for name in half}, configs)]


@test
def test_every_option_in_help_is_taken_as_a_flag_and_from_the_environment():
    n, wrong = 0, []
    for program in programs():
        options, configs = options_of(program), {}
        n += len(options)
        # Each word of a choice must be taken; of other kinds the first value that is taken is enough.
        values = {name: kind.split("|") if "|" in kind else VALUES.get(kind, ["x", "1", "0.5"]) if kind else ["true", "false"]
                  for name, kind in options}
        choices, rest = [name for name, kind in options if "|" in kind], [name for name, kind in options if "|" not in kind]
        for i in range(max(map(len, values.values()), default=0)):
            wrong += [(program, name, values[name][i]) for name in
                      untaken(program, {name: values[name][i] for name in choices if i < len(values[name])}, configs)]
            rest = untaken(program, {name: values[name][min(i, len(values[name]) - 1)] for name in rest}, configs)
        wrong += [(program, name, values[name]) for name in rest]
        for name, kind in options:
            if kind in NUMBERS and kind != "N" or kind == "N" and isinstance(configs.get(name), int):
                bad = call([*program, f"--{name}=zero", "--print-config"])
                # Parameters of a request are checked when it is made.
                is_text = bad.returncode == 0 and isinstance(json.loads(bad.stdout).get(name), str)
                if not is_text and (bad.returncode != 2 or "--" + name not in bad.stderr):
                    wrong.append((program, name, bad))
    print(f"# {n} options")
    assert n > 250 and not wrong, f"{len(wrong)} of {n}: {wrong}"


@test
def test_every_example_in_help_and_documents_is_understood():
    documented = []
    for name in ("README.md", "docs/usage.md"):
        with open(os.path.join(SOURCE, name)) as f:
            documented += [line for line in f.read().splitlines() if line.startswith("    tandem ")]
    examples = [line.strip() for line in call(["help"]).stdout.split("Examples")[1].splitlines() if line.startswith("  tandem ")]
    assert len(examples) > 8 and len(documented) > 12
    for line in [*examples, *documented]:
        words = shlex.split(re.sub(r"[\[\]]", "", line.split(" # ")[0]).split("<")[0])
        command = words[1].split(";")[0]
        if "|" in " ".join(words):  # KIND|KIND: options of any of them
            assert call([command, "--help"]).returncode == 0, line
            continue
        out = call([*words[1:], "--print-config"])
        assert out.returncode == 0, (line, out)


main()
