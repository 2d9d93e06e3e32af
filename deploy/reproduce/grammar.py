"""Structured output beside llguidance and xgrammar: time to compile a schema, and to make a mask.

    python3 deploy/reproduce/grammar.py build/tests/grammar/grammar_tool [--schemas 1000] [--json]

Schemas, instances and a vocabulary of 128,000 tokens are made by a seeded script. Each library goes over the
same tokens of the same instances, which are valid: a mask before each token, and whether the token is in it;
then once more with the schema as it was compiled ("again"), as for the next request that has it. Times are
those of one thread. llguidance (PyPI) is needed; xgrammar is left out by name where it can't be
imported (it needs torch), and jsonschema chooses the instances that are valid.
"""
import argparse, json, os, random, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "grammar"))
import test_schemas

N_TOKENS = 128000
SYLLABLES = ("an er in on re st le te al ti co de ma ra li ne ro la se to ch ing tion ed ly un pre con Int Str get set "
             "is na me ty pe va lue key id url da te").split()
FOREIGN = ["\u00e9", "\u00fc", "\u65e5", "\u672c", "\u8a9e", "\u043d\u0430", "\u0441\u0442", "\U0001f600", "\ud55c"]
MARKS = ['"', '",', '":', '": "', '"}', '"]', '","', '":"', '": ', '{"', '[{"', "}}", "}],", '"}', '\\"', "\\n",
         "},{", '": [', '": {', '",\n', "  ", "    ", "\n", "\n  ", "[]", "{}", "true", "false", "null", "]", "}",
         ", "]


def make_vocabulary(r):
    """Bytes, numbers, JSON's marks, and words: capital, with spaces, with foreign characters."""
    tokens = [bytes([i]) for i in range(256)]
    seen = set(tokens)

    def add(text):
        b = text.encode()
        if b and b not in seen and len(tokens) < N_TOKENS:
            seen.add(b)
            tokens.append(b)
    for text in [*MARKS, *map(str, range(1000))]:
        add(text)
    while len(tokens) < N_TOKENS:
        w = "".join(r.choice(SYLLABLES) for _ in range(r.randrange(1, 5)))
        add(r.choice([w, w.capitalize(), " " + w, " " + w.capitalize(), w + r.choice(FOREIGN),
                      r.choice(FOREIGN) + r.choice(FOREIGN) + w, r.choice('"_.(/-') + w]))
    return tokens


def tokenize(ids, text):
    """The longest token each time."""
    out, at = [], 0
    while at < len(text):
        n = next(n for n in range(min(24, len(text) - at), 0, -1) if text[at:at + n] in ids)
        out.append(ids[text[at:at + n]])
        at += n
    return out


def make_cases(r, n, ids):
    import jsonschema
    checker = jsonschema.FormatChecker(["date", "uuid", "ipv4"])
    cases = []
    while len(cases) < n:
        s = test_schemas.schema(r)
        if s.get("type") not in ("object", "array") and "allOf" not in s:
            continue
        v = test_schemas.value(r, s)
        if jsonschema.Draft202012Validator(s, format_checker=checker).is_valid(v):
            cases.append((s, tokenize(ids, json.dumps(v, ensure_ascii=False).encode())))
    return cases


