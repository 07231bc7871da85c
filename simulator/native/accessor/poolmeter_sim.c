/* libpoolmeter_sim.so: what Python needs of a machine file, over plain C types. Fields go by name, so no layout is
 * copied. */
#include <stdio.h>
#include <string.h>

#include "call_names.h"
#include "machine.h"

#define EXPORT __attribute__((visibility("default")))

struct psim_truth {
    uint32_t pid;
    uint32_t device;
    uint32_t live;
    uint32_t killed;
    uint64_t start_time;
    uint64_t attached_ns;
    uint64_t ended_ns;
    uint64_t busy_ns;
    uint64_t fill_ns;
    uint64_t copy_ns;
    uint64_t kernels;
    uint64_t launches;
    uint64_t graph_launches;
    uint64_t copy_bytes[SIM_COPY_KINDS];
    uint64_t memory;
    uint64_t memory_peak;
    uint64_t overhead;
    uint64_t refused;
    char name[32];
};

struct psim_device_truth {
    uint64_t time_ns;
    uint64_t busy_ns;
    uint64_t fill_ns;
    uint64_t copy_ns;
    uint64_t switched_ns;
    uint64_t switches;
    uint64_t energy_mj;
    uint64_t kernels;
    uint64_t copy_bytes[SIM_COPY_KINDS];
    uint64_t memory_used;
};

EXPORT struct sim_machine *psim_create(const char *path, char *error, size_t size);
EXPORT struct sim_machine *psim_open(const char *path, char *error, size_t size);
EXPORT void psim_close(struct sim_machine *m);
EXPORT int psim_set(struct sim_machine *m, int device, const char *key, uint64_t value);
EXPORT int psim_set_text(struct sim_machine *m, int device, const char *key, const char *value);
EXPORT int psim_get(struct sim_machine *m, int device, const char *key, uint64_t *value);
EXPORT int psim_get_text(struct sim_machine *m, int device, const char *key, char *value, size_t size);
EXPORT void psim_ready(struct sim_machine *m);
EXPORT uint64_t psim_now(struct sim_machine *m);
EXPORT uint64_t psim_advance(struct sim_machine *m, uint64_t ns);
EXPORT size_t psim_truth(struct sim_machine *m, struct psim_truth *out, size_t max);
EXPORT int psim_device_truth(struct sim_machine *m, uint32_t device, struct psim_device_truth *out);
EXPORT int psim_script(struct sim_machine *m, const char *call, int device, uint32_t pid, uint64_t after,
                       uint64_t times, int code, uint64_t delay_ns);
EXPORT int psim_unscript(struct sim_machine *m, int rule);
EXPORT int psim_rule(struct sim_machine *m, int rule, uint64_t *seen, uint64_t *hit);
EXPORT int psim_call(struct sim_machine *m, unsigned index, const char **name, uint64_t *count, int *implemented);
EXPORT void psim_xid(struct sim_machine *m, uint32_t device, uint64_t xid);
EXPORT size_t psim_truth_size(void);

size_t psim_truth_size(void) {
    return sizeof(struct psim_truth);
}

static struct sim_machine *fresh(struct sim_machine *m) {
    if (m == NULL)
        return NULL;
    for (uint32_t d = 0; d < SIM_MAX_DEVICES; d++) {
        struct sim_device *dev = &m->device[d];
        dev->active = dev->contexts = dev->target = SIM_NONE;
        dev->next_ns = SIM_NEVER;
    }
    return m;
}

struct sim_machine *psim_create(const char *path, char *error, size_t size) {
    return fresh(machine_map(path, true, error, size));
}
struct sim_machine *psim_open(const char *path, char *error, size_t size) {
    return machine_map(path, false, error, size);
}
void psim_close(struct sim_machine *m) {
    machine_unmap(m);
}
void psim_ready(struct sim_machine *m) {
    /* A driver has sampled its idle cards since it was loaded: the rings are full before the first program comes. */
    for (uint32_t d = 0; d < m->devices; d++) {
        struct sim_device *dev = &m->device[d];
        for (uint64_t i = 0; i < SIM_DEVICE_SAMPLES; i++) {
            uint64_t before_us = (SIM_DEVICE_SAMPLES - 1 - i) * dev->sample_ns / 1000;
            dev->samples[i] =
                (struct sim_device_sample){.end_us = m->epoch_us - before_us, .power_mw = (uint32_t)dev->idle_mw};
        }
        dev->samples_head = SIM_DEVICE_SAMPLES;
        dev->period_end_ns = dev->sample_ns;
    }
    __atomic_store_n(&m->ready, 1, __ATOMIC_RELEASE);
}

