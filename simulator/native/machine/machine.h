/*
 * One simulated node: the layout of the shared machine file and the operations on it.
 *
 * Everything that more than one process must agree on lives in the file: cards, processes, contexts, streams with their
 * queues, events, sample rings, scripted faults, truth. What only one process sees (virtual addresses, modules, graphs)
 * stays in that process.
 *
 * One robust process-shared mutex guards the file. Every change made under it goes through PUT(), which notes the old
 * value in an undo log first, and machine_commit() empties the log at each consistent point: whoever finds the mutex
 * left by a dead owner rolls the log back and goes on, so a kill -9 at any instruction leaves a consistent machine.
 */
#ifndef POOLMETER_SIM_MACHINE_H
#define POOLMETER_SIM_MACHINE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_MAGIC 0x314d49534d504f50ull /* "POPMSIM1" */
#define SIM_LAYOUT 10u
#define SIM_ENV "POOLMETER_SIM_MACHINE"

enum {
    SIM_MAX_DEVICES = 16,
    SIM_MAX_PROCESSES = 512,
    SIM_MAX_RETIRED = 4096,
    SIM_MAX_CONTEXTS = 1024,
    SIM_MAX_STREAMS = 4096,
    SIM_MAX_EVENTS = 65536,
    SIM_QUEUE_DEPTH = 1024, /* entries per stream; a launch into a full queue waits, as on a card */
    SIM_MAX_WAITERS = 1024,
    SIM_DEVICE_SAMPLES = 72, /* as many as an H200's driver keeps, seen on 580.159 */
    SIM_PROCESS_SAMPLES = 8192,
    SIM_ACCOUNTED = 4000, /* the accounting buffer of a card */
    SIM_MAX_XIDS = 64,
    SIM_MAX_INSTANCES = 8, /* MIG devices of a card */
    SIM_MAX_VGPUS = 16,    /* of a card */
    SIM_MAX_RULES = 64,
    SIM_MAX_CALLS = 1536, /* entry points of both libraries */
    SIM_UNDO = 8192,
    SIM_NAME = 96,
};

#define SIM_NONE UINT32_MAX
#define SIM_NEVER UINT64_MAX

enum sim_clock { SIM_CLOCK_REAL = 0, SIM_CLOCK_VIRTUAL = 1, SIM_CLOCK_MANUAL = 2 };

enum sim_op_kind {
    SIM_OP_KERNEL = 1,
    SIM_OP_FILL,   /* a memset: the driver's own kernel, which fills the card and is not counted as the program's */
    SIM_OP_COPY,   /* on a copy engine */
    SIM_OP_RECORD, /* a CUDA event is reached */
    SIM_OP_WAIT,   /* wait until an event's record has been reached */
    SIM_OP_HOST,   /* a host function; `arg` is the process's own ticket */
};

enum sim_op_flags {
    SIM_OP_GRAPH_END = 1, /* the last operation of a graph launch */
    SIM_OP_BARRIER = 2,   /* legacy default stream: waits for all blocking streams of the context */
};

enum sim_copy { SIM_COPY_H2D = 0, SIM_COPY_D2H, SIM_COPY_D2D, SIM_COPY_SET, SIM_COPY_KINDS };

struct sim_op {
    uint8_t kind;
    uint8_t flags;
    uint8_t copy; /* enum sim_copy */
    uint8_t pad;
    uint32_t width_ppm; /* the part of the card the kernel can fill, 1..1000000 */
    uint64_t work_ns;   /* its length when it has that part to itself */
    uint64_t position;  /* summed work of this stream up to and with this operation */
    uint64_t order;     /* submission order within the context */
    uint64_t arg;       /* event and generation, host ticket, or bytes copied or filled */
    uint32_t kernels;
    uint32_t event; /* of a record or a wait; of a kernel: the part of the card's warps it fills, in ppm */
};

struct sim_stream {
    uint32_t used;
    uint32_t context;
    uint32_t next;     /* next stream of the context */
    uint32_t blocking; /* takes part in legacy default stream ordering */
    uint32_t legacy;   /* is the legacy default stream */
    uint32_t started;  /* the head operation has begun */
    int32_t priority;
    uint32_t generation;
    uint64_t head, tail;   /* operations finished, submitted */
    uint64_t remaining_ns; /* of the head kernel */
    uint64_t copy_end_ns;  /* of the head copy */
    uint64_t position;     /* summed work submitted */
    uint64_t done;         /* summed work finished, without the head's part */
};

