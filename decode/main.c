/*
 * tandem-decode: takes over sequences whose prompt another worker has computed, pulls their KV pages
 * (adopt.c), and generates the answers, all running sequences in one batch. Its role says what routers prefer
 * to send to it; like every worker it can run every kind of leg (worker/leg.h).
 *
 *              routers                        prefill workers, stores
 *                 | legs, tokens                       | KV pages
 *            rpc threads                             xfer -- xfer-map, xfer-names
 *                 |                                    |
 *                 +----------> mailbox <---------------+
 *                                 |
 *        beat, register        engine -- compute threads
 *
 * engine (worker_run) owns legs, sequences and pages. beat sends a heartbeat every 250 ms and never computes;
 * register tells the routers of --routers where this worker is.
 */
#include "worker/worker.h"

int main(int argc, char **argv)
{
    return worker_main("decode", argc, argv);
}