/* --- fields by name --------------------------------------------------------------------------------------------- */

struct field {
    const char *key;
    size_t offset;
    size_t size;
};

#define FIELD(type, member) {#member, offsetof(type, member), sizeof(((type *)0)->member)}

static const struct field machine_fields[] = {
    FIELD(struct sim_machine, clock),          FIELD(struct sim_machine, participants_wanted),
    FIELD(struct sim_machine, launch_ns),      FIELD(struct sim_machine, cuda_version),
    FIELD(struct sim_machine, devices),        FIELD(struct sim_machine, driver_version),
    FIELD(struct sim_machine, nvml_version),   FIELD(struct sim_machine, recoveries),
    FIELD(struct sim_machine, reaped),         FIELD(struct sim_machine, transitions),
    FIELD(struct sim_machine, undo_overflows), FIELD(struct sim_machine, epoch_us),
};

static const struct field device_fields[] = {
    FIELD(struct sim_device, name),
    FIELD(struct sim_device, uuid),
    FIELD(struct sim_device, serial),
    FIELD(struct sim_device, bus_id),
    FIELD(struct sim_device, memory),
    FIELD(struct sim_device, reserved),
    FIELD(struct sim_device, context_overhead),
    FIELD(struct sim_device, slice_ns),
    FIELD(struct sim_device, switch_ns),
    FIELD(struct sim_device, sample_ns),
    FIELD(struct sim_device, idle_mw),
    FIELD(struct sim_device, active_mw),
    FIELD(struct sim_device, limit_mw),
    FIELD(struct sim_device, h2d_bps),
    FIELD(struct sim_device, d2h_bps),
    FIELD(struct sim_device, d2d_bps),
    FIELD(struct sim_device, sm_clock_mhz),
    FIELD(struct sim_device, memory_clock_mhz),
    FIELD(struct sim_device, graphics_clock_mhz),
    FIELD(struct sim_device, temperature_idle_c),
    FIELD(struct sim_device, temperature_active_c),
    FIELD(struct sim_device, minor),
    FIELD(struct sim_device, sms),
    FIELD(struct sim_device, cc_major),
    FIELD(struct sim_device, cc_minor),
    FIELD(struct sim_device, threads_per_sm),
    FIELD(struct sim_device, bus_width),
    FIELD(struct sim_device, persistence),
    FIELD(struct sim_device, compute_mode),
    FIELD(struct sim_device, ecc),
    FIELD(struct sim_device, accounting),
    FIELD(struct sim_device, numa_node),
    FIELD(struct sim_device, pci_device_id),
    FIELD(struct sim_device, pci_subsystem_id),
    FIELD(struct sim_device, mig_capable),
    FIELD(struct sim_device, virtualization),
    FIELD(struct sim_device, gpm),
    FIELD(struct sim_device, energy_counter),
    FIELD(struct sim_device, remapped_correctable),
    FIELD(struct sim_device, remapped_uncorrectable),
    FIELD(struct sim_device, lost),
    FIELD(struct sim_device, ecc_volatile_correctable),
    FIELD(struct sim_device, ecc_volatile_uncorrectable),
    FIELD(struct sim_device, ecc_aggregate_correctable),
    FIELD(struct sim_device, ecc_aggregate_uncorrectable),
    FIELD(struct sim_device, clocks_event_reasons),
    FIELD(struct sim_device, mig_mode),
    FIELD(struct sim_device, held_power_ns),
    FIELD(struct sim_device, held_sw_thermal_ns),
    FIELD(struct sim_device, held_hw_thermal_ns),
    FIELD(struct sim_device, held_brake_ns),
    FIELD(struct sim_device, nvlinks),
    FIELD(struct sim_device, nvlink_tx_kib),
    FIELD(struct sim_device, nvlink_rx_kib),
    FIELD(struct sim_device, mps_server),
    FIELD(struct sim_device, licensed),
};

static void *find_field(struct sim_machine *m, int device, const char *key, size_t *size) {
    const struct field *fields = device < 0 ? machine_fields : device_fields;
    size_t count = device < 0 ? sizeof machine_fields / sizeof *fields : sizeof device_fields / sizeof *fields;
    char *base = device < 0 ? (char *)m : (char *)&m->device[device];
    if (device >= SIM_MAX_DEVICES)
        return NULL;
    for (size_t i = 0; i < count; i++)
        if (strcmp(fields[i].key, key) == 0) {
            *size = fields[i].size;
            return base + fields[i].offset;
        }
    return NULL;
}

