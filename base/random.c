#include "base/random.h"

#include <stdlib.h>
#include <sys/random.h>

uint64_t random_u64(void)
{
    uint64_t x = 0;
    while (!x)
        if (getrandom(&x, sizeof(x), 0) != sizeof(x))
            abort();
    return x;
}
