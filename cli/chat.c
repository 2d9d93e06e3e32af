/* tandem chat: a conversation on the terminal, one line a turn. Every request carries the whole conversation;
 * its prefix is in the workers' caches. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/ask.h"
#include "cli/params.h"

struct chat_options {
    const char *router, *system, *api_key;
    struct cli_params params;
};

#define AT(member) offsetof(struct chat_options, member)
static const struct option TABLE[] = {
    {"router", OPT_ADDRESS, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    CLI_API_KEY_OPTION(AT(api_key)),
    {"system", OPT_STRING, AT(system), NULL, "TEXT", 0, 0, "system message of the conversation"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct chat_turn {
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
    struct chat_turn *t = a->user;
    pthread_mutex_lock(&t->lock);
    t->done = true;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void say(json_t *messages, const char *role, const char *text, size_t len)
{
    json_t *m = json_object();
    json_object_set_new(m, "role", json_string(role));
    json_object_set_new(m, "content", ask_text_json(text, len));
    json_array_append_new(messages, m);
}

static bool answer(struct rpc_client *c, const struct chat_options *o, json_t *messages)
{
    struct chat_turn t = {.done = false};
    json_t *r = json_object();
    pthread_mutex_init(&t.lock, NULL);
    pthread_cond_init(&t.changed, NULL);
    json_object_set(r, "messages", messages);
    cli_params_add(&o->params, r, false);
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
        cli_rpc_fail("chat", cli_router(o->router), a->code, a->error);
    ask_free(a);
    return ok;
}

static int converse(const struct chat_options *o)
{
    struct rpc_client *c = cli_connect("chat", cli_router(o->router), o->api_key);
    struct bytes line = {0};
    json_t *messages = json_array();
    bool ok = c != NULL;
    if (o->system)
        say(messages, "system", o->system, strlen(o->system));
    while (ok) {
        if (isatty(0))
            fputs("> ", stdout), fflush(stdout);
        if (!cli_read_line(&line) || !line.len)
            break;
        say(messages, "user", line.data, line.len);
        ok = answer(c, o, messages);
    }
    json_decref(messages);
    bytes_free(&line);
    rpc_client_close(c);
    return ok ? 0 : 1;
}

int cli_chat(int argc, char **argv)
{
    struct chat_options o = {0};
    struct option *table = cli_params_table(TABLE, AT(params));
    int exit_code;
    if (cli_options("chat", "[options]", "A conversation; an empty line or Ctrl-D ends it.", table, argc, argv, &o,
                    NULL, NULL, &exit_code)) {
        exit_code = cli_params_read("chat", &o.params) ? converse(&o) : 2;
        cli_params_free(&o.params);
    }
    free(table);
    return exit_code;
}
