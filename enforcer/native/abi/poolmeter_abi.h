/*
 * The pages that the hook, the exporter and the enforcer share: the only source of their layout.
 *
 *   grant   limits of one allocation; written by the enforcer, read-only for the tenant
 *   meter   counters, bucket and memory totals of one allocation; written by the tenant's processes
 *   board   one per device and node: which allocations keep the device busy just now; written by every tenant
 *
 * src/poolmeter/pages/layout.py is generated from this file (python -m poolmeter.pages.generate), so the dialect is
 * narrow:
 * `#define PM_NAME value`, and structs whose members are char[], uint32_t, uint64_t, int64_t or another struct, or
 * arrays of these. A field never moves within a major version: new ones take reserved space and raise the minor
 * version.
 */
#ifndef POOLMETER_ABI_H
#define POOLMETER_ABI_H

#include <stdint.h>

#define PM_ABI_MAJOR 1
#define PM_ABI_MINOR 1

#define PM_GRANT_MAGIC 0x544e415247504d50 /* "PMPGRANT" as little-endian bytes */
#define PM_METER_MAGIC 0x524554454d504d50 /* "PMPMETER" */
#define PM_BOARD_MAGIC 0x4452414f42504d50 /* "PMPBOARD" */

#define PM_UNLIMITED 0xffffffffffffffff /* never 0: a page of zeros must not mean "no limit" */
#define PM_MAX_DEVICES 64
#define PM_MAX_SLOTS 256
#define PM_BOARD_SEATS 500
#define PM_LEFT 32
#define PM_ID_BYTES 64
#define PM_UUID_BYTES 48
#define PM_MEMORY_UNIT 512 /* bytes; the smallest piece of device memory that is counted */

#define PM_ON_FAULT_RUN 0
#define PM_ON_FAULT_REFUSE 1

/* Kinds of device memory, indices of pm_counters.memory. */
#define PM_MEMORY_DEVICE 0   /* cuMemAlloc, cuMemAllocPitch */
#define PM_MEMORY_POOL 1     /* stream-ordered allocations */
#define PM_MEMORY_MANAGED 2  /* cuMemAllocManaged */
#define PM_MEMORY_VMM 3      /* cuMemCreate */
#define PM_MEMORY_ARRAY 4    /* arrays and mipmapped arrays */
#define PM_MEMORY_MODULE 5   /* code and globals of modules */
#define PM_MEMORY_GRAPH 6    /* graph memory nodes */
#define PM_MEMORY_OVERHEAD 7 /* what a context itself takes */
#define PM_MEMORY_KINDS 8

#define PM_SLOT_FREE 0
#define PM_SLOT_CLAIMED 1 /* taken, counters still zero */
#define PM_SLOT_LIVE 2
#define PM_SLOT_DEAD 3 /* its owner left it, or a survivor found it dead; counters wait to be folded */

#define PM_METER_HOLES 1 /* the file system stores zeros as holes, so that a hole is no sign of tampering */

/* Bytes of the meter file, past its end, that are locked (open file description locks). */
#define PM_LOCK_SLOTS 0x10000000000 /* + slot index: its owner lives */
#define PM_LOCK_FOLD 0x10000010000  /* whoever folds dead slots */

/* ---- grant ------------------------------------------------------------------------------------------------------- */

struct pm_grant_device {
    char uuid[48];         /* "GPU-…" or "MIG-…", NUL-terminated */
    uint64_t limit_ppm;    /* of device time; PM_UNLIMITED: none */
    uint64_t memory_limit; /* bytes over all processes; PM_UNLIMITED: none */
    uint32_t weight;       /* of the work-conserving share */
    uint32_t soft;         /* 1: may use what others leave */
    uint32_t show_memory;  /* 1: cuMemGetInfo and total memory show the share */
    uint32_t mask_nvml;    /* 1: NVML memory info shows the share as well */
    uint32_t device_index; /* of the node, for people; PM readers go by uuid */
    uint32_t flags;
    uint64_t device_memory; /* bytes of the whole card as the enforcer knows it; 0: unknown */
    uint64_t reserved[20];
};

