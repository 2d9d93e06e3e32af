"""Schemas made by a seeded script, and instances of them, as jsonschema judges them: what it says is valid is
accepted, and what it says is invalid is not. Skipped by name where jsonschema can't be had from PyPI."""
import json, os, random, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "gateway"))

N, SEED = int(os.environ.get("SCHEMAS", "1500")), int(os.environ.get("SEED", "1"))
NAMES = ["a", "b", "name", "names", "na", "x-y", "\u00e9", "q\"uote", "", "slash/ed"]


def schema(r, depth=0):
    """A random schema of the keywords that are understood."""
    kind = r.choice(["string", "integer", "number", "boolean", "null", "enum", "const"] + ["object", "array", "any", "all", "types"] * (depth < 3))
    if kind == "string":
        s = {"type": "string"}
        what = r.randrange(5)
        if what == 1:
            s["minLength"] = r.randrange(4)
        if what == 2:
            s["maxLength"] = r.randrange(1, 9)
        if what == 3:
            s["pattern"] = r.choice(["^a", "b$", "^[a-c]{2,4}$", "x|yz", "^\\d+$", "\\.", "^.?$", "^(foo|bar)-\\w*$", "[^a]", "^\u00e9+$"])
        if what == 4:
            s["format"] = r.choice(["date", "uuid", "ipv4", "no-such-format"])
        return s
    if kind in ("integer", "number"):
        s = {"type": kind}
        low = r.choice([None, -1000, -17, -1, 0, 1, 5, 99, 100])
        if low is not None:
            s[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.5:
            s[r.choice(["maximum", "exclusiveMaximum"])] = (low or 0) + r.choice([2, 10, 57, 1234, 100000])
        return s
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": r.sample(["a", "ab", "\u00e9", 1, 2.5, None, True, [1], {"k": "v"}, "x\"y"], r.randrange(1, 5))}
    if kind == "const":
        return {"const": r.choice(["a", 7, None, [], {"a": [True]}])}
    if kind == "any":
        return {"anyOf": [schema(r, depth + 1) for _ in range(r.randrange(1, 4))]}
    if kind == "all":
        names = r.sample(NAMES, 2)
        return {"allOf": [{"type": "object", "properties": {names[0]: schema(r, depth + 1)}, "required": [names[0]]},
                          {"type": "object", "properties": {names[1]: schema(r, depth + 1)}}]}
    if kind == "types":
        return {"type": r.sample(["string", "integer", "boolean", "null", "array"], 2)}
    if kind == "array":
        s = {"type": "array"}
        if r.random() < 0.7:
            s["items"] = schema(r, depth + 1)
        if r.random() < 0.3:
            s["prefixItems"] = [schema(r, depth + 1) for _ in range(r.randrange(1, 3))]
        if r.random() < 0.3:
            s["minItems"] = r.randrange(3)
        if r.random() < 0.3:
            s["maxItems"] = r.randrange(2, 5)
        return s
    names = r.sample(NAMES, r.randrange(0, 5))
    s = {"type": "object", "properties": {n: schema(r, depth + 1) for n in names}}
    if names and r.random() < 0.6:
        s["required"] = r.sample(names, r.randrange(1, len(names) + 1))
    s.update(r.choice([{}, {"additionalProperties": False}, {"additionalProperties": schema(r, depth + 1)}]))
    return s


def value(r, s, depth=0):
    """A value that may be of the schema: mostly, not always."""
    if s is True or not s or r.random() < 0.06 or depth > 8:
        return r.choice([None, True, 0, -3, 2.5, 17, "a", "abc", "foo-1", "", [], [1, "a"], {}, {"a": 1}, {"name": "b", "zz": [None]}])
    if "anyOf" in s:
        return value(r, r.choice(s["anyOf"]), depth + 1)
    if "allOf" in s:
        out = {}
        for part in s["allOf"]:
            got = value(r, part, depth + 1)
            out.update(got if isinstance(got, dict) else {})
        return out
    if "enum" in s:
        return r.choice(s["enum"])
    if "const" in s:
        return s["const"]
    t = s.get("type")
    t = r.choice(t) if isinstance(t, list) else t
    if t == "string":
        if "pattern" in s:
            return r.choice(["a", "ab", "abc", "bb", "xyz", "12", "1.5", "foo-", "bar-x_1", "b", "", "\u00e9\u00e9", "zb"])
        if "format" in s:
            return r.choice(["2024-02-29", "2023-02-29", "1999-12-31", "12345678-1234-1234-1234-123456789abc", "1.2.3.4", "256.1.1.1", "x"])
        return "".join(r.choice("ab\u00e9\U0001f600\"\\ \n") for _ in range(r.randrange(10)))
    if t in ("integer", "number"):
        v = r.choice([s.get("minimum", s.get("exclusiveMinimum", 0)), s.get("maximum", s.get("exclusiveMaximum", 50)), r.randrange(-2000, 2000)])
        v += r.choice([-1, 0, 0, 1, 1, 2])
        return v + 0.5 if t == "number" and r.random() < 0.4 else v
    if t == "boolean":
        return r.random() < 0.5
    if t == "null":
        return None
    if t == "array":
        first = s.get("prefixItems", [])
        return [value(r, first[i] if i < len(first) else s.get("items", True), depth + 1) for i in range(r.randrange(5))]
    if t == "object":
        keys = [k for k in s.get("properties", {}) if r.random() < 0.8] + (["other"] if r.random() < 0.3 else [])
        r.shuffle(keys)
        return {k: value(r, s.get("properties", {}).get(k, s.get("additionalProperties", True)), depth + 1) for k in keys}
    return None


def spelled(r, v):
    """Its text, in one of the ways in which JSON may be written."""
    style = r.choice([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])
    return json.dumps(v, **style)


def main():
    try:
        import jsonschema
    except ImportError:
        from pypi import python_with
        python = python_with("jsonschema")
        if python and python != sys.executable:
            os.execv(python, [python, *sys.argv])
        print("1..0 # SKIP jsonschema can't be had from PyPI")
        return
    checker = jsonschema.FormatChecker(["date", "uuid", "ipv4"])
    r, tool = random.Random(SEED), subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    n_valid = n_invalid = n_unsupported = 0
    wrong = []
    for _ in range(N):
        s = schema(r)
        values = [value(r, s) for _ in range(12)]
        texts = [spelled(r, v) for v in values]
        tool.stdin.write(json.dumps({"schema": s, "instances": texts}) + "\n")
        tool.stdin.flush()
        said = json.loads(tool.stdout.readline())
        if "error" in said:
            n_unsupported += 1
            if os.environ.get("SHOW"):
                print("#", said["error"], json.dumps(s))
            continue
        validator = jsonschema.Draft202012Validator(s, format_checker=checker)
        for v, text, accepted in zip(values, texts, said["accepts"]):
            is_valid = validator.is_valid(v)
            n_valid, n_invalid = n_valid + is_valid, n_invalid + (not is_valid)
            if accepted != is_valid:
                wrong.append(f"{'accepts' if accepted else 'refuses'} {text!r} of {json.dumps(s)}")
    print("1..1")
    print(f"# {N} schemas, {n_unsupported} not supported; {n_valid} valid instances, {n_invalid} invalid ones, {len(wrong)} judged otherwise")
    for w in wrong[:10]:
        print("#", w[:600])
    print(("not " if wrong or n_unsupported > N / 10 else "") + "ok 1 - test_schemas_are_judged_as_jsonschema_does")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
