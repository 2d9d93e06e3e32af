#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/cli.h"

enum { MODEL_MS = 5000, TELL_AFTER_MS = 1000 }; /* MODEL_MS: how long an answer about the model may take */

static const char *environment(const char *name)
{
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

const char *cli_router(const char *option)
{
    const char *given = option ? option : environment("TANDEM_ROUTER");
    return given ? given : CLI_DEFAULT_ROUTER;
}

/* options_parse() has checked the flag; the environment variable is checked here. */
static bool check_environment(struct td_error *e)
{
    return !options_check_ports("TANDEM_ROUTER", cli_router(NULL), e);
}

bool cli_options_words(const char *command, const struct options *options, int argc, char **argv, void *values,
                       const char **rest_out, int *n_rest_out, int *exit_out)
{
    char program[64], prefix[64];
    static char *strings; /* texts of a config file; the values borrow them until the process ends */
    struct td_error e = {{0}};
    enum options_action action;
    snprintf(program, sizeof(program), "tandem %s", command);
    snprintf(prefix, sizeof(prefix), "TANDEM_%s", command);
    for (char *c = prefix; *c; c++)
        *c = (char)toupper((unsigned char)*c);
    struct options o = *options;
    o.program = program;
    o.env_prefix = prefix;
    o.man_section = 1;
    enum td_status s = options_parse(&o, argc, argv, values, rest_out, n_rest_out, &strings, &action, &e);
    if (!s && action == OPTIONS_RUN && !check_environment(&e))
        s = TD_ERR_INVALID;
    *exit_out = s == TD_ERR_INVALID ? 2 : s ? 1 : 0;
    if (s)
        fprintf(stderr, "%s: %s\n", program, e.text);
    return !s && action == OPTIONS_RUN;
}

bool cli_options(const char *command, const char *usage, const char *about, const struct option *table, int argc,
                 char **argv, void *values, const char **rest_out, int *n_rest_out, int *exit_out)
{
    const struct options o = {.usage = usage, .about = about, .table = table};
    return cli_options_words(command, &o, argc, argv, values, rest_out, n_rest_out, exit_out);
}

__attribute__((format(printf, 2, 0))) static void say(const char *command, const char *format, va_list args)
{
    fflush(stdout);
    fprintf(stderr, "tandem %s: ", command);
    vfprintf(stderr, format, args);
}

int cli_fail(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(command, format, args);
    va_end(args);
    fputc('\n', stderr);
    return 1;
}

int cli_usage(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(command, format, args);
    va_end(args);
    fprintf(stderr, "; see tandem %s --help\n", command);
    return 2;
}

bool cli_words(const char *command, const char *what, const char **words, int n, int least, int most, int *exit_out)
{
    if (n > most)
        *exit_out = cli_usage(command, "'%s': one word too many", words[most]);
    else if (n < least)
        *exit_out = cli_usage(command, "%s is missing", what);
    return n >= least && n <= most;
}

struct rpc_tls_files cli_tls(void)
{
    return (struct rpc_tls_files){.ca = environment("TANDEM_TLS_CA"),
                                  .cert = environment("TANDEM_TLS_CERT"),
                                  .key = environment("TANDEM_TLS_KEY"),
                                  .name = environment("TANDEM_TLS_NAME")};
}

struct rpc_client *cli_connect(const char *command, const char *target, const char *api_key)
{
    const struct rpc_tls_files tls = cli_tls();
    struct rpc_client *c = NULL;
    struct td_error e = {{0}};
    const struct rpc_client_config config = {.target = target,
                                             .tls = &tls,
                                             .bearer = api_key ? api_key : environment("TANDEM_API_KEY"),
                                             .max_message_bytes = 64 << 20,
                                             .max_queued_bytes = 64 << 20};
    if (rpc_client_open(&config, &c, &e))
        cli_fail(command, "%s", e.text);
    return c;
}

int cli_rpc_fail(const char *command, const char *router, enum rpc_code code, const char *text)
{
    const char *hint = "";
    if (code == RPC_UNAVAILABLE)
        hint =
            "; tandem status shows what is up, tandem up starts a cluster, --router and TANDEM_ROUTER say where one is";
    if (code == RPC_UNAVAILABLE && !environment("TANDEM_TLS_CA") && strstr(text, "reset by peer"))
        hint = "; if it speaks TLS, TANDEM_TLS_CA has to name the file of its CA";
    return cli_fail(command, "%s: %s: %s%s", router, rpc_code_name(code), text, hint);
}

enum rpc_code cli_ask_model(struct rpc_client *client, uint32_t timeout_ms, struct cli_model *out, struct td_error *e)
{
    const Tandem__V1__ListModelsRequest request = TANDEM__V1__LIST_MODELS_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    enum rpc_code code = rpc_unary(client, "/tandem.v1.Tandem/ListModels", &request.base,
                                   &tandem__v1__list_models_response__descriptor, timeout_ms, &m, e);
    if (code)
        return code;
    const Tandem__V1__ListModelsResponse *answer = (const Tandem__V1__ListModelsResponse *)m;
    if (answer->n_models) {
        const Tandem__V1__ModelInfo *info = answer->models[0];
        *out = (struct cli_model){info->vocab_size, info->max_context_tokens, info->chat};
    } else {
        code = RPC_PERMISSION_DENIED;
        td_fail(e, TD_ERR_FORBIDDEN, "the key is not for the model that is served");
    }
    protobuf_c_message_free_unpacked(m, NULL);
    return code;
}

/* How long the next answer may take. Somebody who waits for longer hears about it after TELL_AFTER_MS. */
static uint32_t patience_ms(int64_t waited_ms, int64_t wait_ms)
{
    if (waited_ms < TELL_AFTER_MS)
        return wait_ms > TELL_AFTER_MS ? TELL_AFTER_MS : MODEL_MS;
    int64_t left = wait_ms - waited_ms;
    return left < TELL_AFTER_MS ? TELL_AFTER_MS : left < MODEL_MS ? (uint32_t)left : MODEL_MS;
}

bool cli_wait_ready(const char *command, struct rpc_client *client, const char *router, int64_t wait_ms)
{
    struct clock clock;
    bool is_told = false;
    int64_t waited_ms = 0;
    clock_init_real(&clock);
    uint64_t began = clock_now(&clock);
    for (;;) {
        struct td_error e = {{0}};
        struct cli_model model = {0};
        enum rpc_code code = cli_ask_model(client, patience_ms(waited_ms, wait_ms), &model, &e);
        if (!code && model.context_tokens)
            return true;
        waited_ms = (int64_t)((clock_now(&clock) - began) / NS_PER_MS);
        /* A key does not become right by waiting. */
        if (code == RPC_UNAUTHENTICATED || code == RPC_PERMISSION_DENIED || waited_ms >= wait_ms) {
            if (code)
                cli_rpc_fail(command, router, code, e.text);
            else
                cli_fail(command, "%s: the cluster is not ready: no worker is up; tandem status shows them", router);
            return false;
        }
        if (!is_told && waited_ms >= TELL_AFTER_MS) {
            is_told = true;
            cli_fail(command, "waiting for %s, for %g s at most: %s%s%s", router, (double)wait_ms * 1e-3,
                     code ? rpc_code_name(code) : "no worker is up", code ? ": " : "", e.text);
        }
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
}

bool cli_read_prompt(const char *command, const char **rest, int n_rest, struct bytes *out)
{
    char chunk[4096];
    size_t n;
    for (int i = 0; i < n_rest; i++)
        bytes_printf(out, "%s%s", i ? " " : "", rest[i]);
    if (!n_rest && isatty(0)) {
        cli_usage(command, "give a PROMPT, or pipe one in");
        return false;
    }
    while (!n_rest && (n = fread(chunk, 1, sizeof(chunk), stdin)) > 0)
        bytes_append(out, chunk, n);
    if (!out->len)
        cli_usage(command, "the PROMPT is empty");
    return out->len > 0;
}

/* Whether the router's model takes chats. The router knows this once it has a worker. */
static bool has_chat(struct rpc_client *client)
{
    struct cli_model model;
    struct td_error e;
    return !cli_ask_model(client, MODEL_MS, &model, &e) && model.takes_chats;
}

json_t *cli_prompt_request(const char *command, struct rpc_client *client, const struct bytes *prompt, bool chat)
{
    json_t *text = json_stringn(prompt->data ? prompt->data : "", prompt->len);
    if (!text) {
        cli_fail(command, "the prompt is not UTF-8");
        return NULL;
    }
    if (chat && has_chat(client))
        return json_pack("{s:[{s:s,s:o}]}", "messages", "role", "user", "content", text);
    return json_pack("{s:o}", "prompt", text);
}

bool cli_read_line(struct bytes *line)
{
    static char *buffer; /* getline's buffer; a command reads one input in one thread */
    static size_t cap;
    bytes_clear(line);
    ssize_t n = getline(&buffer, &cap, stdin);
    if (n < 0)
        return false;
    while (n && (buffer[n - 1] == '\n' || buffer[n - 1] == '\r'))
        n--;
    bytes_append(line, buffer, (size_t)n);
    return true;
}

void cli_print_json(json_t *object)
{
    char *text = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(object);
}
