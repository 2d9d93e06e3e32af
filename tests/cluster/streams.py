"""Requests in flight, and everything that a client gets of each."""
import random, threading
from client import Client, grpc, request
from harness import wait_until


def ids(n, seed):
    rnd = random.Random(seed)
    return [rnd.randrange(1500) for _ in range(n)]


class Answer:
    """Everything that a client gets, to be compared with an undisturbed run."""

    def __init__(self, client, r, timeout=90, seen=None):
        self.text, self.ids, self.logprobs, self.end, self.code, self.why = b"", [], [], None, "OK", ""
        try:
            for m in client.generate(r, timeout=timeout):
                self.text += m.text.encode()
                self.ids += [t.id for t in m.tokens]
                self.logprobs += [t.logprob for t in m.tokens]
                self.end = m.end if m.HasField("end") else self.end
                if seen and m.tokens:
                    seen()
        except grpc.RpcError as e:
            self.code, self.why = e.code().name, e.details()

    def stream(self):
        e = self.end
        assert e, (self.code, self.why)
        scores = tuple(e.prompt_logprobs)[1:]  # the first score is NaN
        return self.text, tuple(self.ids), tuple(self.logprobs), e.finish_reason, e.usage.completion_tokens, \
            e.usage.prompt_tokens, scores, tuple(e.prompt_ranks), tuple(e.prompt_top_ids), len(e.prompt_logprobs)


class Flight:
    """Requests in flight, each in a thread."""

    def __init__(self, address, requests):
        self.answers = [None] * len(requests)
        self.tokens = [0] * len(requests)

        def one(i):
            self.answers[i] = Answer(Client(address), requests[i], seen=lambda: self.tokens.__setitem__(i, self.tokens[i] + 1))
        self.threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
        for t in self.threads:
            t.start()

    def all_stream(self):
        wait_until(lambda: all(n > 2 for n in self.tokens), 30, lambda: f"all stream: {self.tokens}")

    def join(self):
        for t in self.threads:
            t.join(100)
        assert all(self.answers), "calls that don't end"
        return self.answers


def story(n, max_tokens=600, **kw):
    return request(ids=ids(30, n), max_tokens=max_tokens, stopping__ignore_eos=True, **kw)
