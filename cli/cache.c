/*
 * tandem cache: keeps the cached blocks of a prompt for a time, or forgets them.
 *
 * These are the full blocks of the prompt as tandem generate would send it, for one tenant and salt.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "cli/admin.h"
#include "cli/ask.h"

enum { CALL_MS = 10000 };

struct cache_options {
    struct admin_at at;
    const char *tenant, *salt, *request, *api_key;
    bool chat, json, all;
    int64_t ttl_ms, wait_ms;
};

#define AT(member) offsetof(struct cache_options, member)
static const struct option TABLE[] = {
    {"ttl", OPT_MS, AT(ttl_ms), "60m", NULL, 1, 24 * 3.6e6, "pin: how long to keep the blocks, from now on"},
    {"all", OPT_BOOL, AT(all), NULL, NULL, 0, 0, "flush: every block of every tenant, and all pins"},
    {"request", OPT_STRING, AT(request), NULL, "JSON", 0, 0,
     "the request instead of PROMPT: a line of tandem generate --jsonl"},
    {"chat", OPT_BOOL, AT(chat), "true", NULL, 0, 0, "PROMPT is a user's turn, if the model has a chat template"},
    {"tenant", OPT_STRING, AT(tenant), NULL, "NAME", 0, 0, "tenant of the prompt"},
    {"cache-salt", OPT_STRING, AT(salt), NULL, "TEXT", 0, 0, "cache salt of the prompt's requests"},
    ADMIN_OPTIONS(struct cache_options),
    CLI_API_KEY_OPTION(AT(api_key)),
    {"wait-ms", OPT_MS, AT(wait_ms), "30000", NULL, 0, 3.6e6, "how long to wait for the cluster to be ready"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints the answer as one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct cache_session {
    const struct cache_options *o;
    const char *router;
    struct rpc_client *client;
    const char **rest; /* the words after the action */
    int n_rest;
};

/* An answer as a JSON object. Every field of these answers is a uint32. */
static json_t *numbers_of(const ProtobufCMessage *m)
{
    json_t *r = json_object();
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        uint32_t value;
        assert(f->type == PROTOBUF_C_TYPE_UINT32 && f->label != PROTOBUF_C_LABEL_REPEATED);
        memcpy(&value, (const char *)m + f->offset, sizeof(value));
        json_object_set_new(r, f->name, json_integer(value));
    }
    return r;
}

/* Calls the router and prints the answer. Returns the exit code; *r_out is set only with 0. */
static int call_for(const struct cache_session *s, const char *path, const ProtobufCMessage *request,
                    const ProtobufCMessageDescriptor *answer, json_t **r_out)
{
    struct td_error e = {{0}};
    ProtobufCMessage *m = NULL;
    const char *key;
    json_t *value;
    enum rpc_code code = rpc_unary(s->client, path, request, answer, CALL_MS, &m, &e);
    if (code)
        return s->o->all ? admin_fail("cache", &s->o->at, code, e.text)
                         : cli_rpc_fail("cache", s->router, code, e.text);
    *r_out = numbers_of(m);
    protobuf_c_message_free_unpacked(m, NULL);
    if (s->o->json)
        cli_print_json(json_incref(*r_out));
    json_object_foreach(*r_out, key, value)
    {
        if (!s->o->json)
            printf("%-16s %lld\n", key, (long long)json_integer_value(value));
    }
    return 0;
}

static int call(const struct cache_session *s, const char *path, const ProtobufCMessage *request,
                const ProtobufCMessageDescriptor *answer)
{
    json_t *r = NULL;
    int exit_code = call_for(s, path, request, answer, &r);
    json_decref(r);
    return exit_code;
}

static int pin(const struct cache_session *s, Tandem__V1__GenerateRequest *prefix)
{
    Tandem__V1__PinRequest m = TANDEM__V1__PIN_REQUEST__INIT;
    m.prefix = prefix;
    m.ttl_ms = (uint32_t)s->o->ttl_ms;
    json_t *r = NULL;
    int exit_code = call_for(s, "/tandem.v1.Tandem/Pin", &m.base, &tandem__v1__pin_response__descriptor, &r);
    if (!exit_code && !json_integer_value(json_object_get(r, "prefix_tokens")))
        exit_code =
            cli_fail("cache", "nothing is pinned: the prompt has no full block; tandem tokenize shows its tokens");
    else if (!exit_code && !json_integer_value(json_object_get(r, "told")))
        exit_code = cli_fail("cache", "nothing is pinned yet: no worker or store is there; see tandem status");
    json_decref(r);
    return exit_code;
}

