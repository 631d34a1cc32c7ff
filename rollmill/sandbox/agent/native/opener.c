/* Turns folders of the host into layers: a process that stayed where the host's paths can be seen, with the rights to clone mounts.
 *
 * Where layers can be stacked as descriptors it only opens them. On kernels that stack attached mounts only (before Linux 6.15) it also
 * keeps every layer attached, by number, and gives a box clones of them to move into its own mount namespace.
 */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPEN = 'O', ADOPT = 'A', CLONE = 'C', DROP = 'D' };

static const struct settings *s_;
static int userns;
static uint32_t last;

static int open_folder(const char *path) {
    uint64_t plain = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
    int layer = sys_open_tree(AT_FDCWD, path, TREE_CLONE);
    if (layer < 0) return -1;
    if ((userns >= 0 && sys_set_attributes(layer, "", TREE_EMPTY, plain | ATTR_IDMAP, userns) == 0) ||
        sys_set_attributes(layer, "", TREE_EMPTY, plain, -1) == 0) return layer;
    int number = errno;
    close(layer);
    errno = number;
    return -1;
}

static const char *place(uint32_t number) {
    static char at[64];
    snprintf(at, sizeof at, "%s/%u", s_->stage, number);
    return at;
}

/* 0 and its number in `last`. */
static int attach(int layer) {
    const char *at = place(++last);
    return mkdir(at, 0700) < 0 || sys_move_mount(layer, "", AT_FDCWD, at) < 0 ? -1 : 0;
}

/* Answers with an errno and a number; descriptors come beside when it is 0. */
static int answer(int fd, uint8_t *request, size_t size, int *fds, size_t num_fds) {
    int out[MAX_FDS], failed = 0;
    size_t num = 0;
    uint32_t numbers[MAX_FDS], reply[2] = {0, 0};
    size_t num_numbers = (size - 1) / 4 < MAX_FDS ? (size - 1) / 4 : MAX_FDS;
    memcpy(numbers, request + 1, num_numbers * 4);
    errno = EINVAL;
    switch (request[0]) {
    case OPEN:
        request[size] = 0;
        if ((out[0] = open_folder((char *)request + 1)) < 0) failed = 1;
        else if (s_->by_path) { failed = attach(out[0]) < 0; close(out[0]); reply[1] = last; }
        else num = 1;
        break;
    case ADOPT:
        failed = num_fds != 1 || attach(fds[0]) < 0;
        reply[1] = last;
        break;
    case CLONE:
        for (; num < num_numbers && !failed; num++) if ((out[num] = sys_open_tree(AT_FDCWD, place(numbers[num]), TREE_CLONE)) < 0) { failed = 1; break; }
        break;
    case DROP:
        for (size_t i = 0; i < num_numbers; i++) { umount2(place(numbers[i]), MNT_DETACH); rmdir(place(numbers[i])); }
        break;
    default: failed = 1;
    }
    if (failed) reply[0] = (uint32_t)errno;
    int sent = send_with(fd, reply, sizeof reply, out, failed ? 0 : num);
    for (size_t i = 0; i < num; i++) close(out[i]);
    for (size_t i = 0; i < num_fds; i++) close(fds[i]);
    return sent;
}

void open_layers(const struct settings *s, int fd, int ready_fd) {
    uint8_t request[4098];
    int fds[MAX_FDS];
    size_t size, num_fds;
    s_ = s;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | (s->by_path ? MS_PRIVATE : MS_SLAVE), NULL) < 0) _exit(1);
    if (s->by_path && mount("tmpfs", s->stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=700,size=4m") < 0) _exit(1);
    if (write(ready_fd, "", 1) != 1) _exit(1);
    int kept[] = {s->proc_fd, fd};
    if (kept[0] > kept[1]) { kept[0] = fd; kept[1] = s->proc_fd; }
    keep_only(kept, 2);
    userns = s->num_ids > 1 ? make_userns(s, 0, 0) : -1;
    while (receive(fd, request, sizeof request - 1, &size, fds, &num_fds) > 0) if (answer(fd, request, size, fds, num_fds) < 0) break;
    _exit(0);
}