struct sim_event {
    uint32_t used;
    uint32_t context;
    uint64_t submitted; /* generation of the newest record submitted */
    uint64_t reached;   /* generation of the newest record reached */
    uint64_t time_ns;   /* when it was reached */
};

/* What the machine knows to be true of a process on a device; see poolmeter_sim.h for the reader's copy. */
struct sim_account {
    uint64_t busy_ns;      /* union of its kernels' run time */
    uint64_t fill_ns;      /* its fills ran and none of its kernels did */
    uint64_t copy_ns;      /* union of its copies' time on the copy engines */
    uint64_t copies;       /* in flight */
    uint64_t copied_to_ns; /* copy_ns is up to here */
    uint64_t kernels;
    uint64_t launches;
    uint64_t graph_launches;
    uint64_t copy_bytes[SIM_COPY_KINDS];
    uint64_t memory; /* explicit device memory now */
    uint64_t memory_peak;
    uint64_t overhead; /* memory of its contexts */
    uint64_t refused;  /* allocations the card had no room for */
    uint64_t period_ns;
    uint64_t contexts;
    uint64_t util_sum; /* for accounting: percent x 100 summed over samples */
    uint64_t util_samples;
    uint64_t fb_sum;
    uint64_t memory_all_peak;
    uint64_t first_context_ns;
    uint64_t instance; /* slot of the MIG device it runs on, plus one; 0: none */
};

enum sim_process_state { SIM_PROCESS_FREE = 0, SIM_PROCESS_LIVE = 1, SIM_PROCESS_DYING = 2 };

struct sim_process {
    uint32_t state;
    uint32_t pid;
    uint64_t start_time; /* clock ticks since boot, field 22 of /proc/PID/stat */
    uint64_t attached_ns;
    uint64_t seen_ns; /* machine time of its last sign of life */
    uint64_t wall_start_us;
    uint32_t life_unreliable; /* the thread that held `life` ended before the process */
    uint32_t participants;
    pthread_mutex_t life; /* robust: held by the attaching thread for good, so its death is cheap to see */
    char name[32];
    struct sim_account account[SIM_MAX_DEVICES];
};

struct sim_retired {
    uint32_t used;
    uint32_t pid;
    uint64_t start_time;
    uint64_t attached_ns;
    uint64_t ended_ns;
    uint64_t killed; /* reaped after a death, not detached by itself */
    char name[32];
    struct sim_account account[SIM_MAX_DEVICES];
};

struct sim_context {
    uint32_t used;
    uint32_t process;
    uint32_t device;
    uint32_t next;     /* next context of the device */
    uint32_t streams;  /* first stream */
    uint32_t legacy;   /* its legacy default stream, or SIM_NONE */
    uint32_t runnable; /* streams whose head can go on when the context has the card */
    uint32_t waiting;  /* streams whose head waits for something */
    uint64_t overhead;
    uint64_t order;
    uint64_t width_ppm;     /* sum over running kernels */
    uint64_t kernels;       /* running, or ready to */
    uint64_t fills;         /* likewise */
    uint64_t occupancy_ppm; /* of the warps the card has room for, summed over running kernels */
};

enum sim_engine { SIM_ENGINE_IDLE = 0, SIM_ENGINE_RUN = 1, SIM_ENGINE_SWITCH = 2 };

struct sim_device_sample {
    uint64_t end_us;
    uint32_t sm_percent;
    uint32_t memory_percent;
    uint32_t power_mw;
    uint32_t busy_ppm;
};

struct sim_process_sample {
    uint64_t end_us;
    uint32_t pid;
    uint32_t sm_percent;
    uint32_t memory_percent;
    uint32_t pad;
};

struct sim_xid {
    uint64_t sequence;
    uint64_t xid;
    uint64_t time_ns;
};