static int release_pin(const struct cache_session *s, Tandem__V1__GenerateRequest *prefix)
{
    Tandem__V1__PinRequest m = TANDEM__V1__PIN_REQUEST__INIT;
    m.prefix = prefix;
    return call(s, "/tandem.v1.Tandem/Pin", &m.base, &tandem__v1__pin_response__descriptor);
}

static int flush(const struct cache_session *s, Tandem__V1__GenerateRequest *prefix)
{
    Tandem__V1__FlushRequest m = TANDEM__V1__FLUSH_REQUEST__INIT;
    m.prefix = prefix;
    return call(s, "/tandem.v1.Tandem/Flush", &m.base, &tandem__v1__flush_response__descriptor);
}

/* Asks as an operator. */
static int flush_all(const struct cache_session *s)
{
    const Tandem__Admin__V1__FlushRequest m = TANDEM__ADMIN__V1__FLUSH_REQUEST__INIT;
    return call(s, "/tandem.admin.v1.Admin/Flush", &m.base, &tandem__admin__v1__flush_response__descriptor);
}

static const struct {
    const char *name;
    int (*run)(const struct cache_session *s, Tandem__V1__GenerateRequest *prefix);
} ACTIONS[] = {{"pin", pin}, {"release", release_pin}, {"flush", flush}};
enum { N_ACTIONS = sizeof(ACTIONS) / sizeof(ACTIONS[0]) };

/* Index of the action; N_ACTIONS: there is none of that name. */
static int action_of(const char *name)
{
    int i = 0;
    while (i < N_ACTIONS && strcmp(ACTIONS[i].name, name))
        i++;
    return i;
}

/* NULL: the reason was printed. */
static json_t *read_request(const struct cache_session *s)
{
    struct bytes prompt = {0};
    json_t *r = NULL;
    if (s->o->request) {
        r = json_loads(s->o->request, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
        if (!json_is_object(r)) {
            cli_usage("cache", "--request: '%.100s' is not a JSON object", s->o->request);
            json_decref(r);
            return NULL;
        }
    } else if (cli_read_prompt("cache", s->rest, s->n_rest, &prompt)) {
        r = cli_prompt_request("cache", s->client, &prompt, s->o->chat);
    }
    bytes_free(&prompt);
    if (r && s->o->tenant)
        json_object_set_new(r, "tenant", json_string(s->o->tenant));
    if (r && s->o->salt)
        json_object_set_new(r, "cache_salt", json_string(s->o->salt));
    return r;
}

static int run_action(const struct cache_session *s, int action)
{
    struct ask_message *m = NULL;
    struct td_error e = {{0}};
    /* Only a router that is ready knows whether the model takes chats. */
    if (!s->o->request && !cli_wait_ready("cache", s->client, s->router, s->o->wait_ms))
        return 1;
    json_t *r = read_request(s);
    if (!r)
        return 2;
    int exit_code = 1;
    if (ask_message_make(r, &m, &e))
        exit_code = cli_usage("cache", "%s", e.text);
    else if (cli_wait_ready("cache", s->client, s->router, s->o->wait_ms))
        exit_code = ACTIONS[action].run(s, ask_message_get(m));
    ask_message_free(m);
    json_decref(r);
    return exit_code;
}

int cli_cache(int argc, char **argv)
{
    struct cache_options o = {0};
    struct cache_session s = {.o = &o, .rest = mem_array((size_t)argc, sizeof(*s.rest))};
    const char **words = s.rest;
    int exit_code = 2, action = N_ACTIONS;
    bool go =
        cli_options("cache", "pin|release|flush [PROMPT] [options]",
                    "Pins the cached blocks of a prompt (others are evicted first), releases them, or flushes them.",
                    TABLE, argc, argv, &o, words, &s.n_rest, &exit_code);
    if (go && s.n_rest)
        action = action_of(words[0]);
    if (go && action == N_ACTIONS) {
        exit_code = s.n_rest ? cli_usage("cache", "'%s' is none of pin, release, flush", words[0])
                             : cli_usage("cache", "say pin, release or flush");
    } else if (go && o.all && ACTIONS[action].run != flush) {
        exit_code = cli_usage("cache", "--all is only for flush");
    } else if (go && (o.all || o.request) && s.n_rest > 1) {
        exit_code = cli_usage("cache", "'%s': --all and --request take no PROMPT", words[1]);
    } else if (go) {
        s.rest++;
        s.n_rest--;
        s.router = cli_router(o.at.router);
        s.client = o.all ? admin_connect("cache", &o.at) : cli_connect("cache", s.router, o.api_key);
        exit_code = !s.client ? 1 : o.all ? flush_all(&s) : run_action(&s, action);
        rpc_client_close(s.client);
    }
    free(words);
    return exit_code;
}
