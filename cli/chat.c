/* tandem chat: a conversation on the terminal, one line a turn. The whole conversation goes with every request: its prefix
 * is in the workers' caches, which is what tandem is for. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/ask.h"

struct chat_options {
    const char *router, *system;
    int64_t max_tokens, seed;
    double temperature;
};

#define AT(member) offsetof(struct chat_options, member)
static const struct option TABLE[] = {
    {"router", OPT_STRING, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    {"system", OPT_STRING, AT(system), NULL, "TEXT", 0, 0, "a system message"},
    {"max-tokens", OPT_INT, AT(max_tokens), "0", NULL, 0, 1e9, "of each answer; 0: the model's own, or as many as fit"},
    {"temperature", OPT_DOUBLE, AT(temperature), "-1", "X", -1, 100, "0: greedy; -1: the model's own"},
    {"seed", OPT_INT, AT(seed), "-1", "N", -1, 9e15, "-1: drawn for each answer"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct turn {
    pthread_mutex_t lock; /* the rpc thread ends the turn that the main thread waits for */
    pthread_cond_t changed;
    bool done;
};

static void show(struct ask *a, const void *text, size_t len)
{
    (void)a;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
}

static void done(struct ask *a)
{
    struct turn *t = a->user;
    pthread_mutex_lock(&t->lock);
    t->done = true;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void say(json_t *messages, const char *role, const char *text, size_t len)
{
    json_t *m = json_object();
    json_object_set_new(m, "role", json_string(role));
    json_object_set_new(m, "content", cli_json_text(text, len));
    json_array_append_new(messages, m);
}

static bool answer(struct rpc_client *c, const struct chat_options *o, json_t *messages)
{
    struct turn t = {.done = false};
    json_t *r = json_object();
    pthread_mutex_init(&t.lock, NULL);
    pthread_cond_init(&t.changed, NULL);
    json_object_set(r, "messages", messages);
    if (o->max_tokens)
        json_object_set_new(r, "max_tokens", json_integer(o->max_tokens));
    if (o->temperature >= 0)
        json_object_set_new(r, "temperature", json_real(o->temperature));
    if (o->seed >= 0)
        json_object_set_new(r, "seed", json_integer(o->seed));
    struct ask *a = ask_start(c, r, show, done, &t);
    pthread_mutex_lock(&t.lock);
    while (!t.done)
        pthread_cond_wait(&t.changed, &t.lock);
    pthread_mutex_unlock(&t.lock);
    putchar('\n');
    bool ok = a->code == RPC_OK;
    if (ok)
        say(messages, "assistant", a->text.data, a->text.len);
    else
        cli_fail("chat", "%s: %s", rpc_code_name(a->code), a->error);
    ask_free(a);
    return ok;
}

int cli_chat(int argc, char **argv)
{
    struct chat_options o = {0};
    int exit_code;
    if (!cli_options("chat", "[options]", "A conversation; an empty line or Ctrl-D ends it.", TABLE, argc, argv, &o,
                     NULL, NULL, &exit_code))
        return exit_code;
    struct rpc_client *c = cli_connect("chat", cli_router(o.router));
    struct bytes line = {0};
    json_t *messages = json_array();
    bool ok = c != NULL;
    if (o.system)
        say(messages, "system", o.system, strlen(o.system));
    while (ok) {
        if (isatty(0))
            fputs("> ", stdout), fflush(stdout);
        if (!cli_read_line(&line) || !line.len)
            break;
        say(messages, "user", line.data, line.len);
        ok = answer(c, &o, messages);
    }
    json_decref(messages);
    bytes_free(&line);
    rpc_client_close(c);
    return ok ? 0 : 1;
}