struct sim_accounted {
    uint32_t pid;
    uint32_t running;
    uint32_t gpu_percent;
    uint32_t memory_percent;
    uint64_t max_memory;
    uint64_t time_ms;
    uint64_t start_us;
    uint64_t samples;
    uint64_t util_sum;
    uint64_t fb_sum;
};

/* A MIG device: one compute instance, alone on its GPU instance. */
struct sim_instance {
    uint32_t used;
    uint32_t gpu_instance, compute_instance;
    uint32_t slices, sms;
    uint32_t start, size; /* memory slices */
    uint32_t profile_id;
    uint64_t memory;
    uint64_t ended_busy_ns; /* of processes that have ended */
    char uuid[SIM_NAME];
    char profile[32];
};

/* A vGPU of a host, whose guest is not simulated: it uses what it is said to use. */
struct sim_vgpu {
    uint32_t used;
    uint32_t licensed;
    uint32_t type_id;
    uint32_t busy_percent;
    uint64_t framebuffer, framebuffer_used;
    char uuid[SIM_NAME];
    char vm_id[SIM_NAME];
    char type_name[SIM_NAME];
};

struct sim_device {
    /* configuration */
    char name[SIM_NAME];
    char uuid[SIM_NAME]; /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" */
    char serial[SIM_NAME];
    char bus_id[32];
    uint64_t memory;
    uint64_t reserved;
    uint64_t context_overhead;
    uint64_t slice_ns;
    uint64_t switch_ns;
    uint64_t sample_ns; /* the driver's sample period */
    uint64_t idle_mw, active_mw, limit_mw;
    uint64_t h2d_bps, d2h_bps, d2d_bps;
    uint64_t sm_clock_mhz, memory_clock_mhz, graphics_clock_mhz;
    uint64_t temperature_idle_c, temperature_active_c;
    uint32_t minor, sms, cc_major, cc_minor;
    uint32_t threads_per_sm, bus_width;
    uint32_t persistence, compute_mode, ecc, accounting, numa_node, pci_device_id, pci_subsystem_id;
    uint32_t mig_capable, mig_mode;
    uint32_t virtualization, gpm, energy_counter, remapped_correctable, remapped_uncorrectable;
    uint32_t lost;
    uint64_t ecc_volatile_correctable, ecc_volatile_uncorrectable, ecc_aggregate_correctable,
        ecc_aggregate_uncorrectable;
    uint64_t clocks_event_reasons;
    uint64_t held_power_ns, held_sw_thermal_ns, held_hw_thermal_ns, held_brake_ns; /* clocks held down, by reason */
    uint64_t nvlinks, nvlink_tx_kib, nvlink_rx_kib;                                /* bytes are those a test sets */
    uint64_t mps_server; /* pid of an MPS server, whose clients are all other processes; 0: none */
    uint64_t licensed;   /* of a guest */
    struct sim_instance instance[SIM_MAX_INSTANCES];
    struct sim_vgpu vgpu[SIM_MAX_VGPUS];
    /* engine */
    uint32_t engine;
    uint32_t active;   /* context on the card, or SIM_NONE */
    uint32_t contexts; /* first context of the list */
    uint32_t target;   /* context being switched to */
    uint64_t time_ns;  /* the device is integrated up to here */
    uint64_t slice_start_ns;
    uint64_t switch_end_ns;
    uint64_t next_ns; /* earliest thing that can happen */
    uint64_t period_end_ns;
    uint64_t copies; /* copies in flight */
    /* truth */
    uint64_t busy_ns;
    uint64_t fill_ns;
    uint64_t copy_ns;
    uint64_t switched_ns;
    uint64_t warp_ns; /* busy time weighted by the part of the card's warps in use */
    uint64_t sm_ns;   /* busy time weighted by the part of the card in use */
    uint64_t switches;
    uint64_t energy_pj; /* below one mJ: carried */
    uint64_t energy_mj;
    uint64_t copy_bytes[SIM_COPY_KINDS];
    uint64_t kernels;
    uint64_t period_busy_ns;
    uint64_t period_copy_ns;
    uint64_t memory_used; /* by processes, with context overhead */
    uint64_t samples_head, process_samples_head, xids_head, accounted_head;
    struct sim_device_sample samples[SIM_DEVICE_SAMPLES];
    struct sim_process_sample process_samples[SIM_PROCESS_SAMPLES];
    struct sim_xid xids[SIM_MAX_XIDS];
    struct sim_accounted accounted[SIM_ACCOUNTED];
};

