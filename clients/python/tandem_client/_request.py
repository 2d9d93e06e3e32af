"""What a request says, what came of it, and how it goes on elsewhere. Nothing here waits or connects."""
import json, random, time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

import grpc

from . import tandem_pb2 as pb


class TandemError(Exception):
    """A call that failed. code: name of a gRPC status. field: what of the request is wrong, or "".
    retry_after_s: None if coming back would not help."""

    def __init__(self, code: str, message: str, field: str = "", retry_after_s: Optional[float] = None):
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.field, self.retry_after_s = code, message, field, retry_after_s


@dataclass
class Piece:
    """Of a stream: text and ids that are new. The last one of a choice has a finish reason and `end`, the
    message GenerateEnd with usage, times and placement. tokens: messages TokenEvent, with log-probabilities
    if asked for. tool_calls: messages ToolCall, what is new of each."""
    text: str
    ids: List[int]
    choice: int = 0
    finish_reason: Optional[str] = None
    end: Any = None
    tokens: List[Any] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: List[Any] = field(default_factory=list)


@dataclass
class ToolCall:
    """A call of a function: arguments are JSON."""
    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A whole choice."""
    text: str = ""
    ids: List[int] = field(default_factory=list)
    finish_reason: Optional[str] = None
    end: Any = None
    tokens: List[Any] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: List[ToolCall] = field(default_factory=list)

    def add(self, piece: Piece):
        self.text += piece.text
        self.reasoning += piece.reasoning
        for call in piece.tool_calls:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(call.id, call.name))
            self.tool_calls[call.index].arguments += call.arguments
        self.ids += piece.ids
        self.tokens += piece.tokens
        self.finish_reason, self.end = piece.finish_reason or self.finish_reason, piece.end or self.end


def _put(m, name, value):
    """Sets a plain field of the request, its sampling or its stopping. False: there is none of that name, or
    it is not the caller's."""
    for part in (m, m.sampling, m.stopping):
        field = part.DESCRIPTOR.fields_by_name.get(name)
        if field is None or field.message_type or name in ("text", "want_ids"):
            continue
        if hasattr(getattr(part, name), "extend"):
            getattr(part, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(part, name, value)
        return True
    return False


def _set_prompt(m, prompt):
    if isinstance(prompt, str):
        m.text = prompt
    elif prompt and isinstance(prompt[0], int):
        m.tokens.ids.extend(prompt)
    else:
        m.chat.SetInParent()
        for message in prompt:
            if set(message) == {"role", "content"} and isinstance(message["content"], str):
                m.chat.messages.add(role=message["role"], content=message["content"])
            else:
                m.chat.messages.add(json=json.dumps(message))


def make_request(prompt, **options) -> "pb.GenerateRequest":
    """prompt: a text, a list of token ids, or a list of messages ({"role", "content"}, or what else the
    template reads)."""
    m = pb.GenerateRequest(want_ids=True)
    _set_prompt(m, prompt)
    for name, value in options.items():
        if value is None or _put(m, name, value):
            continue
        if name == "logit_bias":
            for token, bias in value.items():
                m.sampling.logit_bias.add(id=int(token), bias=bias)
        elif name in ("ttft_ms", "tpot_ms"):
            setattr(m.slo, "exact_" + name, value)
        elif name == "deadline_ms":
            m.slo.deadline_ms = int(value)
        elif name in ("tools", "variables", "must_call", "function", "one_call"):
            if not m.HasField("chat"):
                raise TypeError(f"{name}: only for a list of messages")
            setattr(m.chat, name, json.dumps(value) if name in ("tools", "variables") else value)
        elif name in ("json_schema", "json_object", "regex", "ebnf", "choice"):
            is_text = isinstance(value, (str, bool))
            setattr(m.structured, name, value if is_text else json.dumps(value))
        else:
            raise TypeError(f"there is no option {name!r}")
    if m.sampling.WhichOneof("has_seed") is None:
        m.sampling.seed = random.getrandbits(53)  # drawn here: another router can go on with the same tokens
    return m


class Progress:
    """What came of a request, for each choice."""

    def __init__(self, request):
        self.request, self.n = request, max(1, request.sampling.n)
        self.ids: Dict[int, List[int]] = {i: [] for i in range(self.n)}
        self.n_bytes = {i: 0 for i in range(self.n)}
        self.open = set(range(self.n))
        self.has_begun = False
        self.began = None  # when it was asked for first

    def take(self, m) -> Piece:
        self.has_begun = True
        piece = Piece(m.text, [t.id for t in m.tokens], m.choice, tokens=list(m.tokens), reasoning=m.reasoning,
                      tool_calls=list(m.tool_calls))
        self.ids[m.choice] += piece.ids
        told = [m.text, m.reasoning, *(c.name + c.arguments for c in m.tool_calls)]
        self.n_bytes[m.choice] += sum(len(text.encode()) for text in told)
        if m.HasField("end"):
            piece.finish_reason, piece.end = m.end.finish_reason, m.end
            self.open.discard(m.choice)
        return piece

    def requests(self):
        """What is to be asked for now: the request, or what is left of each choice and of deadline_ms."""
        m, now = pb.GenerateRequest(), time.monotonic()
        m.CopyFrom(self.request)
        self.began = self.began or now
        if m.slo.deadline_ms:
            m.slo.deadline_ms = max(1, m.slo.deadline_ms - int(1000 * (now - self.began)))
        if not self.has_begun:
            return [m]
        left, whole = [], m
        for choice in sorted(self.open):
            m = pb.GenerateRequest()
            m.CopyFrom(whole)
            m.sampling.n = 0
            m.resume.ids.extend(self.ids[choice])
            m.resume.text_bytes, m.resume.choice = self.n_bytes[choice], choice
            left.append(m)
        return left


def error_of(e: "grpc.RpcError") -> TandemError:
    trailing = dict(e.trailing_metadata() or ())
    field_name, retry = "", trailing.get("retry-after-ms")
    text = e.details() or ""
    head = text.split(":", 1)[0]
    names_field = e.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    if names_field and head != text and " " not in head:
        field_name = head
    return TandemError(e.code().name, text, field_name, int(retry) / 1000 if retry else None)


class Patience:
    """Whether to come back after an error, where, and after how long."""

    def __init__(self, n_addresses, retries, at):
        self.n, self.left, self.at, self.n_lost = n_addresses, retries, at, 0

    def after(self, e: TandemError, came_further: bool):
        """Seconds to wait before the next try, at address self.at; None: give up."""
        if came_further:
            self.n_lost = 0
        if e.code == "UNAVAILABLE" and self.n_lost + 1 < max(2, self.n) and self.left:
            self.n_lost += 1
            self.at = (self.at + 1) % self.n
            return 0 if self.n > 1 else 0.2
        if e.retry_after_s is not None and self.left and e.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            self.left -= 1
            self.n_lost = 0
            self.at = (self.at + 1) % self.n
            return e.retry_after_s * random.uniform(1, 1.2)
        return None