int psim_set(struct sim_machine *m, int device, const char *key, uint64_t value) {
    size_t size = 0;
    void *at = find_field(m, device, key, &size);
    if (at == NULL || (size != 4 && size != 8))
        return -1;
    bool live = m->ready;
    if (live)
        machine_enter(m);
    if (size == 4)
        *(uint32_t *)at = (uint32_t)value;
    else
        *(uint64_t *)at = value;
    if (live) {
        machine_unlock(m);
        machine_wake(m);
    }
    return 0;
}

int psim_set_text(struct sim_machine *m, int device, const char *key, const char *value) {
    size_t size = 0;
    char *at = find_field(m, device, key, &size);
    if (at == NULL || size <= 8 || strlen(value) >= size)
        return -1;
    memset(at, 0, size);
    strcpy(at, value);
    return 0;
}

int psim_get(struct sim_machine *m, int device, const char *key, uint64_t *value) {
    size_t size = 0;
    const void *at = find_field(m, device, key, &size);
    if (at == NULL || (size != 4 && size != 8))
        return -1;
    *value = size == 4 ? *(const uint32_t *)at : *(const uint64_t *)at;
    return 0;
}

int psim_get_text(struct sim_machine *m, int device, const char *key, char *value, size_t size) {
    size_t have = 0;
    const char *at = find_field(m, device, key, &have);
    if (at == NULL || have <= 8)
        return -1;
    snprintf(value, size, "%s", at);
    return 0;
}

/* --- time and truth --------------------------------------------------------------------------------------------- */

static void bring_up(struct sim_machine *m) { /* locked */
    machine_lock(m);
    process_reap(m, true);
    engine_advance(m, machine_now(m));
    for (uint32_t d = 0; d < m->devices; d++)
        engine_touch(m, d);
}

uint64_t psim_now(struct sim_machine *m) {
    return machine_now(m);
}

uint64_t psim_advance(struct sim_machine *m, uint64_t ns) {
    if (m->clock != SIM_CLOCK_REAL)
        machine_set_virtual(m, machine_now(m) + ns);
    bring_up(m);
    uint64_t now = m->advanced_ns;
    machine_unlock(m);
    machine_wake(m);
    return now;
}

static bool empty(const struct sim_account *a) {
    return a->first_context_ns == 0 && a->memory_peak == 0 && a->launches == 0 && a->refused == 0 && a->kernels == 0;
}

static void fill(struct psim_truth *t, const struct sim_account *a) {
    t->busy_ns = a->busy_ns;
    t->fill_ns = a->fill_ns;
    t->copy_ns = a->copy_ns;
    t->kernels = a->kernels;
    t->launches = a->launches;
    t->graph_launches = a->graph_launches;
    memcpy(t->copy_bytes, a->copy_bytes, sizeof t->copy_bytes);
    t->memory = a->memory;
    t->memory_peak = a->memory_peak;
    t->overhead = a->overhead;
    t->refused = a->refused;
}

size_t psim_truth(struct sim_machine *m, struct psim_truth *out, size_t max) {
    size_t n = 0;
    bring_up(m);
    uint64_t first = m->retired_head > SIM_MAX_RETIRED ? m->retired_head - SIM_MAX_RETIRED : 0;
    for (uint64_t i = first; i < m->retired_head; i++) {
        const struct sim_retired *r = &m->retired[i % SIM_MAX_RETIRED];
        for (uint32_t d = 0; d < m->devices; d++) {
            if (empty(&r->account[d]))
                continue;
            if (n < max) {
                out[n] = (struct psim_truth){.pid = r->pid,
                                             .device = d,
                                             .killed = (uint32_t)r->killed,
                                             .start_time = r->start_time,
                                             .attached_ns = r->attached_ns,
                                             .ended_ns = r->ended_ns};
                memcpy(out[n].name, r->name, sizeof out[n].name);
                fill(&out[n], &r->account[d]);
            }
            n++;
        }
    }
    for (uint32_t i = 0; i < m->process_high; i++) {
        const struct sim_process *p = &m->process[i];
        for (uint32_t d = 0; p->state == SIM_PROCESS_LIVE && d < m->devices; d++) {
            if (empty(&p->account[d]))
                continue;
            if (n < max) {
                out[n] = (struct psim_truth){
                    .pid = p->pid, .device = d, .live = 1, .start_time = p->start_time, .attached_ns = p->attached_ns};
                memcpy(out[n].name, p->name, sizeof out[n].name);
                fill(&out[n], &p->account[d]);
            }
            n++;
        }
    }
    machine_unlock(m);
    return n;
}