/* A scripted fault or delay. `mask` has a bit for each entry point it is about. */
struct sim_rule {
    uint32_t used;
    int32_t device; /* -1: any */
    uint32_t pid;   /* 0: any */
    int32_t code;   /* returned in place of the call; 0: the call runs */
    uint64_t after; /* calls that pass first */
    uint64_t times; /* then this many are hit; SIM_NEVER: all */
    uint64_t delay_ns;
    uint64_t seen;
    uint64_t hit;
    uint8_t mask[SIM_MAX_CALLS / 8];
};

enum sim_waiter_state { SIM_WAITER_FREE = 0, SIM_WAITER_RUNNING = 1, SIM_WAITER_WAITING = 2, SIM_WAITER_ABSENT = 3 };

/* A thread that takes part in the virtual clock. */
struct sim_waiter {
    uint32_t state;
    uint32_t process;
    uint32_t pid;
    uint32_t granted; /* set by whoever hands this thread the turn */
    uint32_t tid;
    uint32_t asleep; /* times it was found asleep outside the driver while it had the turn */
    uint64_t wake_ns;
    uint64_t order;
};

struct sim_undo {
    uint32_t offset; /* of an aligned 8-byte word, in words */
    uint32_t pad;
    uint64_t old;
};

struct sim_machine {
    uint64_t magic;
    uint32_t layout;
    uint32_t ready;
    uint64_t size;
    pthread_mutex_t mutex;
    uint32_t undo_count;
    uint32_t undo_overflows;
    struct sim_undo undo[SIM_UNDO];

    uint32_t clock;    /* enum sim_clock */
    uint32_t wake_seq; /* futex: changes when waiters must look again */
    uint32_t sleepers;
    uint32_t participants_wanted;
    uint64_t participants_seen;
    uint64_t virtual_ns;
    uint64_t epoch_us;  /* wall clock of machine time 0 */
    uint64_t base_ns;   /* CLOCK_MONOTONIC of machine time 0 (real clock) */
    uint64_t host_ops;  /* host functions due and not yet run: a virtual clock stands meanwhile */
    uint64_t launch_ns; /* virtual clock: host time a launch takes */
    uint64_t advanced_ns;
    uint64_t liveness_ns; /* machine time up to which every process was known to live */
    uint64_t liveness_real_ns;
    uint64_t recoveries;
    uint64_t reaped;
    uint64_t transitions;

    char driver_version[SIM_NAME];
    char nvml_version[SIM_NAME];
    uint32_t cuda_version;
    uint32_t devices;
    uint64_t process_high, context_high, stream_high, event_high, waiter_high; /* one past the highest slot ever used */
    uint64_t retired_head;
    uint64_t order;

    uint64_t rules;
    uint8_t armed[SIM_MAX_CALLS];
    uint64_t calls[SIM_MAX_CALLS];
    uint8_t unimplemented[SIM_MAX_CALLS];
    struct sim_rule rule[SIM_MAX_RULES];

    struct sim_device device[SIM_MAX_DEVICES];
    struct sim_process process[SIM_MAX_PROCESSES];
    struct sim_context context[SIM_MAX_CONTEXTS];
    struct sim_waiter waiter[SIM_MAX_WAITERS];
    struct sim_stream stream[SIM_MAX_STREAMS];
    struct sim_event event[SIM_MAX_EVENTS];
    struct sim_retired retired[SIM_MAX_RETIRED];
    struct sim_op queue[SIM_MAX_STREAMS][SIM_QUEUE_DEPTH];
};

/* --- undo log --------------------------------------------------------------------------------------------------- */

void machine_note_(struct sim_machine *m, const void *word);

/* Change one field of the machine under its mutex. Fields narrower than a word are covered by the word they lie in. */
#define PUT(m, lvalue, value)                                                                                          \
    do {                                                                                                               \
        machine_note_((m), &(lvalue));                                                                                 \
        (lvalue) = (value);                                                                                            \
    } while (0)
#define ADD(m, lvalue, amount) PUT(m, lvalue, (lvalue) + (amount))
#define SUB(m, lvalue, amount) PUT(m, lvalue, (lvalue) - (amount))

