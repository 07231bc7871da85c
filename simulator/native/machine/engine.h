/* What the files of the engine share; the operations the libraries call are in machine.h. */
#ifndef POOLMETER_SIM_ENGINE_H
#define POOLMETER_SIM_ENGINE_H

#include "machine.h"

static inline struct sim_op *head_op(struct sim_machine *m, uint32_t s) {
    return &m->queue[s][m->stream[s].head % SIM_QUEUE_DEPTH];
}
static inline bool stream_empty(const struct sim_stream *s) {
    return s->head == s->tail;
}
/* Does it need its context's turn on the card? */
static inline bool on_compute(const struct sim_op *op) {
    return op->kind == SIM_OP_KERNEL || op->kind == SIM_OP_FILL;
}

/* engine.c */
void engine_integrate(struct sim_machine *m, uint32_t device, uint64_t t); /* nothing changes on the card before `t` */
void engine_schedule(struct sim_machine *m, uint32_t device, uint64_t t);  /* integrated up to `t` */
void engine_changed(struct sim_machine *m, uint32_t context, uint64_t t);
void engine_note_reached(uint32_t process); /* what waits for this process's records may go on */
void engine_settle_reached(struct sim_machine *m, uint64_t t);

/* stream.c */
void stream_pop(struct sim_machine *m, uint32_t stream); /* the head is finished */
void context_settle(struct sim_machine *m, uint32_t context, uint64_t t);

/* samples.c */
void samples_roll(struct sim_machine *m, uint32_t device, uint64_t to); /* closes the sample periods that end by `to` */

#endif