int psim_device_truth(struct sim_machine *m, uint32_t d, struct psim_device_truth *out) {
    if (d >= m->devices)
        return -1;
    bring_up(m);
    const struct sim_device *dev = &m->device[d];
    *out = (struct psim_device_truth){.time_ns = dev->time_ns,
                                      .busy_ns = dev->busy_ns,
                                      .fill_ns = dev->fill_ns,
                                      .copy_ns = dev->copy_ns,
                                      .switched_ns = dev->switched_ns,
                                      .switches = dev->switches,
                                      .energy_mj = dev->energy_mj,
                                      .kernels = dev->kernels,
                                      .memory_used = dev->memory_used};
    memcpy(out->copy_bytes, dev->copy_bytes, sizeof out->copy_bytes);
    machine_unlock(m);
    return 0;
}

/* --- scripted calls --------------------------------------------------------------------------------------------- */

/* "cuMemAlloc" is every version and stream variant of it; a full symbol name is that symbol alone. */
static bool call_matches(const char *symbol, const char *asked) {
    size_t n = strlen(asked);
    if (strcmp(asked, "*") == 0)
        return true;
    if (n > 1 && asked[n - 1] == '*')
        return strncmp(symbol, asked, n - 1) == 0;
    if (strncmp(symbol, asked, n) != 0)
        return false;
    const char *rest = symbol + n;
    if (*rest == 0)
        return true;
    if (rest[0] == '_' && rest[1] == 'v') {
        rest += 2 + strspn(rest + 2, "0123456789");
    }
    return *rest == 0 || strcmp(rest, "_ptsz") == 0 || strcmp(rest, "_ptds") == 0;
}

static void arm(struct sim_machine *m) {
    for (unsigned c = 0; c < sim_call_count; c++) {
        uint8_t armed = 0;
        for (uint32_t i = 0; i < SIM_MAX_RULES; i++)
            armed |= m->rule[i].used && (m->rule[i].mask[c / 8] & (1u << (c % 8)));
        m->armed[c] = armed;
    }
}

int psim_script(struct sim_machine *m, const char *call, int device, uint32_t pid, uint64_t after, uint64_t times,
                int code, uint64_t delay_ns) {
    struct sim_rule rule = {
        .device = device, .pid = pid, .after = after, .times = times, .code = code, .delay_ns = delay_ns};
    bool any = false;
    for (unsigned c = 0; c < sim_call_count; c++)
        if (call_matches(sim_call_names[c].name, call)) {
            rule.mask[c / 8] |= (uint8_t)(1u << (c % 8));
            any = true;
        }
    if (!any)
        return -1;
    int at = -2;
    machine_lock(m);
    for (int i = 0; i < SIM_MAX_RULES && at < 0; i++)
        if (!m->rule[i].used) {
            at = i;
            m->rule[i] = rule;
            m->rule[i].used = 1;
            arm(m);
        }
    machine_unlock(m);
    return at;
}

int psim_unscript(struct sim_machine *m, int rule) {
    if (rule < 0 || rule >= SIM_MAX_RULES || !m->rule[rule].used)
        return -1;
    machine_lock(m);
    m->rule[rule].used = 0;
    arm(m);
    machine_unlock(m);
    return 0;
}

int psim_rule(struct sim_machine *m, int rule, uint64_t *seen, uint64_t *hit) {
    if (rule < 0 || rule >= SIM_MAX_RULES || !m->rule[rule].used)
        return -1;
    *seen = m->rule[rule].seen;
    *hit = m->rule[rule].hit;
    return 0;
}

int psim_call(struct sim_machine *m, unsigned index, const char **name, uint64_t *count, int *implemented) {
    if (index >= sim_call_count)
        return -1;
    *name = sim_call_names[index].name;
    *count = __atomic_load_n(&m->calls[index], __ATOMIC_RELAXED);
    *implemented = sim_call_names[index].implemented;
    return 0;
}

void psim_xid(struct sim_machine *m, uint32_t device, uint64_t xid) {
    if (device >= m->devices)
        return;
    machine_enter(m);
    device_xid(m, device, xid);
    machine_unlock(m);
}