/* --- life of a mapping ------------------------------------------------------------------------------------------ */

struct sim_machine *machine_map(const char *path, bool create, char *error, size_t error_size);
void machine_unmap(struct sim_machine *m);
void machine_lock(struct sim_machine *m);
void machine_enter(struct sim_machine *m); /* locks it and brings it up to now */
void machine_unlock(struct sim_machine *m);
void machine_commit(struct sim_machine *m); /* everything changed so far stands */

/* --- time ------------------------------------------------------------------------------------------------------- */

uint64_t machine_now(const struct sim_machine *m);                 /* machine time, ns since it was made */
uint64_t machine_now_us(const struct sim_machine *m, uint64_t ns); /* wall clock of a machine time */
void machine_set_virtual(struct sim_machine *m, uint64_t ns);      /* locked; explicit advance */

/*
 * Waits, unlocked, until machine time `until_ns`, or an earlier change of the machine. Real clock: sleeps. Virtual
 * clock: the calling thread hands the turn on and comes back when it has the earliest wake-up.
 */
void machine_wait(struct sim_machine *m, uint64_t until_ns);
void machine_grant(struct sim_machine *m); /* locked; virtual clock: who is next, now that something has ended */
void machine_wake(struct sim_machine *m);  /* waiters look again */
void machine_join(struct sim_machine *m, uint32_t process); /* the calling thread takes part in the virtual clock */
void machine_leave(struct sim_machine *m);
void machine_return(
    struct sim_machine *m); /* the calling thread calls again: if it was taken for absent, it queues for its turn */
void machine_forget_thread(void); /* after fork: this thread is not the one that joined */

/* --- processes (all locked) ------------------------------------------------------------------------------------- */

uint32_t process_attach(struct sim_machine *m, uint32_t pid);
void process_detach(struct sim_machine *m, uint32_t process, bool killed);
void process_reap(struct sim_machine *m,
                  bool thorough); /* removes what belongs to the dead, at their last sign of life */
uint64_t process_start_time(uint32_t pid, char *state);

/* --- engine (all locked) ---------------------------------------------------------------------------------------- */

void engine_advance(struct sim_machine *m, uint64_t now);
void engine_touch(struct sim_machine *m,
                  uint32_t device); /* integrates it up to the time advanced to, before a read or change */
uint32_t context_create(struct sim_machine *m, uint32_t process, uint32_t device); /* SIM_NONE: no room on the card */
void context_destroy(struct sim_machine *m, uint32_t context);
uint32_t stream_create(struct sim_machine *m, uint32_t context, bool blocking, bool legacy, int priority);
void stream_destroy(struct sim_machine *m, uint32_t stream); /* its queue is dropped */
bool stream_full(const struct sim_machine *m, uint32_t stream, uint64_t entries);
void stream_push(struct sim_machine *m, uint32_t stream, struct sim_op op);
bool stream_done(const struct sim_machine *m, uint32_t stream, uint64_t target); /* `target` operations are finished */
uint64_t stream_bound(const struct sim_machine *m, uint32_t stream, uint64_t target,
                      uint64_t now); /* not before this time */
uint32_t event_create(struct sim_machine *m, uint32_t context);
void event_destroy(struct sim_machine *m, uint32_t event);
void host_op_done(struct sim_machine *m, uint32_t stream);
bool memory_take(struct sim_machine *m, uint32_t process, uint32_t device,
                 uint64_t bytes); /* false: the card is full */
void memory_give(struct sim_machine *m, uint32_t process, uint32_t device, uint64_t bytes);
uint64_t memory_free(const struct sim_machine *m, uint32_t device);
bool device_running(const struct sim_machine *m, uint32_t device);      /* kernels or fills, at this moment */
uint64_t device_power_mw(const struct sim_machine *m, uint32_t device); /* mean over the last second */
void device_xid(struct sim_machine *m, uint32_t device, uint64_t xid);

/* --- scripted calls --------------------------------------------------------------------------------------------- */

/* Counts the call; waits out a scripted delay; returns the scripted code or 0. */
int machine_call(struct sim_machine *m, uint32_t call, int device);

#endif
