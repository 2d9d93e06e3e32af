/* Fuzz target of the transfer layer's messages: see fuzz.c. */
#include <stdint.h>

#include "transfer/xfer_msg.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct xfer_msg m;
    struct td_error e;
    (void)xfer_msg_decode(data, size, &m, &e);
    return 0;
}
