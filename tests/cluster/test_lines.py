"""JSON lines of tandem generate: every member is one of the table's, with its type and bounds; other members
are refused by name."""
import json, os, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, request

GOOD = {"prompt_ids": [1, 2, 3], "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "x"}]

# members of a line (or its text), text that the refusal has
BAD = [
    ({"response_format": {}}, "response_format: no such member"),
    ({"max_token": 5}, "max_token: no such member"),
    ({"stop": 5}, "stop: "), ({"stop": ["a", 5]}, "stop: "), ({"stop": [""]}, "stop: "), ({"stop": ["x"] * 17}, "stop: "),
    ({"stop": "x" * 257}, "stop: "),
    ({"logit_bias": {"abc": 5}}, "logit_bias: 'abc'"), ({"logit_bias": {"5x": 5}}, "logit_bias: '5x'"),
    ({"logit_bias": {"": 5}}, "logit_bias: ''"), ({"logit_bias": {"-1": 5}}, "logit_bias: '-1'"),
    ({"logit_bias": {"4294967296": 5}}, "logit_bias: '4294967296'"), ({"logit_bias": {"5": "x"}}, "logit_bias: "),
    ({"logit_bias": {"5": 101}}, "logit_bias: "), ({"logit_bias": [5]}, "logit_bias: "),
    ({"priority": 4294967297}, "priority: "), ({"priority": 11}, "priority: "), ({"priority": "high"}, "priority: "),
    ({"priority": 1.5}, "priority: "),
    ({"prompt": "x"}, "prompt"), ({"messages": MESSAGES}, "messages"), ({"tools": []}, "tools: "), ({"variables": {}}, "variables: "),
    ({"add_special_tokens": True}, "add_special_tokens: "), ({"add_generation_prompt": False}, "add_generation_prompt: "),
    ({"greedy": True, "temperature": 0.5}, "greedy"), ({"greedy": 1}, "greedy: "), ({"temperature": "hot"}, "temperature: "),
    ({"temperature": 101}, "temperature: "), ({"top_p": 0}, "top_p: "), ({"min_p": -1}, "min_p: "), ({"top_k": -1}, "top_k: "),
    ({"top_k": 1.5}, "top_k: "), ({"presence_penalty": 3}, "presence_penalty: "), ({"frequency_penalty": []}, "frequency_penalty: "),
    ({"repetition_penalty": 0}, "repetition_penalty: "), ({"n": 17}, "n: "), ({"n": 0}, "n: "), ({"n": True}, "n: "),
    ({"seed": -1}, "seed: "), ({"seed": 1.5}, "seed: "), ({"seed": "x"}, "seed: "), ({"seed": "18446744073709551616"}, "seed: "),
    ({"seed": None}, "seed: "), ({"max_tokens": -1}, "max_tokens: "), ({"max_tokens": 2 ** 32}, "max_tokens: "),
    ({"min_tokens": "1"}, "min_tokens: "), ({"ignore_eos": "yes"}, "ignore_eos: "), ({"echo": 0}, "echo: "),
    ({"logprobs": 3}, "logprobs: "), ({"top_logprobs": 21}, "top_logprobs: "), ({"top_logprobs": True}, "top_logprobs: "),
    ({"prompt_logprobs": 1}, "prompt_logprobs: "), ({"bypass_cache": "no"}, "bypass_cache: "), ({"stop_ids": 5}, "stop_ids: "),
    ({"stop_ids": ["a"]}, "stop_ids: "), ({"allowed_ids": [-1]}, "allowed_ids: "), ({"prompt_ids": "abc"}, "prompt_ids: "),
    ({"prompt_ids": [1.5]}, "prompt_ids: "), ({"ttft_ms": "fast"}, "ttft_ms: "), ({"tpot_ms": -1}, "tpot_ms: "),
    ({"deadline_ms": 1.5}, "deadline_ms: "), ({"workflow_deadline_ms": -1}, "workflow_deadline_ms: "),
    ({"workflow_steps_left": "two"}, "workflow_steps_left: "), ({"tenant": 5}, "tenant: "), ({"tenant": "x" * 65}, "tenant: "),
    ({"cache_salt": []}, "cache_salt: "), ({"workflow_id": 1}, "workflow_id: "), ({"lora": False}, "lora: "), ({"model": 1}, "model: "),
    ('{"prompt_ids": [1], "max_tokens": 1, "max_tokens": 2}', "duplicate"), ('{"prompt": ', "JSON"), ('[1]', "JSON object"),
    ('{"messages": "x"}', "messages: "), ('{"messages": ["x"]}', "messages: "), ('{"prompt": 5}', "prompt: "), ('{"max_tokens": 3}', "prompt: "),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "tools: "),
    ('{"messages": [{"role": "user", "content": "x"}], "variables": []}', "variables: "), ('{"prompt": "x", "seed": 99999999999999999999}', "too big"),
]


def lines(c, text, *args):
    return subprocess.run([TANDEM, "generate", "--jsonl", "--router", c.router.address, *args], input=text, capture_output=True, text=True,
                          timeout=120 * SLOW)


