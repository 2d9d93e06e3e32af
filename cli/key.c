/*
 * tandem key: makes an API key for a tenant and adds it to a router's file of keys (--api-keys). The file has
 * only its hash, so the key is shown once, on stdout.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cli/cli.h"
#include "router/keys.h"

struct key_options {
    const char *file;
};

#define AT(member) offsetof(struct key_options, member)
static const struct option TABLE[] = {
    {"file", OPT_STRING, AT(file), NULL, "FILE", 0, 0,
     "the file of keys; it is made if it is not there. Limits of a key are members that you add (docs/security.md)"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

int cli_key(int argc, char **argv)
{
    struct key_options o = {0};
    struct td_error e = {{0}};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    char key[KEYS_TEXT_BYTES];
    int exit_code, n_rest;
    bool go = cli_options("key", "TENANT --file FILE", "Makes an API key for a tenant and prints it, once.", TABLE,
                          argc, argv, &o, rest, &n_rest, &exit_code) &&
              cli_words("key", "TENANT", rest, n_rest, 1, 1, &exit_code);
    if (go && !o.file)
        exit_code = cli_usage("key", "--file is missing");
    else if (go && keys_add(o.file, rest[0], key, &e))
        exit_code = cli_fail("key", "%s", e.text);
    else if (go)
        exit_code = printf("%s\n", key) < 0 || fflush(stdout) ? cli_fail("key", "standard output can't be written") : 0;
    free(rest);
    return exit_code;
}
