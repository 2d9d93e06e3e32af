#!/usr/bin/env python3
"""Makes small tokenizers of every component that tandem reads, random texts, and the results of the Hugging
Face tokenizers library.

    make_cases.py --out .                                   writes NAME.json beside this file (kept in the
                                                            tree)
    make_cases.py --bulk 300 --cmd 'tandem tokenize --jsonl --tokenizer {dir}'    compares random mixtures of
                                                                                  components

Needs the tokenizers library (made with 0.23.3); the tests themselves do not.
"""
import argparse, base64, json, os, random, struct, subprocess, sys, tempfile
from tokenizers import Tokenizer, models, trainers, pre_tokenizers, normalizers
from tokenizers.decoders import DecodeStream

WORDS = ("the of and Hello WORLD don't we'll I'M it's x1y2 3.14159 1234567 foo_bar <s> </s> <unk> [INST] e\u0301t\u00e9 \u00c5ngstr\u00f6m "
         "na\u00efve \u4e2d\u6587\u5b57 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0938\u094d\u0924\u0947 \u0645\u0631\u062d\u0628\u0627 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 "
         "\u1e9b\u0323 \ufb01n \u2460\u2161\u00bd \u0130stanbul STRASSE \u00df \u03a3\u03b1\u03c2 \u2581 \u2581x \u212b a\u0328\u0301\u0316 \u1100\u1161\u11a8 ... !? -- (a) {b} \"q\" \u201cq\u201d "
         "$5 #tag @me a/b \\n \u17f0 q\u0323\u0307 \u0e01\u0e33 \u00ad \ufeff \u200b x\u00a0y \u3000 \u2028 \u0085 \u180e a\u2019s").split(" ")
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "", "", "\u00a0", "\u3000", "\u2003"]
SPECIAL = ["<s>", "</s>", "<unk>", "<|end|>", "[INST]", "<think>", "mask", "<|a b|>", "\n\n\n", "caf\u00e9", "Day"]


def random_text(r):
    kind = r.random()
    if kind < 0.05:
        return r.choice(["a", " ", "\n", "1", "\u4e2d", "\u0301", "ab", "\u2581", "="]) * r.randrange(0, 60)
    if kind < 0.15:
        ranges = [(1, 0x7f), (0xa0, 0x2ff), (0x300, 0x370), (0x370, 0x600), (0x900, 0x980), (0x1100, 0x1200), (0x2000, 0x2070), (0x3000, 0x3100),
                  (0x4e00, 0x4e40), (0xac00, 0xac40), (0x1f600, 0x1f640), (0xff00, 0xffe0)]
        return "".join(chr(r.randrange(*r.choice(ranges))) for _ in range(r.randrange(1, 30)))
    parts = []
    for _ in range(r.randrange(0, 12)):
        parts.append(r.choice(SPECIAL) if r.random() < 0.15 else r.choice(WORDS))
        parts.append(r.choice(SPACES))
    return "".join(parts)


GPT4 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
O200K = "|".join([r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
                  r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
                  r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])
DEEPSEEK = ["\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(prefix=False, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def seq(name, *steps):
    return {"type": "Sequence", name: list(steps)}


def replace(a, b, kind="String"):
    return {"type": "Replace", "pattern": {kind: a}, "content": b}


def charsmap():
    """A precompiled charsmap: a Darts trie of a few single bytes and their replacements."""
    mapping = {"\t": " ", "\u00a0": " ", "\ufb01": "fi", "\u2460": "1", "\u200b": "", "\u0301": "'"}
    texts, blob = {}, b""
    for k, v in mapping.items():
        texts[k.encode()] = len(blob)
        blob += v.encode() + b"\0"
    units, used = {}, {0}

    def place(node, keys, depth):
        children = sorted({k[depth] for k in keys if len(k) > depth})
        leaf = [k for k in keys if len(k) == depth]
        labels = ([0] if leaf else []) + children
        base = next(b for b in range(1, 1 << 20) if all((node ^ b ^ c) not in used for c in labels))
        for c in labels:
            used.add(node ^ base ^ c)
        units[node] = units.get(node, 0) | base << 10 | ((1 << 8) if leaf else 0)
        if leaf:
            units[node ^ base] = texts[leaf[0]] | 1 << 31
        for c in children:
            units[node ^ base ^ c] = c
            place(node ^ base ^ c, [k for k in keys if len(k) > depth and k[depth] == c], depth + 1)
    place(0, list(texts), 0)
    n = (max(units) | 255) + 1
    trie = b"".join(struct.pack("<I", units.get(i, 0)) for i in range(n))
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + blob).decode()


