#!/usr/bin/env python3
"""Makes cases.json: templates of our own with the constructs that published ones use, and the output of
jinja2 for them in the environment of transformers. Needs jinja2 (made with 3.1.6); the test itself does not.

    make_cases.py            writes cases.json beside this file
"""
import json, os
import jinja2, jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception

VARIABLES = {
    "s": " Some text, e.g. \u00e9\u4e2d\U0001f600! ", "n": 7, "f": 2.5, "t": True, "no": None, "empty": [], "names": ["b", "a", "C", "a"],
    "d": {"x": 1, "y": [1, 2, {"z": "q\"<&>'"}], "items": "shadowed", "\u00e9": 1.0e22, "small": 0.00001},
    "messages": [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": " Hi <b> "},
                 {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": [2.0, -3]}}}]},
                 {"role": "tool", "content": "3", "name": "add"}, {"role": "assistant", "content": "It is 3."}],
    "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {
        "a": {"type": "number"}, "b": {"type": "array", "items": {"type": "number"}}}, "required": ["a"]}}}],
    "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True,
}

TEMPLATES = [
    # white space
    "a\n  {% if t %}\n  b\n  {% endif %}\nc", "a {%- if t %} b {% endif -%}  c", "a\n{{- ' x ' -}}\n b", "  {%+ if t %}x{% endif +%}\ny", "{# c #}\n x {#- d -#} y",
    "x\n\n{% set a = 1 %}\n\n  {{ a }}\n\n", "\t{% for i in range(3) %}\n\t{{ i }}\n\t{% endfor %}\n", "a\r\nb\r{% if t %}\r\nc{% endif %}\r\n",
    # expressions
    "{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 3 ** 2 }} {{ 2 ** -1 }} {{ 1_000 }} {{ 1.5e3 }}",
    "{{ 'a' ~ 1 ~ none ~ true }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 'ab' * 3 }} {{ (1,) + (2, 3) }} {{ [0] * 3 }}",
    "{{ 1 < 2 <= 2 > 1 }} {{ 1 == 1.0 }} {{ 1 == true }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ not 1 == 2 }} {{ none == no }} {{ missing == 1 }}",
    "{{ 'x' in 'xyz' }} {{ 'x' in d }} {{ 2 not in [1, 2] }} {{ 'a' in names }} {{ 1 in (1,) }}", "{{ t and n or 'x' }} {{ no or 'y' }} {{ 0 and 1 }} {{ not no }}",
    "{{ 'yes' if t else 'no' }} {{ 'x' if no }}|{{ 1 if no else 2 if t else 3 }}", "{{ d.x }} {{ d['x'] }} {{ d.y[2].z }} {{ d.y.0 }} {{ d.nothing }} {{ d['\u00e9'] }} {{ d.small }}",
    "{{ d.items() | length }} {{ d['items'] }}", "{{ s[1:5] }}|{{ s[-3:] }}|{{ s[::-1] }}|{{ s[::2] }}|{{ names[1:] }}{{ names[::-1] }}{{ names[-1] }}{{ names[9:] }}|{{ s[0] }}",
    "{{ [1, 'a', none, true, 2.0, [], {}, (), ('x',)] }} {{ {'a': 1, 2: [none]} }} {{ 'it\\'s \"q\" \\n \\t \\\\ \\x41 \\u00e9' }} {{ ['it\\'s', '\"', 'a\\nb', '\u00e9', '\\u200b'] }}",
    "{{ \"a\" 'b' }}{{ (1, 2)[0] }}{{ {'a': {'b': 3}}.a.b }}{{ {} }}", "{{ -n }} {{ +n }} {{ - f }} {{ -(-3) }} {{ n is odd and f is number }}",
    "{{ 1e16 }} {{ 123456789012345680.0 }} {{ 0.1 + 0.2 }} {{ 1e-5 }} {{ 0.0001 }} {{ 100.0 }} {{ 1/3 }} {{ -0.0 }}",
    # statements
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.revindex0 }} {{ m.role }} {{ loop.previtem.role if not loop.first }} {{ loop.nextitem.role if not loop.last }};{% endfor %}",
    "{% for a in names if a != 'a' %}{{ loop.index }}{{ a }}{% else %}none{% endfor %} {% for a in empty %}x{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for c in 'h\u00e9' %}[{{ c }}]{% endfor %}{% for k in d %}{{ k }} {% endfor %}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ range(2, 10, 3) | list }}{{ range(3, 0, -1) | list }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(n=0, f=false) %}{% for i in [1, 2, 3] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ ns.f }}",
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set c %}in {{ a }} block{% endset %}[{{ c }}]{% set e | upper | trim %} low {% endset %}[{{ e }}]",
    "{% if n > 10 %}a{% elif n > 5 %}b{% else %}c{% endif %}{% if missing is defined and missing %}d{% endif %}",
    "{% macro m(a, b='B', c=none) %}[{{ a }}|{{ b }}|{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, c=2) }}{{ m(b=3, a=4) }}{% set x = m('q') %}{{ x | length }}",
    "{% macro rec(n) %}{{ n }}{% if n > 0 %}{{ rec(n - 1) }}{% endif %}{% endmacro %}{{ rec(5) }}{% macro outer() %}<{{ caller('z') }}>{% endmacro %}{% call(v) outer() %}got {{ v }}{% endcall %}",
    "{% filter upper | replace('A', 'x') %}a b {{ n }}{% endfilter %}{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a }}{% generation %}g{{ n }}{% endgeneration %}",
    "{% for m in messages %}{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role == 'user') }} {% endfor %}",
    # filters
    "{{ s | trim | length }}{{ s | upper }}{{ 'STRA\u00dfE' | lower }}{{ 'stra\u00dfe' | upper }}{{ 'hello wORLD-x (y' | title }}{{ 'hELLO' | capitalize }}{{ 'xxaxx' | trim('x') }}",
    "{{ names | sort | join(',') }} {{ names | sort(reverse=true) | join }} {{ names | sort(case_sensitive=true) | join(' ') }} {{ names | unique | list }} {{ names | first }}{{ names | last }} {{ names | reverse | list }} {{ empty | first }}",
    "{{ messages | map(attribute='role') | join(' ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('content') | map(attribute='role') | list }} {{ names | map('upper') | list }} {{ [1, 2, 3, 4] | select('even') | list }} {{ [1, none, 2] | reject('none') | list }}",
    "{{ d | tojson }} {{ d | tojson(indent=2) }} {{ [] | tojson(indent=4) }} {{ {'b': 1, 'a': '\u00e9\u2028'} | tojson(sort_keys=true) }} {{ s | tojson(ensure_ascii=true) }} {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }} {{ 1.0 | tojson }} {{ none | tojson }}",
    "{{ missing | default('x') }} {{ '' | default('y', true) }} {{ no | d('z') }} {{ '12' | int + 1 }} {{ 'x' | int(5) }} {{ '2.9' | int }} {{ '1.5' | float }} {{ 3.7 | int }} {{ 2.5 | round }} {{ 2.345 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ -3 | abs }}",
    "{{ [3, 1, 2] | sum }} {{ [3, 1, 2] | max }} {{ [3, 1, 2] | min }} {{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }} {{ d | length }} {{ d | list }} {{ d.y | string }} {{ 'a b  c' | wordcount }} {{ {'b': 1, 'A': 2} | dictsort }} {{ d | items | list | length }}",
    "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent('> ', blank=true) }} {{ '<a & \"b\">' | e }} {{ 'abab' | replace('a', 'x', 1) }} {{ 'x' | safe }} {{ [1, 2] | join(', ') }}",
    # tests
    "{{ s is string }}{{ n is number }}{{ n is integer }}{{ f is float }}{{ t is boolean }}{{ t is true }}{{ d is mapping }}{{ names is iterable }}{{ names is sequence }}{{ no is none }}{{ missing is undefined }}{{ n is divisibleby 7 }}{{ n is divisibleby(2) }}{{ 'a' is in names }}{{ n is eq 7 }}{{ n is gt(3) }}{{ n is not none }}{{ 'AB' is upper }}{{ range is callable }}{{ no is sameas none }}",
    # methods
    "{{ s.strip() }}|{{ s.lstrip() }}|{{ s.split() }}|{{ 'a,b,,c'.split(',') }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a b c'.rsplit(' ', 1) }}|{{ 'a b c'.rsplit(none, 1) }}|{{ ' a  b '.split(' ') }}|{{ 'x'.join(['a', 'b']) }}|{{ 'abc'.find('c') }}|{{ 'abcb'.rfind('b') }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'aXbX'.replace('X', '-') }}|{{ 'abab'.count('ab') }}|{{ 'a\\nb\\r\\nc'.splitlines() }}|{{ 'hello world'.title() }}|{{ 'abc'.removeprefix('a') }}|{{ 'a=b=c'.partition('=') }}|{{ '12'.isdigit() }}|{{ 'xx<think>a</think>b'.split('</think>')[-1] }}|{{ '\\n x\\n'.strip('\\n') }}|{{ 'abc'.replace('', '-') }}",
    "{{ d.get('x') }} {{ d.get('q') }} {{ d.get('q', 5) }} {{ d.keys() | list }} {{ d.values() | list | length }} {{ names.index('a') }} {{ names.count('a') }}",
    # errors
    "{{ raise_exception('no ' ~ n) }}", "{{ missing.x }}", "{{ missing() }}", "{{ no.x.y }}", "{{ n + 'x' }}", "{{ 1 / 0 }}", "{% for x in n %}{% endfor %}", "{{ names.append(1) }}", "{{ missing + 1 }}", "{{ missing | tojson }}", "{{ [1, 'a'] | sort }}", "{% set n.x = 1 %}",
    # whole templates
    """{%- set system = 'You help.' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token + '[SYS]' + system + '[/SYS]' }}
{%- if tools %}
    {{- '\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '[' + message.role + ']' + message.content + '[/' + message.role + ']' }}
    {%- elif message.role == 'assistant' %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<results>' }}{% endif %}
        {{- message.content }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '</results>' }}{% endif %}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
""",
    """{% macro kind(p) -%}
{%- if p.type == 'array' -%}
{{ kind(p['items']) }}[]
{%- elif p.type is string -%}
{{ {'number': 'float', 'string': 'str'}[p.type] | default(p.type) }}
{%- else -%}any{%- endif -%}
{%- endmacro %}
{% for tool in tools | selectattr('type', 'eq', 'function') | map(attribute='function') %}
def {{ tool.name }}(
    {%- for name, p in tool.parameters.properties.items() -%}
        {{ name }}: {{ kind(p) }}{{ '' if name in tool.parameters.required else ' = None' }}{{ ', ' if not loop.last }}
    {%- endfor %}):
    \"\"\"{{ tool.description }}\"\"\"
{% endfor %}
""",
]

REFUSED = [("{% include 'x' %}", "line 1, column 4"), ("a\n{{ s | nonsense }}", "line 2, column 8"), ("{{ s is odder }}", "line 1, column 9"),
           ("{{ s.swapfold() | trim }}{{ 'x'.swapfold() }}", "swapfold"), ("{% for x in s %}", "expected"), ("{{ 1 + }}", "column 8"), ("{{ 'abc }}", "no end"), ("{% if t %}", "endif"),
           ("{{ s", "no end"), ("{# x", "no end"), ("{% break %}", "outside of a loop"), ("{{ a ! b }}", "column 6"), ("{% for x in s recursive %}{% endfor %}", "recursive"),
           ("{% endif %}", "endif"), ("{{ 12ab }}", "number"), ("{{ f(*x) }}", "*"), ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "deep"),
           ("{% block x %}{% endblock %}", "block")]

cases = []
for source in TEMPLATES:
    try:
        cases.append({"template": source, "text": env.from_string(source).render(**VARIABLES)})
    except Exception as e:
        cases.append({"template": source, "raises": str(e)})
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases.json"), "w") as f:
    json.dump({"variables": VARIABLES, "cases": cases, "refused": [{"template": a, "names": b} for a, b in REFUSED]}, f, indent=1)
