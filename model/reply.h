/*
 * What a model's answer is made of: text, reasoning, and calls of functions, each in the convention that the
 * model was trained with. The convention is recognised by what its chat template contains.
 *
 *     Hermes, Qwen        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
 *     Qwen coder          <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
 *     GLM                 <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
 *     Granite             <|tool_call|>[{"name": "f", "arguments": {...}}]
 *     Llama 3             <|python_tag|>{"name": "f", "parameters": {...}}   (the mark may be missing)
 *     Llama 3.2, 4        [f(a=1), g(b='x')]                                  (alone)
 *     Mistral             [TOOL_CALLS][{"name": "f", "arguments": {...}}], or [TOOL_CALLS]f[ARGS]{...}
 *     DeepSeek            <|tool_call_begin|>f<|tool_sep|>{...}<|tool_call_end|>     (in its own characters)
 *     gpt-oss             <|channel|>commentary to=functions.f<|message|>{...}<|call|>
 *
 * Reasoning is between <think> and </think>, [THINK] and [/THINK], or in gpt-oss's channel "analysis".
 *
 * What does not follow the convention, or calls a function that was not offered, is text, never an error: a
 * call is told when it is whole. Where a grammar makes sure that it will be (is_strict), its arguments are
 * told as they come.
 *
 * Threads: a convention is immutable; a reply belongs to one thread at a time.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"

struct convention; /* static */
/* By the text of a template. NULL: it has no way of calling functions. */
const struct convention *convention_of(const char *source, size_t len);
const char *convention_name(const struct convention *c); /* "hermes"; NULL gives "none" */
/* Whether a special token of this text has a meaning: in calls, in what tells reasoning apart. The text
 * of other special tokens is not for reply_feed(). c may be NULL. */
bool convention_is_mark_of_calls(const struct convention *c, const char *text, size_t len);
bool convention_is_mark_of_reasoning(const struct convention *c, const char *text, size_t len);
/* Whether a template, or a prompt that it has made, is within its reasoning: it ends with the mark. */
bool convention_reasons(const struct convention *c, const char *source, size_t len);
bool convention_ends_in_reasoning(const struct convention *c, const char *prompt, size_t len);

/*
 * Calls that must be made, for GRAMMAR_STRUCTURE (grammar/structure.c). only: the function that must be
 * called; NULL: any. Reasoning may come before. The caller owns it. NULL: this convention can't be
 * enforced.
 */
json_t *convention_structure(const struct convention *c, json_t *tools, const char *only, bool is_parallel,
                             bool has_reasoning, bool begins_reasoning);

struct reply_params {
    const struct convention *convention; /* NULL: there are no calls */
    json_t *tools;                       /* borrowed: the list of the request; NULL: no calls are looked for */
    bool has_reasoning;                  /* reasoning is told apart, else it is text */
    bool begins_reasoning;               /* the prompt ended within it */
    bool is_strict;
};

/* A function of the list; borrowed. NULL: it was not offered. */
json_t *reply_tool(json_t *tools, const char *name, size_t len);

struct reply_call {
    uint32_t index;
    struct bytes name;      /* in the first delta of a call; else empty */
    struct bytes arguments; /* JSON, or the next part of it */
};

/* What was told and not cleared. */
struct reply_delta {
    struct bytes text, reasoning;
    struct reply_call *calls;
    size_t n_calls;
};

struct reply;
struct reply *reply_open(const struct reply_params *p);
void reply_close(struct reply *r); /* NULL is fine */
/* Takes text that has come. What is certain is added to the delta. */
void reply_feed(struct reply *r, const char *text, size_t len);
void reply_end(struct reply *r); /* there is no more: what was held back becomes text */
const struct reply_delta *reply_delta(const struct reply *r);
void reply_clear(struct reply *r);           /* empties the delta, as after sending it */
uint32_t reply_calls(const struct reply *r); /* that were told so far */