NORMALIZERS = [None, {"type": "NFC"}, {"type": "NFD"}, {"type": "NFKC"}, {"type": "NFKD"}, {"type": "Lowercase"},
               seq("normalizers", {"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
               {"type": "Strip", "strip_left": True, "strip_right": False}, {"type": "Strip", "strip_left": True, "strip_right": True},
               seq("normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")), replace(" ", "\u2581"),
               replace(r"\s+", " ", "Regex"), replace(r"[0-9](?=[0-9])", "#", "Regex"), replace("x*", "-", "Regex"),
               seq("normalizers", {"type": "NFKC"}, replace(r" {2,}", "\u2581", "Regex")), "charsmap"]
METASPACE = [{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": s, "split": b} for s in ("always", "first", "never")
             for b in (True, False)] + [{"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True, "str_rep": "\u2581"},
                                        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}]
PLAIN = [None, *METASPACE, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True},
         {"type": "Digits", "individual_digits": False}, {"type": "Punctuation", "behavior": "Isolated"},
         {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "Punctuation", "behavior": "MergedWithPrevious"},
         split(" ", "MergedWithPrevious", kind="String"), split(" ", "Removed", kind="String"), split(".", "MergedWithNext", kind="String"),
         split(GPT4), split(GPT4, "Removed", True), split(r"\d", "Contiguous"), split(r"(?=[A-Z])"), split(r"\b"), split(r"^|$"), split(r"\h+|\w*"),
         split(r"[a-c]", "MergedWithNext", True), split(r"\p{Han}+|[[:alpha:]]+"), split(r"[^\w\s]+|\W", "Contiguous"),
         split(r"\P{Han}\p{Punct}|[[:alnum:][:^space:]]"), split(r"\w+|[[:punct:]\p{Currency_Symbol}]", "MergedWithNext"),
         {"type": "BertPreTokenizer"}, {"type": "CharDelimiterSplit", "delimiter": "e"},
         seq("pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Removed"},
             {"type": "Digits", "individual_digits": True}),
         seq("pretokenizers", {"type": "WhitespaceSplit"}, METASPACE[0])]
BYTES = [byte_level(False, True), byte_level(True, True), byte_level(True, False), byte_level(False, False),
         seq("pretokenizers", split(GPT4), byte_level()), seq("pretokenizers", split(O200K), byte_level()),
         seq("pretokenizers", *[split(x) for x in DEEPSEEK], byte_level()), seq("pretokenizers", split(GPT4), byte_level(True)),
         seq("pretokenizers", {"type": "Digits", "individual_digits": True}, byte_level(False, True)),
         seq("pretokenizers", split(r"\s?\p{L}+", "MergedWithPrevious"), {"type": "Punctuation"}, byte_level()),
         seq("pretokenizers", byte_level(), split("\u0120", "MergedWithNext", kind="String"))]
