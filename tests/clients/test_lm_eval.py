"""lm-eval from PyPI, unmodified, against `tandem up`: the scores of the two tasks in lm_eval/ are those that
transformers gives (lm_eval/scores.json, made by this program with --write in a Python that has torch).
Skipped by name where PyPI can't be reached; the golden model, where ../shared is absent."""
import glob, json, os, subprocess, sys, tempfile
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("gateway", "cluster")]
from harness import *
from pypi import python_with
from up import Up

HERE = os.path.dirname(os.path.abspath(__file__))
TASKS = os.path.join(HERE, "lm_eval")
SCORES = os.path.join(TASKS, "scores.json")
GOLDEN = os.path.join(SHARED, "golden", "tinystories")
ACCURACIES = ("acc,none", "acc_norm,none")


def lm_eval(python, tasks, kind, args, *more):
    """Scores by task and metric, and the log-likelihoods of all choices in order."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "any"}
    with tempfile.TemporaryDirectory() as d:
        env["HF_HOME"] = d
        done = subprocess.run([python, "-m", "lm_eval", "--model", kind, "--model_args", ",".join(f"{k}={v}" for k, v in args.items()),
                               "--tasks", ",".join(f"tandem_{t}" for t in tasks), "--include_path", ".", "--output_path", d, "--log_samples",
                               *more], cwd=TASKS, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400 * SLOW)
        assert done.returncode == 0, done.stdout
        with open(glob.glob(d + "/**/results_*.json", recursive=True)[0]) as f:
            results = json.load(f)["results"]
        logs = {}
        for path in glob.glob(d + "/**/samples_tandem_facts_*.jsonl", recursive=True):
            with open(path) as f:
                logs = {s["doc_id"]: [float(r[0][0]) for r in s["resps"]] for s in map(json.loads, f)}
    scores = {t: {k: v for k, v in results[f"tandem_{t}"].items() if k.split(",")[0] in ("acc", "acc_norm", "exact_match")} for t in tasks}
    return scores, [x for i in sorted(logs) for x in logs[i]]


def write(python):
    """What transformers gives."""
    found = {}
    for name, path in (("tandem-demo", DEMO), ("tinystories", GOLDEN)):
        args = dict(pretrained=path, dtype="float32", add_bos_token=name == "tinystories")
        scores, logs = lm_eval(python, ["facts"], "hf", args, "--device", "cpu")
        if name == "tandem-demo":
            scores.update(lm_eval(python, ["sums"], "hf", args, "--device", "cpu", "--apply_chat_template")[0])
        found[name] = {"scores": scores, "loglikelihoods": [round(x, 4) for x in logs]}
    with open(SCORES, "w") as f:
        f.write("{" + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "}\n")


def check(name, got, logs=None):
    with open(SCORES) as f:
        want = json.load(f)[name]
    for task, metrics in got.items():
        for metric, value in metrics.items():
            assert abs(value - want["scores"][task][metric]) < 1e-9, (name, task, metric, value, want["scores"])
    if logs:
        off = max(abs(a - b) for a, b in zip(logs, want["loglikelihoods"], strict=True))
        print(f"# {name}: {got}; {len(logs)} log-likelihoods, at most {off:.4f} off")
        assert off < 0.01, (name, logs, want)


@test
def test_scores_of_the_demo_model_are_those_of_transformers():
    with Up(DEMO) as up:
        completions = dict(model="tandem-demo", base_url=up.url + "/v1/completions")
        check("tandem-demo", *lm_eval(PYTHON, ["facts"], "local-completions", {**completions, "num_concurrent": 8}))
        check("tandem-demo", *lm_eval(PYTHON, ["facts"], "local-completions", completions, "--batch_size", "16"))
        chat = dict(model="tandem-demo", base_url=up.url + "/v1/chat/completions", num_concurrent=8)
        check("tandem-demo", lm_eval(PYTHON, ["sums"], "local-chat-completions", chat, "--apply_chat_template")[0])
        files = dict(completions, tokenizer_backend="huggingface", tokenizer=DEMO)
        check("tandem-demo", lm_eval(PYTHON, ["sums"], "local-completions", files, "--apply_chat_template")[0])


@test
def test_scores_of_a_golden_model_are_those_of_transformers():
    if not os.path.isdir(GOLDEN):
        raise Skip("the golden models are absent")
    with Up(GOLDEN) as up:
        completions = dict(model="tinystories", base_url=up.url + "/v1/completions", num_concurrent=8, tokenizer_backend="huggingface",
                           tokenizer=GOLDEN, add_bos_token=True)
        check("tinystories", *lm_eval(PYTHON, ["facts"], "local-completions", completions))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2])
        sys.exit(0)
    if os.environ.get("TANDEM_LONG") not in ("harness", "all"):
        print("1..0 # SKIP lm-eval: only with --long harness")
        sys.exit(0)
    PYTHON = python_with("lm_eval[api]", "transformers")
    if not PYTHON:
        print("1..0 # SKIP lm-eval can't be had from PyPI")
        sys.exit(0)
    main()
