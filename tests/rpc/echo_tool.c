/* echo_tool server LISTEN | count ADDRESS: one side in a process of its own, which runs until its stdin
 * ends. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "echo.h"

static void wait_for_eof(void)
{
    char byte;
    while (read(0, &byte, 1) == 1)
        ;
}

static int run_server(const char *listen)
{
    struct echo_service *e = echo_open(&(struct echo_config){.listen = listen});
    if (!e)
        return 1;
    rpc_server_set_serving(echo_server(e), true);
    printf("%s\n", echo_address(e));
    fflush(stdout);
    wait_for_eof();
    echo_close(e);
    return 0;
}

static int run_count(const char *address)
{
    struct rpc_client *c = echo_client(address, 0);
    struct record *r = record_open();
    record_count(r, c, 0, 100);
    if (!record_wait_messages(r, 10, 10000))
        return 1;
    printf("streaming\n");
    fflush(stdout);
    wait_for_eof();
    rpc_client_close(c);
    record_close(r);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "server"))
        return run_server(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "count"))
        return run_count(argv[2]);
    fprintf(stderr, "usage: echo_tool server LISTEN | count ADDRESS\n");
    return 2;
}
