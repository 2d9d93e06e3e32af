/*
 * Short time slices (0.1 ms instead of some ms) for the calling thread, which Linux from 6.12 on grants to anybody: a thread
 * that moves bytes in bursts then gets a core when its turn comes, though others compute on all of them. Elsewhere nothing
 * happens.
 */
#pragma once

void slices_ask_short(void);