SENTENCEPIECE_DECODERS = [
    seq("decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
    seq("decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
    seq("decoders", {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}),
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True},
    seq("decoders", {"type": "ByteFallback"}, replace("[aeiou]", "*", "Regex"), {"type": "Strip", "content": "t", "start": 1, "stop": 0},
        {"type": "Fuse"}),
    seq("decoders", replace("\u2581", " "), {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}), None]
POST = [None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, "template", "template2", "bert", "roberta",
        "sequence"]


def post_processor(name, ids):
    s, e = ids["<s>"], ids["</s>"]
    special = {"<s>": {"id": "<s>", "ids": [s], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [e, s], "tokens": ["</s>", "<s>"]}}

    def template(*items):
        single = [{"Sequence": {"id": "A", "type_id": 0}} if i == "A" else {"SpecialToken": {"id": i, "type_id": 0}} for i in items]
        return {"type": "TemplateProcessing", "single": single,
                "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": special}
    if not isinstance(name, str):
        return name
    return {"template": template("<s>", "A"), "template2": template("</s>", "<s>", "A", "</s>"),
            "bert": {"type": "BertProcessing", "sep": ["</s>", e], "cls": ["<s>", s]},
            "roberta": {"type": "RobertaProcessing", "sep": ["</s>", e], "cls": ["<s>", s], "trim_offsets": True, "add_prefix_space": False},
            "sequence": seq("processors", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
                            template("<s>", "A"))}[name]


_trained = {}


def corpus(seed):
    r = random.Random(seed)
    return [random_text(r) for _ in range(400)]


def trained(kind, size):
    """The model part of a tokenizer.json, trained on such texts."""
    if (kind, size) in _trained:
        return json.loads(_trained[kind, size])
    if kind == "bytes":
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=256 + size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    elif kind == "unigram":
        t = Tokenizer(models.Unigram())
        t.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    else:
        extra = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"} if kind == "subword" else {}
        t = Tokenizer(models.BPE(unk_token="<unk>", **extra))
        t.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "sentencepiece" else pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"] + ([f"<0x{i:02X}>" for i in range(256)]
                                      if kind == "sentencepiece" else []), limit_alphabet=80, show_progress=False, **extra)
    t.train_from_iterator(corpus(5), trainer)
    model = json.loads(t.to_str())["model"]
    _trained[kind, size] = json.dumps(model)
    return json.loads(_trained[kind, size])


def make(r, kind=None, size=None, **fixed):
    kind = kind or r.choice(["bytes", "bytes", "sentencepiece", "sentencepiece", "unigram", "subword"])
    model = trained(kind, size or r.choice([60, 400]) + (320 if kind == "sentencepiece" else 900 if kind == "unigram" else 0))
    pick = lambda name, choices: fixed[name] if name in fixed else r.choice(choices)
    if kind == "bytes":
        if r.random() < 0.5 and len(model["merges"]) > 8:  # entries that no merge makes
            model["merges"] = [m for i, m in enumerate(model["merges"]) if i % 7]
            have = set(model["vocab"])
            model["merges"] = [m for m in model["merges"] if all(x in have for x in m)]
        model["ignore_merges"] = pick("ignore_merges", [False, True])
    elif kind == "sentencepiece":
        model["byte_fallback"] = pick("byte_fallback", [True, True, False])
        model["fuse_unk"] = pick("fuse_unk", [False, True])
        if not model["byte_fallback"]:
            for i in range(256):
                model["vocab"][f"<{i:03d}>"] = model["vocab"].pop(f"<0x{i:02X}>")
    elif kind == "unigram" and r.random() < 0.5:
        n = len(model["vocab"])
        model["vocab"] += [[f"<0x{i:02X}>", -20.0] for i in range(256)]
        model["byte_fallback"] = True
    have = dict(model["vocab"]) if isinstance(model["vocab"], dict) else {v[0]: i for i, v in reversed(list(enumerate(model["vocab"])))}
    added, next_id = [], max(have.values()) + 1
    for s in SPECIAL[:3] + (r.sample(SPECIAL[3:], r.randrange(0, 6)) if "added" not in fixed else fixed["added"]):
        if s in have:
            i = have[s]
        else:
            i, next_id = next_id, next_id + 1
        have[s] = i
        flag = lambda p: r.random() < p
        added.append({"id": i, "content": s, "single_word": flag(0.2), "lstrip": flag(0.2), "rstrip": flag(0.2), "normalized": flag(0.3),
                      "special": flag(0.6)})
    strip = lambda n: n and "Strip" in json.dumps(n)
    normalizer = pick("normalizer", NORMALIZERS if kind != "bytes" else NORMALIZERS[:5] + [replace(r"\s+", " ", "Regex"), {"type": "ByteLevel"}])
    for a in added:  # the library can't match what it strips to nothing
        a["normalized"] = a["normalized"] and not (strip(normalizer) and not a["content"].strip())
    if normalizer == "charsmap":
        normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap()}
    by_normalizer = normalizer == {"type": "ByteLevel"}
    pre = pick("pre", [split("\u0120", "MergedWithNext", kind="String"), None] if by_normalizer else BYTES if kind == "bytes" else PLAIN)
    decoder = pick("decoder", [byte_level(), byte_level(), byte_level(), None] if kind == "bytes" else SENTENCEPIECE_DECODERS)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": sorted(added, key=lambda a: a["id"]), "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": post_processor(pick("post", POST), have), "decoder": decoder, "model": model}