class Tandem:
    def __init__(self, tool, tokens):
        with tempfile.NamedTemporaryFile("w", delete=False) as f:
            f.write("".join(t.hex() + "\n" for t in tokens))
        self.tool = subprocess.Popen([tool, f.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.file = f.name

    def run(self, s, ids):
        self.tool.stdin.write(json.dumps({"schema": s, "ids": ids}) + "\n")
        self.tool.stdin.flush()
        said = json.loads(self.tool.stdout.readline())
        if os.path.exists(self.file):
            os.unlink(self.file)
        if "error" in said:
            return None, said["error"]
        return (said["compile_us"], said["masks_us"], said["again_us"], said["is_valid"]), ""


class Llguidance:
    def __init__(self, tokens):
        import llguidance
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
        self.l, self.fill, self.mask = llguidance, fill_next_token_bitmask, allocate_token_bitmask(1, len(tokens) + 1)

        class Wrapped:
            eos_token_id, bos_token_id, special_token_ids = len(tokens), None, [len(tokens)]

            def __call__(self, text):
                return list(text if isinstance(text, bytes) else text.encode())
        Wrapped.tokens = [*tokens, b"<end>"]
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))

    def masks(self, grammar, ids):
        matcher, masks = self.l.LLMatcher(self.tokenizer, grammar), []
        for i in ids:
            t = time.thread_time()
            self.fill(matcher, self.mask)
            masks.append(1e6 * (time.thread_time() - t))
            if not self.mask[0, i // 32] >> i % 32 & 1 or not matcher.consume_token(i):
                return masks, False
        return masks, matcher.is_accepting()

    def run(self, s, ids):
        t = time.thread_time()
        grammar = self.l.LLMatcher.grammar_from_json_schema(json.dumps(s))
        matcher = self.l.LLMatcher(self.tokenizer, grammar)
        if matcher.is_error():
            return None, matcher.get_error()
        compile_us = 1e6 * (time.thread_time() - t)
        (first, is_valid), (again, _) = self.masks(grammar, ids), self.masks(grammar, ids)
        return (compile_us, first, again, is_valid), ""


class Xgrammar:
    def __init__(self, tokens):
        import xgrammar
        self.x = xgrammar
        info = xgrammar.TokenizerInfo([*tokens, b"<end>"], vocab_type=xgrammar.VocabType.RAW,
                                      stop_token_ids=[len(tokens)])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, len(tokens) + 1)

    def masks(self, compiled, ids):
        matcher, masks = self.x.GrammarMatcher(compiled), []
        for i in ids:
            t = time.thread_time()
            matcher.fill_next_token_bitmask(self.mask)
            masks.append(1e6 * (time.thread_time() - t))
            if not matcher.accept_token(i):
                return masks, False
        return masks, matcher.is_completed()

    def run(self, s, ids):
        try:
            t = time.thread_time()
            compiled = self.compiler.compile_json_schema(json.dumps(s), any_whitespace=True, strict_mode=False)
            self.x.GrammarMatcher(compiled)
            compile_us = 1e6 * (time.thread_time() - t)
        except RuntimeError as e:
            return None, str(e)
        (first, is_valid), (again, _) = self.masks(compiled, ids), self.masks(compiled, ids)
        return (compile_us, first, again, is_valid), ""


def part(sorted_values, share):
    return round(sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))], 1)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("tool")
    p.add_argument("--schemas", type=int, default=1000)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--json", action="store_true", help="print rows as JSON")
    o = p.parse_args()
    r = random.Random(o.seed)
    tokens = make_vocabulary(r)
    cases = make_cases(r, o.schemas, {t: i for i, t in enumerate(tokens)})
    rows = []
    for name, make in (("tandem", lambda: Tandem(o.tool, tokens)), ("llguidance", lambda: Llguidance(tokens)),
                       ("xgrammar", lambda: Xgrammar(tokens))):
        try:
            library = make()
        except ImportError as e:
            print(f"{name} is left out: {e}", file=sys.stderr)
            continue
        compiles, masks, again, n_wrong, n_unsupported = [], [], [], 0, 0
        for k, (s, ids) in enumerate(cases):
            if sys.stderr.isatty():
                print(f"\r{name} {k}/{len(cases)}", end="", file=sys.stderr)
            got, why = library.run(s, ids)
            if not got:
                n_unsupported += 1
                continue
            compiles.append(got[0])
            masks += got[1]
            again += got[2]
            n_wrong += not got[3]
        for times in (compiles, masks, again):
            times.sort()
        rows.append({"library": name, "schemas": len(cases), "unsupported": n_unsupported, "refuses_valid": n_wrong,
                     "compile_p50_us": part(compiles, 0.5), "compile_p99_us": part(compiles, 0.99),
                     "masks": len(masks), "mask_mean_us": round(sum(masks) / len(masks), 1),
                     "mask_p50_us": part(masks, 0.5), "mask_p99_us": part(masks, 0.99),
                     "again_mean_us": round(sum(again) / len(again), 1), "again_p50_us": part(again, 0.5),
                     "again_p99_us": part(again, 0.99)})
    if o.json:
        print(json.dumps(rows))
        return
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
