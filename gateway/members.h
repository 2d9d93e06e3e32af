/*
 * Reading the members of a request by a table: each HTTP API has its own names, and the values go into the
 * names and bounds of proto/ask/ask_params.h, which is the only place that knows what a request may ask.
 *
 * A member that is null counts as absent, as OpenAI's clients mean it. A member that no table has is refused
 * by name.
 */
#pragma once

#include "gateway/gateway_internal.h"

struct gw_reading {
    struct gw_task *task;
    json_t *ask; /* the request in the names of ask_params.h, being made */
    const struct gw_member *table;
    json_t *prompts;    /* completions: the list of prompts; borrowed */
    json_int_t best_of; /* completions: 0: not given */
    bool has_no_tools;  /* tool_choice is none */
    bool has_one_call;  /* calls are not parallel */
    json_t *system;     /* a system message outside of the list of messages; owned, or NULL */
};

struct gw_member {
    const char *name;
    const char *ask; /* its name there; NULL: none, so read does all, or it means nothing here */
    /* NULL: the value goes there as it is. */
    enum td_status (*read)(struct gw_reading *r, const struct gw_member *m, json_t *value, struct td_error *e);
};

/* Reads all members of body, and keeps the outermost table in the task. Errors begin with the member's
 * name. */
enum td_status gw_members_read(struct gw_reading *r, json_t *body, struct td_error *error_out);
/* A router's refusal, "chat.tools[0]: ...", with the name that the client gave. Without one: as it is. */
void gw_members_rename(const struct gw_member *table, const char *text, char *out, size_t cap);
/* Checks the value by the parameter m->ask, and puts it there. */
enum td_status gw_member_put(struct gw_reading *r, const struct gw_member *m, json_t *value, struct td_error *e);

/* Reads the members of a member, by a table of their own. Errors begin with the names of both. */
enum td_status gw_member_inner(struct gw_reading *r, const struct gw_member *m, const struct gw_member *table,
                               json_t *v, struct td_error *e);

/* For tables: */
enum td_status gw_member_messages(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_ignored(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_false(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_stream(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_model(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_system(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
/* {"type": "text" | "json_object" | "json_schema", ...}, the schema as "schema", there or within
 * "json_schema". */
enum td_status gw_member_format(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
/* vLLM's: {"json" | "regex" | "choice" | "grammar" | "json_object": ...}. */
enum td_status gw_member_structured(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_parallel(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_tools(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_tool_choice(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
/* Values for the template by the names that templates use; who knows none of them does not look. */
void gw_member_reasons(struct gw_reading *r, bool is_on);
enum td_status gw_member_effort(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_variables(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
enum td_status gw_member_tandem(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e);
/* Puts r->system before the other messages, and frees it. TD_ERR_INVALID: there are none. */
enum td_status gw_system_first(struct gw_reading *r, const char *messages, struct td_error *e);
/* Makes call i, of Generate. The seed is drawn here if the client gives none, so that another router can go
 * on with the same tokens. */
enum td_status gw_ask_generate(struct gw_task *t, uint32_t i, json_t *ask, struct td_error *e);
/* The same from headers "x-tandem-ttft-ms" and so on, and those of llm-d; what the body says counts more. */
enum td_status gw_headers_read(struct gw_reading *r, struct td_error *error_out);