@test
def test_every_bad_line_is_refused_by_number_and_member_and_the_others_go_on():
    text, want = [], {}
    for i, (bad, word) in enumerate(BAD):
        text.append(json.dumps({"id": f"good-{i}", **GOOD}))
        text.append(bad if isinstance(bad, str) else json.dumps({"id": f"bad-{i}", **GOOD, **bad}))
        want[len(text)] = (bad, word)
        text.append("")
    with Cluster() as c:
        out = lines(c, "\n".join(text))
        answers = [json.loads(line) for line in out.stdout.splitlines()]
        errors = {a["error"].get("line"): a for a in answers if "error" in a}
        good = [a.get("id") for a in answers if "error" not in a]
        wrong = []
        for number, (bad, word) in want.items():
            a = errors.get(number)
            if not a or a["error"]["code"] != "INVALID_ARGUMENT" or word not in a["error"]["message"]:
                wrong.append(f"line {number}: {json.dumps(bad)[:80]}: {a and a['error']}, expected {word}")
            elif isinstance(bad, dict) and a.get("id") != json.loads(text[number - 1])["id"]:
                wrong.append(f"line {number}: {a}")
        assert not wrong, f"{len(wrong)} of {len(BAD)}:\n" + "\n".join(wrong)
        assert good and sorted(map(str, good)) == sorted(f"good-{i}" for i in range(len(BAD))), good
        assert out.returncode == 1 and "line 2: " in out.stderr, (out.returncode, out.stderr)
        out = lines(c, text[0])
        assert out.returncode == 0, out.stderr
        out = lines(c, '{"id": "a", "prompt_ids": [1], "max_tokens": 1}\n\n{"id": "b", "prompt_ids": [9999], "max_tokens": 1}\n')
        assert out.returncode == 1 and "line 3: " in out.stderr, out  # the router refuses this line


@test
def test_every_member_of_the_table_is_taken():
    with Cluster() as c:
        for members in ({"prompt_ids": [1, 2, 3], "model": "tandem-demo", "lora": "", "temperature": 0.5, "top_k": 0, "top_p": 1, "min_p": 0,
                         "typical_p": 1, "n": 2, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5,
                         "seed": 2 ** 63 - 1, "logit_bias": {"5": -100},
                         "allowed_ids": [5, 6, 7], "max_tokens": 3, "min_tokens": 1, "stop": ["never"], "stop_ids": [9], "ignore_eos": True,
                         "logprobs": True, "top_logprobs": 2, "prompt_logprobs": True, "echo": False, "bypass_cache": True, "ttft_ms": 60000.5,
                         "tpot_ms": 0, "deadline_ms": 60000, "priority": -10, "tenant": "t", "cache_salt": "s", "workflow_id": "w",
                         "workflow_deadline_ms": 60000, "workflow_steps_left": 1},
                        {"prompt": "a\u0000b", "add_special_tokens": False, "max_tokens": 2, "stop": "x", "greedy": True, "id": {"any": 1}},
                        {"messages": MESSAGES, "tools": [], "variables": {}, "add_generation_prompt": False, "max_tokens": 2, "greedy": False,
                         "temperature": 1}):
            out = lines(c, json.dumps({"id": 1, **members}))
            assert out.returncode == 0 and "error" not in json.loads(out.stdout), out


@test
def test_every_printed_seed_gives_the_answer_again_everywhere():
    ask = {"prompt_ids": [1, 2, 3], "max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
    with Cluster() as c:
        client = Client(c.router.address)

        def line(**kw):
            return json.loads(lines(c, json.dumps({"id": 1, **ask, **kw})).stdout)
        first = [line() for _ in range(8)]
        for seed in (2 ** 53, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1):
            _, ids, end = client.all(request(ids=[1, 2, 3], max_tokens=24, greedy=False, sampling__temperature=1.5, sampling__seed=seed,
                                          stopping__ignore_eos=True))
            assert end.seed == seed
            again = line(seed=seed if seed < 2 ** 63 else str(seed))
            assert again.get("token_ids") == ids and int(again["seed"]) == seed, (seed, again)
            first.append(again)
        for a in first:
            seed = int(a["seed"])
            assert 0 <= seed < 2 ** 64, seed
            assert line(seed=a["seed"])["token_ids"] == a["token_ids"], a["seed"]
            _, ids, _ = client.all(request(ids=[1, 2, 3], max_tokens=24, greedy=False, sampling__temperature=1.5, sampling__seed=seed,
                                           stopping__ignore_eos=True))
            assert ids == a["token_ids"], seed
            out = json.loads(lines(c, json.dumps({"id": 1, **ask}), "--seed", str(seed)).stdout)
            assert out["token_ids"] == a["token_ids"], seed
        assert all(0 <= a["seed"] < 2 ** 53 for a in first[:8]), "a drawn seed is exact in every reader of JSON"
        out = subprocess.run([TANDEM, "generate", "--router", c.router.address, "--max-tokens", "8", "Hello"], capture_output=True, text=True)
        seed = re.search(r"; seed (\d+)", out.stderr).group(1)
        again = subprocess.run([TANDEM, "generate", "--router", c.router.address, "--max-tokens", "8", "--seed", seed, "Hello"],
                               capture_output=True, text=True)
        assert again.returncode == 0 and again.stdout == out.stdout, (out, again)


@test
def test_a_trace_of_ours_has_no_other_members():
    for line, word in (({"prioritty": 3}, "prioritty"), ({"max_tokens": 3}, "max_tokens")):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
            f.write('{"tandem_trace": 1}\n' + json.dumps({"timestamp": 0, "input_length": 4, "output_length": 2, **line}) + "\n")
            f.flush()
            out = subprocess.run([TANDEM, "trace", "stat", f.name], capture_output=True, text=True)
            assert out.returncode == 1 and f"line 2: {word}" in out.stderr, out


main()
