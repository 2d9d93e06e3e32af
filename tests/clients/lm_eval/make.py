"""Makes facts.jsonl and sums.jsonl, the data of the two tasks here, from what the demo model has learnt."""
import json, os, random, sys

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "../../../deploy/demo-model")
sys.path.insert(0, MODEL)
from talk import worked_sum

rng = random.Random(20261128)


def families(path):
    """Of each family of questions: one that the model never saw, and an answer."""
    question = answer = None
    with open(path) as f:
        for line in [*f, ""]:
            if line.startswith("~"):
                question = line[1:].strip()
            elif line.startswith("=") and not answer:
                answer = line[1:].strip()
            elif not line.strip():
                if question and answer:
                    yield question, answer
                question = answer = None


def write(name, rows):
    with open(os.path.join(HERE, name), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)


all_of_them = list(families(os.path.join(MODEL, "facts.txt")))
facts = []
for question, answer in rng.sample(all_of_them, 40):
    choices = [answer, *(a for _, a in rng.sample([f for f in all_of_them if f[1] != answer], 3))]
    rng.shuffle(choices)
    facts.append({"query": question, "choices": choices, "gold": choices.index(answer)})
write("facts.jsonl", facts)
write("sums.jsonl", [{"query": f"What is {a} + {b}?", "answer": worked_sum(a, b)}
                     for a, b in ((rng.randrange(1, 20), rng.randrange(1, 10)) for _ in range(20))])
