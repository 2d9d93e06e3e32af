/*
 * Short time slices (0.1 ms instead of some ms) for the calling thread, which any thread may have from Linux
 * 6.12 on. A thread that moves bytes in bursts then gets a core when its turn comes, although other threads
 * compute on all cores. On older systems this does nothing.
 */
#pragma once

void slices_ask_short(void);