struct pm_grant {
    uint64_t magic;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint32_t header_size; /* where the entries begin */
    uint32_t entry_size;
    uint64_t total_size;
    uint64_t generation; /* odd while a writer is at work; grows by 2 with each change */
    uint32_t device_count;
    uint32_t device_capacity;
    uint32_t on_fault;
    uint32_t suspended;
    uint32_t soft; /* of the allocation as a whole */
    uint32_t weight;
    uint32_t charge_copies; /* 1: copies are charged as device time */
    uint32_t flags;
    uint64_t created_ns; /* CLOCK_REALTIME */
    uint64_t updated_ns;
    char allocation_id[64];
    char decision_id[64]; /* empty: no decision */
    uint64_t reserved[37];
    struct pm_grant_device devices[64];
};

/* ---- meter ------------------------------------------------------------------------------------------------------- */

/* What one process did on one device, or what all processes that are gone did. Only grows, except memory and
 * pending_ns. */
struct pm_counters {
    uint64_t launches;
    uint64_t graph_launches;
    uint64_t busy_ns;      /* charged device time after true-up: limits, meters and bills */
    uint64_t throttled_ns; /* wall time that threads waited for the limit */
    uint64_t throttle_waits;
    uint64_t timed_samples;   /* launches with an event pair of their own */
    uint64_t burst_samples;   /* spans of whole bursts that trued the charge up */
    uint64_t dropped_samples; /* measured but not trusted */
    uint64_t copies;
    uint64_t copy_h2d_bytes;
    uint64_t copy_d2h_bytes;
    uint64_t copy_d2d_bytes;
    uint64_t copy_p2p_bytes;
    uint64_t denied_limit; /* allocations refused because of the memory limit */
    uint64_t denied_limit_bytes;
    uint64_t denied_card; /* allocations that the card itself had no room for */
    uint64_t denied_card_bytes;
    uint64_t internal_faults;  /* errors of the hook itself; the program went on */
    uint64_t last_activity_ns; /* CLOCK_REALTIME of the newest launch or copy; 0: none */
    uint64_t memory_peak;      /* bytes, largest sum of memory[] */
    uint64_t memory[8];        /* bytes held now, by kind */
    uint64_t pending_ns;       /* part of busy_ns that is an estimate until its events have come back */
    uint64_t copy_busy_ns;
    uint64_t denied_device; /* calls refused because the grant does not list the device */
    uint64_t reserved[33];
};

/* The limiter's state of a device: one cache line, and one more for who waits. */
struct pm_bucket {
    int64_t balance_ns;      /* negative: debt */
    uint64_t last_refill_ns; /* CLOCK_MONOTONIC, or the simulator's clock */
    uint64_t generation;     /* of the grant when the limit below was read */
    uint64_t limit_ppm;
    uint64_t charged_ns; /* total since the page was made */
    uint64_t refilled_ns;
    uint32_t in_burst; /* processes with work under way */
    uint32_t waiters;
    uint64_t burst_until_ns; /* work under way is expected to last until then */
    uint64_t reserved[8];
};

struct pm_meter_device {
    char uuid[48];
    uint32_t flags;
    uint32_t spare;
    uint64_t reserved0;
    struct pm_bucket bucket;
    /* Memory held by all processes, in one word so that one compare-and-swap takes it: bits 0-35 units of
       PM_MEMORY_UNIT, bits 36-43 the slot that changed it last, bits 44-63 that slot's sequence (see docs/decisions,
       slot protocol). */
    uint64_t memory_word;
    uint64_t memory_peak; /* bytes */
    uint64_t reserved1[6];
    struct pm_counters retired[2]; /* folded counters; pm_meter.fold says which copy counts */
    uint64_t reserved2[96];
};