def cases(spec, r, n):
    t = Tokenizer.from_str(json.dumps(spec))
    encode, decode = [], []
    for _ in range(n):
        text, special = random_text(r), r.random() < 0.5
        try:
            ids = t.encode(text, add_special_tokens=special).ids
        except BaseException as e:  # a panic of the library, or no unk: not compared
            continue
        encode.append({"text": text, "add_special_tokens": special, "ids": ids})
        if r.random() < 0.4:
            ids = [r.randrange(t.get_vocab_size() + 5) for _ in range(r.randrange(0, 12))]
        try:
            decode.append({"ids": ids, "decoded": t.decode(ids, skip_special_tokens=False), "skipped": t.decode(ids, skip_special_tokens=True)})
        except BaseException:
            continue
    return encode, decode


def streams(spec, r, n):
    """Results of DecodeStream for each id of runs of bytes, many of them broken by special tokens or invalid
    UTF-8. Cases are left out if DecodeStream fails (a run of bytes that was partly released and is then
    invalid UTF-8), or if its pieces do not join to the decoded text."""
    t, vocab = Tokenizer.from_str(json.dumps(spec)), spec["model"]["vocab"]
    special = [a["id"] for a in spec["added_tokens"] if a["special"]]
    out = []
    while len(out) < n:
        ids, skip = [], r.random() < 0.5
        for _ in range(r.randrange(1, 10)):
            kind = r.random()
            if kind < 0.6:
                b = r.choice(["\u4e2d", "\u00e9", "\U0001f600", "A"]).encode() if kind < 0.3 else bytes([r.randrange(256)])
                ids += [vocab[f"<0x{x:02X}>"] for x in b[:r.randrange(1, len(b) + 1)]]
            else:
                ids.append(r.choice(special) if kind < 0.8 else r.randrange(t.get_vocab_size()))
        stream = DecodeStream(skip_special_tokens=skip)
        try:
            pieces = [stream.step(t, i) or "" for i in ids]
        except Exception:
            continue
        if t.decode(ids, skip_special_tokens=skip).startswith("".join(pieces)):
            out.append({"ids": ids, "skip_special_tokens": skip, "pieces": pieces})
    return out


def compare(spec, r, n, cmd):
    encode, decode = cases(spec, r, n)
    with tempfile.TemporaryDirectory() as d:
        with open(os.path.join(d, "tokenizer.json"), "w") as f:
            json.dump(spec, f)
        lines = [{"id": f"e{i}", "text": c["text"], "add_special_tokens": c["add_special_tokens"]} for i, c in enumerate(encode)]
        lines += [{"id": f"{'s' if skip else 'd'}{i}", "ids": c["ids"], "skip_special_tokens": skip} for i, c in enumerate(decode)
                  for skip in (False, True)]
        out = subprocess.run([x.replace("{dir}", d) for x in cmd.split()], input="".join(json.dumps(x) + "\n" for x in lines), text=True,
                             capture_output=True, timeout=120)
    answers = {}
    for line in filter(None, out.stdout.split("\n")):
        a = json.loads(line)
        answers[a["id"]] = a
    wrong = []
    for i, c in enumerate(encode):
        got = answers.get(f"e{i}", {"error": out.stderr[-300:]})
        if got.get("ids") != c["ids"]:
            wrong.append(("encode", ascii(c["text"]), c["ids"], got.get("ids", got.get("error"))))
    for i, c in enumerate(decode):
        for key, name in (("d", "decoded"), ("s", "skipped")):
            got = answers.get(f"{key}{i}", {})
            if got.get("text") != c[name]:
                wrong.append((name, c["ids"], ascii(c[name]), ascii(got.get("text"))))
    return len(encode) + 2 * len(decode), wrong


