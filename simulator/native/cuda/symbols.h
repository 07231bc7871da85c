/* The exported entry points, by the name cuGetProcAddress is asked for and the CUDA version each came with. */
#ifndef POOLMETER_SIM_SYMBOLS_H
#define POOLMETER_SIM_SYMBOLS_H

struct sim_symbol {
    const char *base;
    int version;
    int per_thread;
    const char *name;
    void *address;
};

extern const struct sim_symbol sim_symbols[];
extern const unsigned sim_symbol_count;

#endif
