#include "worker/worker.h"

int main(int argc, char **argv)
{
    return worker_main("prefill", argc, argv);
}