KEPT = {  # name: fixed members; the others are random
    "byte-level-gpt2": dict(kind="bytes", size=120, pre=BYTES[1], normalizer=None, decoder=byte_level(), post="template2", added=["<think>", "mask"]),
    "byte-level-o200k": dict(kind="bytes", size=120, pre=BYTES[5], normalizer={"type": "NFC"}, decoder=byte_level(), post="sequence",
                             ignore_merges=True, added=["<|end|>"]),
    "byte-level-deepseek": dict(kind="bytes", size=120, pre=BYTES[6], normalizer=seq("normalizers"), decoder=byte_level(), post="bert",
                                added=["Day", "caf\u00e9"]),
    "byte-level-normalizer": dict(kind="bytes", size=120, pre=split("\u0120", "MergedWithNext", kind="String"), normalizer={"type": "ByteLevel"},
                                  decoder=byte_level(), post=None, added=["<|a b|>", "caf\u00e9"]),
    "bytes-inside-a-sequence": dict(kind="bytes", size=120, pre=BYTES[10], normalizer={"type": "NFKD"}, decoder=None, post="roberta", added=["mask"]),
    "gemma-like": dict(kind="sentencepiece", size=440, pre=split(" ", "MergedWithPrevious", kind="String"), normalizer=replace(" ", "\u2581"),
                       byte_fallback=True, fuse_unk=True, decoder=SENTENCEPIECE_DECODERS[1], post="template", added=["\n\n\n"]),
    "phi-like": dict(kind="sentencepiece", size=440, pre=None, normalizer=NORMALIZERS[9], byte_fallback=True, decoder=SENTENCEPIECE_DECODERS[0],
                     post="template", added=["<|end|>", "<think>", "mask"]),
    "metaspace-splits": dict(kind="sentencepiece", size=440, pre=METASPACE[0], normalizer=NORMALIZERS[6], byte_fallback=False, fuse_unk=False,
                             decoder=SENTENCEPIECE_DECODERS[2], post=None, added=["Day"]),
    "unigram": dict(kind="unigram", size=900, pre=METASPACE[6], normalizer="charsmap", decoder=SENTENCEPIECE_DECODERS[3], post="template2",
                    added=["mask", "<|end|>"]),
    "subword": dict(kind="subword", size=200, pre=PLAIN[-2], normalizer={"type": "Strip", "strip_left": True, "strip_right": True},
                    decoder=SENTENCEPIECE_DECODERS[7], post=None, added=["[INST]"]),
    "expressions": dict(kind="sentencepiece", size=440, pre=split(r"\h+|\w*", "Contiguous"), normalizer=replace("x*", "-", "Regex"),
                        byte_fallback=True, decoder=SENTENCEPIECE_DECODERS[5], post=None, added=[]),
    "properties": dict(kind="sentencepiece", size=440, pre=seq("pretokenizers", split(r"\p{Han}+"), split(r"[[:alpha:]]+[[:punct:]]?"),
                                                               split(r"\w|\p{Punct}", "MergedWithNext")), normalizer=None, byte_fallback=True,
                       decoder=SENTENCEPIECE_DECODERS[1], post=None, added=[]),
}
STREAMED = ["gemma-like", "phi-like"]  # by bytes if there is no entry
N_TEXTS = {"properties": 80, "unigram": 40}  # 16 for the others


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out")
    a.add_argument("--bulk", type=int, default=0)
    a.add_argument("--texts", type=int, default=60)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--cmd")
    o = a.parse_args()
    if o.out:
        for i, (name, fixed) in enumerate(KEPT.items()):
            r = random.Random(100 + i)
            spec = make(r, **fixed)
            encode, decode = cases(spec, r, N_TEXTS.get(name, 16))
            stream = {"stream": streams(spec, random.Random(100 + i), 60)} if name in STREAMED else {}
            with open(os.path.join(o.out, name + ".json"), "w") as f:
                json.dump({"tokenizer": spec, "encode": encode, "decode": decode, **stream}, f, separators=(",", ":"))
    total = bad = refused = 0
    for i in range(o.bulk):
        r = random.Random(o.seed * 100000 + i)
        spec = make(r)
        try:
            Tokenizer.from_str(json.dumps(spec))
        except BaseException as e:
            refused += 1
            continue
        n, wrong = compare(spec, r, o.texts, o.cmd)
        total += n
        bad += len(wrong)
        if wrong:
            parts = {k: spec[k] for k in ("normalizer", "pre_tokenizer", "decoder")}
            print(f"FAIL seed {o.seed} number {i}: {len(wrong)} of {n}", ascii(json.dumps(parts, ensure_ascii=False))[:600],
                  {k: v for k, v in spec["model"].items() if k not in ("vocab", "merges")})
            for w in wrong[:2]:
                print("   ", *w)
    print(f"{total} compared, {bad} differ, {refused} tokenizers that the library refuses")
    sys.exit(bad > 0)


main()
