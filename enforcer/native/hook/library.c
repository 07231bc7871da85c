/* libpoolmeter_pages.so: what the enforcer does to pages from Python. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "slots.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int pm_pages_store_grant(int fd, const struct pm_grant *image, size_t size) {
    return size == sizeof *image ? pm_grant_store(fd, image) : -EINVAL;
}

/*
 * The number of dead slots folded, or -errno. Works in a child of its own: whoever truncates the page meanwhile raises
 * SIGBUS in the one that has it mapped. A raw clone without an exit signal, so that the caller's SIGCHLD handling sees
 * nothing of it.
 */
EXPORT int pm_pages_reclaim(int fd, int patience_ms) {
    long child = syscall(SYS_clone, 0, 0, 0, 0, 0);
    if (child < 0)
        return -errno;
    if (child == 0) {
        struct pm_view view;
        struct pm_identity identity;
        for (int s = SIGHUP; s <= SIGTERM; s++)
            signal(s, SIG_DFL); /* the caller's handlers mean nothing here */
        pm_identity_read(&identity);
        int outcome = -EBADMSG;
        if (pm_view_map_fd(fd, &view) == PM_PAGE_OK)
            outcome = pm_slots_reclaim(&view, fd, PM_NO_SLOT, &identity, patience_ms);
        _exit(outcome >= 0 ? (outcome > 100 ? 100 : outcome) : 101 + (outcome == -EBUSY));
    }
    int status;
    while (waitpid((pid_t)child, &status, __WALL) < 0)
        if (errno != EINTR)
            return -errno;
    if (!WIFEXITED(status))
        return -EFAULT;
    int code = WEXITSTATUS(status);
    return code == 101 ? -EBADMSG : code == 102 ? -EBUSY : code;
}