struct pm_slot {
    uint32_t state;
    uint32_t pid;              /* as the process itself sees it */
    uint64_t generation;       /* grows by 1 with each owner */
    uint64_t pid_namespace;    /* inode of /proc/self/ns/pid */
    uint64_t start_time_ticks; /* field 22 of /proc/self/stat */
    uint64_t attached_ns;      /* CLOCK_REALTIME */
    char comm[16];
    uint32_t uid;
    uint32_t spare;
    /* A change of memory_word under way, so that a survivor can tell whether it happened. */
    uint64_t intent; /* 0: none; else bits 0-35 units, 36-41 device, 42-45 kind, 46 give back, 63 valid */
    uint64_t intent_sequence;
    uint64_t intent_value;         /* what memory[kind] of the device is once the change has happened */
    uint64_t confirmed;            /* newest sequence of this slot that others have seen in a memory_word */
    char on_behalf_allocation[64]; /* empty: works for its own allocation */
    char on_behalf_node[64];
    uint64_t on_behalf_bytes_in; /* bytes received from the client */
    uint64_t on_behalf_bytes_out;
    uint64_t reserved[34];
};

/* Who a slot was of that has been folded: a process that began and ended between two readings was never seen in it. */
struct pm_left {
    uint64_t pid_namespace;
    uint64_t start_time_ticks;
    uint32_t pid;
    uint32_t spare;
};

/* header, then device_capacity x pm_meter_device, then slot_count x (pm_slot + device_capacity x pm_counters). */
struct pm_meter {
    uint64_t magic;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint32_t header_size;
    uint32_t device_size;
    uint32_t slot_size; /* of pm_slot with its counters */
    uint32_t slot_header_size;
    uint32_t counters_size;
    uint32_t device_count;
    uint32_t device_capacity;
    uint32_t slot_count;
    uint64_t devices_offset;
    uint64_t slots_offset;
    uint64_t total_size;
    uint64_t created_ns;
    /* bit 0: which retired copy counts; bits 1-16: slot + 1 whose counters that copy already holds, 0: none; bits
     * 17-63: sequence. */
    uint64_t fold;
    uint64_t faults;     /* internal faults that belong to no slot */
    uint32_t slots_used; /* no slot from here on was ever taken */
    uint32_t flags;      /* PM_METER_HOLES */
    char allocation_id[64];
    uint64_t left_count; /* slots folded since 1.1; the one before it is in left[(left_count - 1) % PM_LEFT] */
    struct pm_left left[32];
    uint64_t reserved[394];
};

/* ---- board ------------------------------------------------------------------------------------------------------- */

struct pm_board_seat {
    uint64_t owner;         /* hash of the allocation id; 0: free */
    uint64_t busy_until_ns; /* its work under way is expected to last until then (CLOCK_MONOTONIC) */
    uint32_t weight;
    uint32_t soft;             /* 1: takes what others leave */
    uint64_t active_ns;        /* device wall time for which it had work, others' turns included; only grows */
    uint64_t active_since_ns;  /* work whose time is not in active_ns yet is under way since then; 0: none */
    uint64_t taken_ns;         /* device time it took, the switching to it and back included; only grows */
    uint64_t limit_ppm;        /* of its allocation, hard or soft; 0: none */
    uint64_t starved_until_ns; /* gets less than its limit although it has work without end */
};

struct pm_board {
    uint64_t magic;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint64_t total_size;
    uint32_t seat_count;
    uint32_t spare;
    char uuid[48];
    uint64_t slice_ns; /* turn of a context while several are busy, as somebody learned it; 0: nobody has */
    uint64_t turn_ns;  /* from the end of a turn to the next one, with one neighbour */
    uint64_t changes;  /* calls that take or give back memory of the device: one more as each begins, and as it ends */
    uint64_t reserved[51];
    struct pm_board_seat seats[500];
};

#ifndef __cplusplus
_Static_assert(sizeof(struct pm_grant_device) == 256, "grant entry");
_Static_assert(sizeof(struct pm_grant) == 512 + 64 * 256, "grant page");
_Static_assert(sizeof(struct pm_counters) == 512, "counters");
_Static_assert(sizeof(struct pm_bucket) == 128, "bucket");
_Static_assert(sizeof(struct pm_meter_device) == 2048, "device line");
_Static_assert(sizeof(struct pm_slot) == 512, "slot");
_Static_assert(sizeof(struct pm_left) == 24, "left");
_Static_assert(sizeof(struct pm_meter) == 4096, "meter header");
_Static_assert(sizeof(struct pm_board) == 512 + 64 * 500, "board");
#endif

#endif
